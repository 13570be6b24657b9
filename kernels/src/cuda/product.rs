//! Matrix products by cuBLASLt: 16-bit operands with sums in f32, accumulation into the result, and
//! biases and GELU in the same kernel.
//!
//! For each kind of product, cuBLASLt proposes algorithms; the fastest on the first operands is
//! kept. Measuring waits for the device, once per shape. With [`set_tuning`], and while a graph is
//! captured, the first proposal is taken instead. cuBLAS is column-major: a row-major `[rows,
//! width]` is its column-major `width × rows`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::DType;
use candle_core::cuda_backend::cudarc;
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::{CudaSlice, CudaStream, result as driver, sys as cu};

use crate::tensor::gpu::{DevicePointer, Gpu};
use crate::{Error, Result};

/// Memory that algorithms may use besides operands and result; NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Number of proposals that are measured, rounds over all of them, and repetitions in a row. A
/// GPU's clock falls as it works, so the proposals take turns.
const PROPOSALS: usize = 8;
const ROUNDS: usize = 4;
const REPEATS: usize = 3;

static TUNING: AtomicBool = AtomicBool::new(true);

/// Whether to choose algorithms by measuring (the default). Otherwise cuBLASLt's first proposal is
/// used, which is the same in every process.
pub fn set_tuning(measure: bool) {
    TUNING.store(measure, Ordering::Relaxed);
}

/// An operand as stored: row-major `[rows, columns]`, contiguous; `transposed` if the product takes
/// its transpose.
#[derive(Clone, Copy)]
pub struct Operand {
    pub at: DevicePointer,
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    pub transposed: bool,
}

/// Operations on a product before it is stored. Pointers are to elements of the result's dtype.
#[derive(Clone, Copy)]
pub enum Epilogue {
    None,
    /// Adds `bias [columns]`.
    Bias(DevicePointer),
    /// GELU (tanh approximation) of the product plus bias. That sum is also stored: `before [rows,
    /// columns]`.
    Gelu {
        bias: Option<DevicePointer>,
        before: DevicePointer,
    },
    /// The product is the gradient of GELU's result; GELU's argument is `before [rows, columns]`.
    GeluBackward {
        before: DevicePointer,
    },
}

impl Epilogue {
    fn kind(self) -> sys::cublasLtEpilogue_t {
        use sys::cublasLtEpilogue_t as E;
        match self {
            Self::None => E::CUBLASLT_EPILOGUE_DEFAULT,
            Self::Bias(_) => E::CUBLASLT_EPILOGUE_BIAS,
            Self::Gelu { bias: Some(_), .. } => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Self::Gelu { bias: None, .. } => E::CUBLASLT_EPILOGUE_GELU_AUX,
            Self::GeluBackward { .. } => E::CUBLASLT_EPILOGUE_DGELU,
        }
    }

    fn bias(self) -> Option<DevicePointer> {
        match self {
            Self::Bias(bias) => Some(bias),
            Self::Gelu { bias, .. } => bias,
            Self::None | Self::GeluBackward { .. } => None,
        }
    }

    fn before(self) -> Option<DevicePointer> {
        match self {
            Self::Gelu { before, .. } | Self::GeluBackward { before } => Some(before),
            Self::None | Self::Bias(_) => None,
        }
    }
}

/// `y [rows, columns] = epilogue(a · b) (+ y, or + residual)`.
#[derive(Clone, Copy)]
pub struct Product {
    pub a: Operand,
    pub b: Operand,
    pub y: DevicePointer,
    pub y_dtype: DType,
    pub epilogue: Epilogue,
    /// Whether the product is added to the contents of `y`.
    pub accumulate: bool,
    /// A matrix `[rows, columns]` of the result's dtype, added before the result is rounded.
    pub residual: Option<DevicePointer>,
}

