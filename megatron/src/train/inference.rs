//! A model without an optimizer, loaded over its ranks for generation and evaluation.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::model::{ModelBuilder, bucket_limit, declare_stage, placements};
use super::trainer::NoGradients;
use crate::comm::{Group, ReduceOp};
use crate::config::{ModelConfig, ParallelConfig};
use crate::context_parallel::ContextParallel;
use crate::data::Loader;
use crate::params::{BucketLimit, Placements, Residence, Role, ShardRef, StateKind, StoreOptions};
use crate::pipeline::{SavedInputs, Stage, forward_only};
use crate::tensor_parallel::{Phase, TensorParallel};
use crate::topology::{ProcessGroups, RankGrid, ReplicaGroups};
use crate::{Result, checkpoint};

/// What replicas share, and where a rank keeps its part.
pub(super) struct Sharding {
    pub replicas: ReplicaGroups,
    pub weights_in: Residence,
    pub optimizer_in: Residence,
}

impl Sharding {
    fn none(replicas: Group) -> Self {
        Self {
            replicas: ReplicaGroups::whole(replicas),
            weights_in: Residence::Device,
            optimizer_in: Residence::Device,
        }
    }
}

/// One rank's layers, with weights that are not initialized yet. Nothing is sharded without
/// `sharding`, which also says where weights and the optimizer's elements are kept.
pub(super) fn build_stage(
    parallel: &ParallelConfig,
    model: &dyn ModelBuilder,
    groups: &ProcessGroups,
    sharding: Option<Sharding>,
    hidden: usize,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Stage> {
    let (chunks, builder) = declare_stage(parallel, model, groups.pp.rank())?;
    let (placements, limit) = match &sharding {
        Some(_) => (placements(parallel), bucket_limit(parallel)),
        None => (Placements::REPLICATED, BucketLimit::Elements(parallel.bucket_size)),
    };
    let Sharding { replicas, weights_in, optimizer_in } =
        sharding.unwrap_or_else(|| Sharding::none(groups.replicas.clone()));
    let mut params = builder.build(&StoreOptions {
        dtype,
        device: device.clone(),
        limit,
        placements,
        weights_in,
        optimizer_in,
        replica: replicas.replica(),
        tp: groups.tp.size(),
        tp_rank: groups.tp.rank(),
    })?;
    params.lend_over(replicas.shards, parallel.zero_reshard_after_forward);
    Ok(Stage {
        chunks,
        params,
        tp: TensorParallel::new(groups.tp.clone(), parallel.sequence_parallel),
        cp: ContextParallel::new(groups.cp.clone()),
        pp: groups.pp.clone(),
        hidden,
        dtype,
        device: device.clone(),
        seed,
        saved_inputs: SavedInputs::default(),
    })
}

/// One rank's share of a model for generation and evaluation.
pub struct Inference {
    /// This rank's groups.
    pub groups: ProcessGroups,
    /// This rank's layers and parameters.
    pub stage: Stage,
}

impl Inference {
    /// Builds this rank's share of a model. Its weights must be loaded afterwards. Collective over
    /// `world`.
    ///
    /// # Errors
    /// If the layout does not fit the model or the world.
    pub fn new(
        config: &ModelConfig,
        model: &dyn ModelBuilder,
        parallel: &ParallelConfig,
        world: Group,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let groups = ProcessGroups::new(world, RankGrid::from_config(parallel)?)?;
        let stage =
            build_stage(parallel, model, &groups, None, config.hidden_size, 0, dtype, device)?;
        stage.cp.connect(device)?;
        Ok(Self { groups, stage })
    }

    /// Loads this rank's weights from the checkpoint in folder `path` (one `iter_…`).
    ///
    /// # Errors
    /// If the checkpoint is damaged or belongs to another model.
    pub fn load(&self, path: &Path) -> Result<()> {
        let stored = self.stage.params.iter().filter(|(_, p)| !matches!(p.role, Role::TiedUse(_)));
        let shards = stored.map(|(id, param)| {
            Ok(ShardRef {
                name: param.spec.name.clone(),
                kind: StateKind::Param,
                global_shape: param.spec.shape.clone(),
                partition: None,
                pieces: param.pieces.clone(),
                data: self.stage.params.weight(id)?.flatten_all()?.into(),
            })
        });
        checkpoint::load(path, &shards.collect::<Result<Vec<_>>>()?)
    }

    /// Returns the mean loss per unmasked token over the first `samples` samples of `loader`, and
    /// the number of these tokens. Calls `progress` with the number of samples done. Collective
    /// over the world: samples are distributed over dp, and under cp the loader gives this rank's
    /// part of each.
    ///
    /// # Errors
    /// If data cannot be read or a peer fails.
    pub fn evaluate(
        &self,
        loader: &Loader,
        samples: u64,
        micro_batch_size: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(f64, f64)> {
        let (rank, dp) = (self.groups.dp_rank() as u64, self.groups.dp_size() as u64);
        let schedule = forward_only(self.groups.pp.size(), self.stage.chunks.len(), 1)?;
        let (mut loss, mut tokens) = (0f64, 0f64);
        for first in (0..samples).step_by((micro_batch_size * dp) as usize) {
            // The last microbatches may be short or empty.
            let start = (first + rank * micro_batch_size).min(samples);
            let count = micro_batch_size.min(samples - start);
            if count > 0 {
                let batch = loader.read(start, (0..count).collect())?;
                tokens += batch.counted;
                loss += self
                    .stage
                    .run(&schedule, &[batch], Phase::Evaluate, 0.0, &mut NoGradients)?
                    .sum()?;
            }
            progress((first + micro_batch_size * dp).min(samples));
        }
        // Every stage and tp rank counted the same tokens (cp ranks counted different ones), and
        // every tp rank of the last stage computed the same losses. Only one of them contributes to
        // the sums.
        let once = self.groups.tp.rank() == 0;
        let tokens = if once && self.groups.pp.rank() == 0 { tokens } else { 0.0 };
        let sums = Tensor::from_vec(vec![if once { loss } else { 0.0 }, tokens], 2, &Device::Cpu)?;
        self.groups.world.all_reduce(&sums, ReduceOp::Sum)?.wait()?;
        let sums = sums.to_vec1::<f64>()?;
        Ok((sums[0] / sums[1], sums[1]))
    }
}
