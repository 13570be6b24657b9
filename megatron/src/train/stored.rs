//! A model that is known only by a checkpoint's tensors, which suffices to write them for another
//! layout.

use std::ops::Range;
use std::path::Path;

use super::model::{Ends, Layout, ModelBuilder};
use super::state::with_parallel;
use crate::checkpoint::{self, Manifest, TensorEntry};
use crate::config::{ParallelConfig, PartitionMethod, Recompute};
use crate::params::{Init, ParamSpec, ParamsBuilder, Partition, StateKind};
use crate::pipeline::Chunk;
use crate::{Error, Result};

/// The tensors of a checkpoint as a model of `pp · v` parts of equal size. The assignment of
/// tensors to layers is unknown and not needed, because a run under any layout can read any file.
struct StoredModel {
    specs: Vec<ParamSpec>,
    /// The tensors of each part, by index.
    runs: Vec<Range<usize>>,
}

impl StoredModel {
    fn new(manifest: &Manifest, parallel: &ParallelConfig) -> Result<Self> {
        let tp = parallel.tensor_model_parallel_size;
        let params = manifest.tensors.iter().filter(|tensor| tensor.kind == StateKind::Param);
        let spec = |tensor| {
            spec(tensor, tp).map_err(|why| {
                Error::checkpoint(manifest.folder(), format!("{}: {why}", tensor.name))
            })
        };
        let specs: Vec<ParamSpec> = params.map(spec).collect::<Result<_>>()?;
        let count = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_size;
        let numel = |spec: &ParamSpec| spec.shape.iter().product::<usize>() as u128;
        let total: u128 = specs.iter().map(numel).sum();
        let (mut runs, mut start, mut sum) = (Vec::new(), 0, 0);
        for (i, spec) in specs.iter().enumerate() {
            sum += numel(spec);
            if sum * count as u128 >= total * (runs.len() + 1) as u128 && runs.len() + 1 < count {
                runs.push(start..i + 1);
                start = i + 1;
            }
        }
        runs.push(start..specs.len());
        runs.resize(count, specs.len()..specs.len());
        Ok(Self { specs, runs })
    }
}

fn spec(tensor: &TensorEntry, tp: usize) -> std::result::Result<ParamSpec, String> {
    let shape = tensor.shape.clone();
    let partition = tensor.partition.ok_or(
        "the checkpoint does not record how it is sharded over tensor-parallel ranks, because an \
         early version wrote it; resume the run and save again",
    )?;
    let mut padded_dim0 = shape.first().copied().unwrap_or(1);
    if let Partition::Split { dim, parts } = partition {
        let length =
            *shape.get(dim).ok_or("it is sharded along a dimension that it does not have")?;
        if dim == 0 && parts == 1 {
            padded_dim0 = padded_dim0.next_multiple_of(tp);
        } else if parts == 0 || !length.is_multiple_of(parts * tp) {
            return Err(format!(
                "dimension {dim} of {shape:?}, with {parts} parts, cannot be split evenly over tp {tp}"
            ));
        }
    }
    Ok(ParamSpec {
        name: tensor.name.clone(),
        shape,
        partition,
        padded_dim0,
        init: Init::Zeros,
        weight_decay: false,
        tie_group: None,
        grad_partial_over_tp: false,
    })
}

impl ModelBuilder for StoredModel {
    fn num_layers(&self) -> usize {
        self.runs.len()
    }

    fn chunk(&self, _: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        for run in &self.runs[layers] {
            self.specs[run.clone()].iter().for_each(|spec| _ = params.declare(spec.clone()));
        }
        Ok(Chunk { input: None, layers: Vec::new(), output: None, recompute: Recompute::None })
    }
}

/// Writes the checkpoint with this manifest, of any model, as `dir/iter_…` for a run under
/// `parallel`; see [`checkpoint::reshard`]. Tensors are distributed evenly over the ranks' files,
/// so a file may differ from what the run itself would write.
///
/// # Errors
/// If the manifest does not record how tensors are split (older versions did not), if the layout
/// does not split a tensor evenly, or as [`checkpoint::reshard`].
pub fn reshard_tensors(
    manifest: &Manifest,
    dir: &Path,
    parallel: &ParallelConfig,
    sidecars: &[&str],
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<bool> {
    let uniform = ParallelConfig { partition: PartitionMethod::Uniform, ..parallel.clone() };
    let layout = Layout::new(&uniform, &StoredModel::new(manifest, parallel)?)?;
    let ranks = (0..layout.world_size()).map(|rank| layout.written(rank)).collect();
    let state = with_parallel(&manifest.state, parallel)?;
    checkpoint::reshard(manifest, dir, &state, ranks, sidecars, progress)
}