/// Everything that the choice of an algorithm depends on. Accumulation is not included: an
/// algorithm has one order of summation, so the first product that adds to a result gives the same
/// bits whether it is written or added to zeros.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    dims: [usize; 3],
    transposed: [bool; 2],
    dtypes: [DType; 3],
    epilogue: u32,
    residual: bool,
    /// Alignments of a, b, y, the epilogue's operands, and the residual: powers of two up to 256.
    alignments: [u32; 6],
}

/// cuBLASLt's description of a product, and the algorithm for it. Never destroyed: there are only
/// as many as shapes in a model.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Microseconds, and the number of proposals it was chosen from, if it was measured.
    measured: Option<(f32, usize)>,
}

/// Shared by the products of one stream, which run one after the other.
struct Products {
    stream: Arc<CudaStream>,
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    plans: HashMap<Key, Plan>,
    /// For products with an epilogue, whether the epilogue pays.
    pays: HashMap<Key, bool>,
}

// SAFETY: cuBLASLt's objects belong to no thread, and these are used under a lock.
unsafe impl Send for Products {}

static PRODUCTS: Mutex<Vec<Arc<Mutex<Products>>>> = Mutex::new(Vec::new());

fn failed(what: &str) -> impl Fn(lt::CublasError) -> Error {
    move |e| Error::gpu("product by cuBLASLt", format!("{what}: {e}"))
}

fn driver_failed(e: cudarc::driver::DriverError) -> Error {
    Error::gpu("product by cuBLASLt", e.to_string())
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        dtype => Err(Error::DType { op: "product by cuBLASLt", dtype }),
    }
}

/// The largest power of two, up to 256, that divides an address.
fn alignment(at: DevicePointer) -> u32 {
    1 << at.address().trailing_zeros().min(8)
}

impl Product {
    /// Rows and columns of the result, and the inner dimension.
    fn dims(&self) -> [usize; 3] {
        let [rows, inner] = if self.a.transposed {
            [self.a.columns, self.a.rows]
        } else {
            [self.a.rows, self.a.columns]
        };
        let columns = if self.b.transposed { self.b.rows } else { self.b.columns };
        [rows, columns, inner]
    }

    fn key(&self) -> Key {
        let (bias, before) = (self.epilogue.bias(), self.epilogue.before());
        Key {
            dims: self.dims(),
            transposed: [self.a.transposed, self.b.transposed],
            dtypes: [self.a.dtype, self.b.dtype, self.y_dtype],
            epilogue: self.epilogue.kind() as u32,
            residual: self.residual.is_some(),
            alignments: [
                Some(self.a.at),
                Some(self.b.at),
                Some(self.y),
                bias,
                before,
                self.residual,
            ]
            .map(|at| at.map_or(256, alignment)),
        }
    }

    /// Queues the product. False if cuBLASLt has no algorithm for it.
    ///
    /// # Errors
    /// Those of cuBLASLt or the driver.
    pub fn run(&self, gpu: &Gpu) -> Result<bool> {
        let [rows, columns, inner] = self.dims();
        if rows == 0 || columns == 0 {
            return Ok(true);
        }
        if inner == 0 {
            // An empty sum, which cuBLASLt does not accept.
            let plain = matches!(self.epilogue, Epilogue::None) && self.residual.is_none();
            if plain && !self.accumulate {
                gpu.zero(self.y, rows * columns, self.y_dtype.size_in_bytes(), "linear")?;
            }
            return Ok(plain);
        }
        let products = Products::of(gpu)?;
        let mut products = products.lock().unwrap_or_else(PoisonError::into_inner);
        let key = self.key();
        if let Some(plan) = products.plans.get(&key) {
            products.queue(self, plan, &plan.algorithm, self.y).map_err(failed("queueing"))?;
            return Ok(true);
        }
        let capturing = is_capturing(gpu.stream())?;
        let Some(plan) = products.plan(gpu, self, TUNING.load(Ordering::Relaxed) && !capturing)?
        else {
            return Ok(false);
        };
        products.queue(self, &plan, &plan.algorithm, self.y).map_err(failed("queueing"))?;
        if !capturing {
            products.plans.insert(key, plan);
        }
        Ok(true)
    }

