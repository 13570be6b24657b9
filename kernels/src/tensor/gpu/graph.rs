//! CUDA graphs: [`crate::tensor::graph`] by capturing the device's stream.
//!
//! Tensors made during a capture become nodes that allocate and free memory. CUDA keeps their
//! addresses as long as the graph lives (CUDA C++ Programming Guide, "Graph Memory Nodes"), in
//! memory of the graphs' own, apart from the streams' pool. So each such tensor must be freed
//! within the capture. A tensor from before must not be freed there: that would be a node too, and
//! CUDA refuses it. Lists that are found by their values (`tensor::constants`) are made before and
//! may be dropped after, so the graph keeps the lists that it used.

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc;
use candle_core::{Device, Tensor};
use cudarc::driver::{CudaGraph, CudaStream, DriverError, result, sys};

use super::Gpu;
use crate::{Error, Result};

const OP: &str = "graph";

thread_local! {
    /// Tensors that the graph under recording keeps; none if this thread is not recording.
    static KEPT: RefCell<Option<Vec<Tensor>>> = const { RefCell::new(None) };
}

/// Makes the graph under recording on this thread, if any, keep a tensor.
pub fn keep(t: &Tensor) {
    KEPT.with_borrow_mut(|kept| {
        if let Some(kept) = kept {
            kept.push(t.clone());
        }
    });
}

/// Refuses an operation that a graph cannot hold.
///
/// # Errors
/// If this thread is recording a graph.
pub fn refuse(op: &str) -> Result<()> {
    let recording = KEPT.with_borrow(Option::is_some);
    if recording {
        return Err(Error::gpu(
            op,
            "values of the host cannot be part of a graph, which would go on with them as they are now",
        ));
    }
    Ok(())
}

/// Ends this thread's recording, also on panic.
struct Recording<'a>(&'a Arc<CudaStream>);

impl<'a> Recording<'a> {
    fn begin(stream: &'a Arc<CudaStream>) -> std::result::Result<Self, DriverError> {
        // Thread-local mode: communication threads continue undisturbed.
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        KEPT.set(Some(Vec::new()));
        Ok(Self(stream))
    }

    fn end(self) -> std::result::Result<(Option<CudaGraph>, Vec<Tensor>), DriverError> {
        let kept = KEPT.take().unwrap_or_default();
        Ok((end_capture(self.0)?, kept))
    }
}

/// Ends a capture even after an earlier failure. cudarc would otherwise report an error from a
/// dropped tensor instead, and leave the stream capturing.
fn end_capture(stream: &Arc<CudaStream>) -> std::result::Result<Option<CudaGraph>, DriverError> {
    let before = stream.context().check_err();
    // The graph frees all of its memory itself, so nothing has to be freed before the next launch.
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
    before.map(|()| graph)
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // Reached only if recording panicked.
        if KEPT.take().is_some() {
            let _ = end_capture(self.0);
        }
    }
}

/// See [`crate::tensor::graph::Graph`].
pub struct Graph {
    graph: CudaGraph,
    num_operations: usize,
    /// Read by the graph's kernels.
    _kept: Vec<Tensor>,
}

// SAFETY: the driver's graphs belong to no thread, but must not be used by two at a time. The only
// owner of a graph is alone.
unsafe impl Send for Graph {}

fn failed(e: DriverError) -> Error {
    Error::gpu(OP, e.to_string())
}

pub fn record<E: From<Error>>(
    device: &Device,
    f: impl FnOnce() -> std::result::Result<(), E>,
) -> std::result::Result<Graph, E> {
    let gpu = Gpu::on(device, OP)?;
    let stream = gpu.stream();
    gpu.give_back_pool()?;
    let recording = Recording::begin(stream).map_err(failed)?;
    let outcome = f();
    let ended = recording.end().map_err(failed);
    // The first failure explains the failure of the capture.
    outcome?;
    let (graph, kept) = ended?;
    let graph = graph.ok_or_else(|| Error::gpu(OP, "nothing was recorded"))?;
    let num_operations = check(&graph)?;
    graph.upload().map_err(failed)?;
    Ok(Graph { graph, num_operations, _kept: kept })
}

/// Number of a graph's operations.
///
/// # Errors
/// If one of them reads or writes host memory, or calls the host.
fn check(graph: &CudaGraph) -> Result<usize> {
    use sys::CUgraphNodeType as T;
    let mut count = 0;
    // SAFETY: the graph exists; without a buffer, the call only returns the number of nodes.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut count) }
        .result()
        .map_err(failed)?;
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: there is room for that many.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &mut count) }
        .result()
        .map_err(failed)?;
    for node in nodes {
        let mut kind = T::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of the graph.
        unsafe { sys::cuGraphNodeGetType(node, &mut kind) }.result().map_err(failed)?;
        match kind {
            T::CU_GRAPH_NODE_TYPE_HOST => {
                return Err(Error::gpu(
                    OP,
                    "a function of the host was recorded, which cannot be repeated",
                ));
            }
            T::CU_GRAPH_NODE_TYPE_MEMCPY => {
                let mut copy = MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
                let at = copy.as_mut_ptr();
                // SAFETY: the node is a copy. Its ends are read as plain C numbers, because zeroed
                // fields are not values of the enumeration.
                let ends = unsafe {
                    sys::cuGraphMemcpyNodeGetParams(node, at).result().map_err(failed)?;
                    [&raw const (*at).srcMemoryType, &raw const (*at).dstMemoryType]
                        .map(|end| end.cast::<u32>().read())
                };
                if ends.contains(&(sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32)) {
                    return Err(Error::gpu(
                        OP,
                        "a copy of the host's memory was recorded, which cannot be repeated",
                    ));
                }
            }
            _ => {}
        }
    }
    Ok(count)
}

impl Graph {
    pub fn launch(&self) -> Result<()> {
        self.graph.launch().map_err(failed)
    }

    pub fn num_operations(&self) -> usize {
        self.num_operations
    }
}

impl Gpu {
    /// Returns the memory that the pool keeps for later to the device, because graphs have memory
    /// of their own. Waits for the device.
    fn give_back_pool(&self) -> Result<()> {
        let context = self.stream().context();
        self.stream().synchronize().map_err(failed)?;
        // SAFETY: the device exists. Writing 0 to these attributes resets the peaks to the current
        // use.
        unsafe {
            let pool = result::device::get_default_mem_pool(context.cu_device()).map_err(failed)?;
            sys::cuMemPoolTrimTo(pool, 0).result().map_err(failed)?;
            use sys::CUmemPool_attribute as A;
            for largest in [A::CU_MEMPOOL_ATTR_USED_MEM_HIGH, A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH]
            {
                let mut zero = 0_u64;
                result::mem_pool::set_attribute(
                    pool,
                    largest,
                    std::ptr::from_mut(&mut zero).cast(),
                )
                .map_err(failed)?;
            }
        }
        Ok(())
    }
}