    /// Whether this product, with its epilogue or residual, is faster than `apart` followed by the
    /// kernels that `rest` queues. Measured once, on the actual operands and results; both variants
    /// overwrite the results. If nothing is measured: whether cuBLASLt supports this product.
    ///
    /// # Errors
    /// Those of cuBLASLt, the driver or `rest`.
    pub fn pays(&self, gpu: &Gpu, apart: &Self, rest: &dyn Fn() -> Result<()>) -> Result<bool> {
        let [rows, columns, inner] = self.dims();
        if rows == 0 || columns == 0 || inner == 0 {
            return Ok(false);
        }
        let products = Products::of(gpu)?;
        let mut products = products.lock().unwrap_or_else(PoisonError::into_inner);
        let key = self.key();
        if let Some(pays) = products.pays.get(&key) {
            return Ok(*pays);
        }
        let capturing = is_capturing(gpu.stream())?;
        let measure = TUNING.load(Ordering::Relaxed) && !capturing;
        let fused = products.plan(gpu, self, measure)?;
        let plain =
            if measure && fused.is_some() { products.plan(gpu, apart, measure)? } else { None };
        let pays = match (&fused, &plain) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(fused), Some(plain)) => {
                let time = |product: &Self, plan: &Plan| {
                    products.measure(product, plan, &plan.algorithm, product.y)
                };
                // A product that cannot run does not pay.
                time(self, fused).unwrap_or(f32::INFINITY)
                    < time(apart, plain)? + products.time(rest)?
            }
        };
        if !capturing {
            for (key, plan) in [(key, fused), (apart.key(), plain)] {
                products.plans.extend(plan.map(|plan| (key, plan)));
            }
            products.pays.insert(key, pays);
        }
        Ok(pays)
    }
}

/// Whether a graph is being captured on the stream. Then nothing may wait for the stream.
fn is_capturing(stream: &CudaStream) -> Result<bool> {
    // SAFETY: the stream exists.
    let status =
        unsafe { driver::stream::is_capturing(stream.cu_stream()) }.map_err(driver_failed)?;
    Ok(status != cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

impl Products {
    fn of(gpu: &Gpu) -> Result<Arc<Mutex<Self>>> {
        let stream = gpu.stream();
        stream.context().bind_to_thread().map_err(driver_failed)?;
        let mut all = PRODUCTS.lock().unwrap_or_else(PoisonError::into_inner);
        // An entry keeps its stream alive, so no other stream has its handle.
        let of_stream = |entry: &&Arc<Mutex<Self>>| {
            let entry = entry.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::ptr_eq(&entry.stream, stream)
        };
        if let Some(found) = all.iter().find(of_stream) {
            return Ok(found.clone());
        }
        let handle = lt::create_handle().map_err(failed("creating a handle"))?;
        // SAFETY: a workspace is written before it is read.
        let workspace = unsafe { stream.alloc::<u8>(WORKSPACE) }.map_err(driver_failed)?;
        let products = Self {
            stream: stream.clone(),
            handle,
            workspace,
            plans: HashMap::new(),
            pays: HashMap::new(),
        };
        all.push(Arc::new(Mutex::new(products)));
        Ok(all[all.len() - 1].clone())
    }

    /// Queues `product` with its result at `y`.
    fn queue(
        &self,
        product: &Product,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        y: DevicePointer,
    ) -> std::result::Result<(), lt::CublasError> {
        use cudarc::driver::DevicePtr;
        let plus = product.residual.unwrap_or(y);
        let (alpha, beta) =
            (1.0_f32, if product.accumulate || product.residual.is_some() { 1.0_f32 } else { 0.0 });
        let [b, a, c] = plan.layouts;
        let (workspace, _) = self.workspace.device_ptr(&self.stream);
        // SAFETY: operands have the sizes of the layouts, which the operations have checked; the
        // stream's products use the workspace one after the other. Scalars are read before the call
        // returns.
        unsafe {
            point(plan.description, product.epilogue)?;
            // Columns in cuBLAS are rows here: yᵀ = bᵀ · aᵀ.
            lt::matmul(
                self.handle,
                plan.description,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                pointer(product.b.at),
                b,
                pointer(product.a.at),
                a,
                pointer(plus),
                c,
                pointer(y).cast_mut(),
                c,
                algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                self.stream.cu_stream().cast(),
            )
        }
    }

    /// Describes a product and chooses its algorithm; none if there is no algorithm.
    fn plan(&self, gpu: &Gpu, product: &Product, measure: bool) -> Result<Option<Plan>> {
        let describing = failed("describing a product");
        let (description, layouts) = describe(product, &describing)?;
        let proposals = self.proposals(product, description, layouts)?;
        if proposals.is_empty() {
            return Ok(None);
        }
        let mut plan = Plan { description, layouts, algorithm: proposals[0].algo, measured: None };
        if !measure || proposals.len() == 1 {
            return Ok(Some(plan));
        }
        // Measuring must not add to the real result repeatedly.
        let [rows, columns, _] = product.dims();
        let scratch = if product.accumulate {
            Some(gpu.output((rows, columns), product.y_dtype, "product by cuBLASLt")?)
        } else {
            None
        };
        let y = scratch.as_ref().map_or(product.y, |(_, at)| *at);
        let count = proposals.len();
        let mut times = vec![0.0_f32; count];
        for _ in 0..ROUNDS {
            for (proposal, time) in proposals.iter().zip(&mut times) {
                // A proposal that cannot run is not taken.
                *time += self.measure(product, &plan, &proposal.algo, y).unwrap_or(f32::INFINITY);
            }
        }
        let best = proposals
            .iter()
            .zip(times)
            .filter(|(_, time)| time.is_finite())
            .min_by(|a, b| a.1.total_cmp(&b.1));
        let best = best.map(|(proposal, time)| {
            plan.algorithm = proposal.algo;
            time / ROUNDS as f32
        });
        plan.measured = best.map(|time| (time * 1e3, count));
        Ok(Some(plan))
    }

    fn proposals(
        &self,
        product: &Product,
        description: sys::cublasLtMatmulDesc_t,
        [b, a, c]: [sys::cublasLtMatrixLayout_t; 3],
    ) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        let asking = failed("asking for algorithms");
        let preference = lt::create_matmul_pref().map_err(&asking)?;
        let mut found = Vec::with_capacity(PROPOSALS);
        let mut count = 0;
        let [of_a, of_b, of_y, _, _, of_residual] = product.key().alignments;
        let of_c = if product.residual.is_some() { of_residual } else { of_y };
        // SAFETY: the objects exist; each attribute has its documented type; `found` has the
        // requested room.
        let status = unsafe {
            let set = |attribute, value: &dyn Fn() -> (*const c_void, usize)| {
                let (at, size) = value();
                lt::set_matmul_pref_attribute(preference, attribute, at, size).map_err(&asking)
            };
            let workspace = WORKSPACE as u64;
            set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &|| {
                (std::ptr::from_ref(&workspace).cast(), 8)
            })?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &|| {
                (std::ptr::from_ref(&of_b).cast(), 4)
            })?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &|| {
                (std::ptr::from_ref(&of_a).cast(), 4)
            })?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &|| {
                (std::ptr::from_ref(&of_c).cast(), 4)
            })?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &|| {
                (std::ptr::from_ref(&of_y).cast(), 4)
            })?;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description,
                b,
                a,
                c,
                c,
                preference,
                PROPOSALS as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
                found.set_len((count.max(0) as usize).min(PROPOSALS));
            }
            let _ = lt::destroy_matmul_pref(preference);
            status
        };
        match status {
            sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
            | sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => {}
            status => return Err(asking(lt::CublasError(status))),
        }
        found.retain(|proposal: &sys::cublasLtMatmulHeuristicResult_t| {
            proposal.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && proposal.workspaceSize <= WORKSPACE
        });
        Ok(found)
    }

    /// Milliseconds of one product by this algorithm.
    fn measure(
        &self,
        product: &Product,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        y: DevicePointer,
    ) -> Result<f32> {
        self.time(&|| self.queue(product, plan, algorithm, y).map_err(failed("measuring")))
    }

    /// Milliseconds of the work that `queue` queues.
    fn time(&self, queue: &dyn Fn() -> Result<()>) -> Result<f32> {
        let event = || {
            self.stream
                .record_event(Some(cu::CUevent_flags::CU_EVENT_DEFAULT))
                .map_err(driver_failed)
        };
        queue()?;
        let before = event()?;
        for _ in 0..REPEATS {
            queue()?;
        }
        let after = event()?;
        Ok(before.elapsed_ms(&after).map_err(driver_failed)? / REPEATS as f32)
    }
}

fn pointer(at: DevicePointer) -> *const c_void {
    at.address() as *const c_void
}

/// # Safety
/// The description exists, and the attribute has the type T.
unsafe fn set<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> std::result::Result<(), lt::CublasError> {
    // SAFETY: the caller's promise.
    unsafe {
        lt::set_matmul_desc_attribute(
            description,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

/// Sets the addresses of an epilogue's operands in a description.
///
/// # Safety
/// The description exists.
unsafe fn point(
    description: sys::cublasLtMatmulDesc_t,
    epilogue: Epilogue,
) -> std::result::Result<(), lt::CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as D;
    // SAFETY: both attributes are pointers.
    unsafe {
        if let Some(bias) = epilogue.bias() {
            set(description, D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.address())?;
        }
        if let Some(before) = epilogue.before() {
            set(description, D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &before.address())?;
        }
    }
    Ok(())
}

type Description = (sys::cublasLtMatmulDesc_t, [sys::cublasLtMatrixLayout_t; 3]);

/// The product and its matrices in cuBLASLt's view: transposed, the second operand first.
fn describe(
    product: &Product,
    describing: &impl Fn(lt::CublasError) -> Error,
) -> Result<Description> {
    use sys::cublasLtMatmulDescAttributes_t as D;
    let [rows, columns, _] = product.dims();
    let single = sys::cudaDataType::CUDA_R_32F;
    let description = lt::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, single)
        .map_err(describing)?;
    let layout = |operand: &Operand| {
        let (width, height) = (operand.columns as u64, operand.rows as u64);
        lt::create_matrix_layout(data_type(operand.dtype)?, width, height, width as i64)
            .map_err(describing)
    };
    let y = lt::create_matrix_layout(
        data_type(product.y_dtype)?,
        columns as u64,
        rows as u64,
        columns as i64,
    );
    let layouts = [layout(&product.b)?, layout(&product.a)?, y.map_err(describing)?];
    let operation = |transposed| i32::from(transposed); // CUBLAS_OP_N, CUBLAS_OP_T
    // SAFETY: the description exists; each attribute has its documented type.
    unsafe {
        set(description, D::CUBLASLT_MATMUL_DESC_TRANSA, &operation(product.b.transposed))
            .map_err(describing)?;
        set(description, D::CUBLASLT_MATMUL_DESC_TRANSB, &operation(product.a.transposed))
            .map_err(describing)?;
        set(description, D::CUBLASLT_MATMUL_DESC_EPILOGUE, &product.epilogue.kind())
            .map_err(describing)?;
        if product.epilogue.before().is_some() {
            set(description, D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(columns as i64))
                .map_err(describing)?;
        }
        point(description, product.epilogue).map_err(describing)?;
    }
    Ok((description, layouts))
}
