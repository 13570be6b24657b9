//! The interface of a model to the trainer, and the distribution of its layers over ranks.

use std::ops::Range;

use candle_core::Device;
use kernels::tensor::device::computes_ahead;

use crate::Result;
use crate::config::{Offload, ParallelConfig, PartitionMethod, Recompute};
use crate::optim::written;
use crate::params::{
    BucketLayout, BucketLimit, ParamShare, ParamsBuilder, Placements, Replica, Residence,
};
use crate::pipeline::{Chunk, ChunkCosts, Costs, matches_of_types, partition};
use crate::topology::{Axis, RankGrid};

/// The ends of the model that a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Whether it holds the embedding.
    pub first: bool,
    /// Whether it holds the final normalization, output matrix and loss.
    pub last: bool,
}

/// Elements per token that a rank saves between a layer's forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedActivations {
    /// Without full recompute; selective recompute is taken into account.
    pub all: u64,
    /// With full recompute: the layer's input alone.
    pub input: u64,
}

/// Builds one rank's share of a model.
///
/// A model must give its number of layers and build its chunks. The other methods serve
/// partitioning by parameters or operations, delayed weight gradients, and the memory estimate.
pub trait ModelBuilder {
    /// Name of the architecture in checkpoints. Tools know the settings of `gpt`; for other names
    /// they know only the tensors.
    fn architecture(&self) -> &str {
        "custom"
    }
    /// Number of layers between input and output.
    fn num_layers(&self) -> usize;
    /// Builds the chunk with these layers and declares its parameters in forward order.
    ///
    /// # Errors
    /// If the model cannot be split this way.
    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk>;
    /// Number of parameters of every layer, for partitioning. By default all layers have the same
    /// number.
    fn layer_params(&self) -> Vec<u64> {
        vec![1; self.num_layers()]
    }
    /// Number of parameters of the input and of the output, for partitioning.
    fn end_params(&self) -> (u64, u64) {
        (0, 0)
    }
    /// Operations of every layer and of the output, for partitioning, in any unit.
    fn flops(&self) -> (Vec<u64>, u64) {
        (self.layer_params(), 0)
    }
    /// The costs of the passes of every layer, without full recompute, and those of the output. The
    /// output has no separate weight-gradient pass, because its forward computes them. By default
    /// forward, input gradients and weight gradients have equal costs.
    fn costs(&self) -> (Vec<ChunkCosts>, ChunkCosts) {
        (vec![ChunkCosts::EVEN; self.num_layers()], ChunkCosts::default())
    }
    /// Elements per token that a layer saves on a rank, at least. The default, 0, means unknown.
    fn saved_activations(&self) -> SavedActivations {
        SavedActivations { all: 0, input: 0 }
    }
    /// Whether the input and the output share one matrix, as with a tied token embedding.
    fn tied(&self) -> bool {
        false
    }
}

/// The chunks of pipeline stage `stage`, and their parameters in forward order.
///
/// # Errors
/// If the layers cannot be distributed over the stages, or the model cannot be split this way.
pub(super) fn declare_stage(
    parallel: &ParallelConfig,
    model: &dyn ModelBuilder,
    stage: usize,
) -> Result<(Vec<Chunk>, ParamsBuilder)> {
    let (pp, v) = (parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size);
    let layers = layers_of_chunks(parallel, model)?;
    let mut params = ParamsBuilder::default();
    let mut chunks = Vec::new();
    for chunk in 0..v {
        let virtual_stage = chunk * pp + stage;
        let ends = Ends { first: virtual_stage == 0, last: virtual_stage == pp * v - 1 };
        chunks.push(model.chunk(ends, layers[virtual_stage].clone(), &mut params)?);
        params.next_chunk();
    }
    params.set_units(chunks.iter().flat_map(Chunk::units));
    Ok((chunks, params))
}

/// What the replicas of a run shard. Weights that are kept elsewhere are gathered from there even
/// by one rank.
pub(super) fn placements(parallel: &ParallelConfig) -> Placements {
    let one = parallel.num_shards() == 1 && parallel.param_offload == Offload::None;
    Placements::of_zero_stage(parallel.zero_stage, one)
}

/// Where a rank on `device` keeps what is offloaded so.
pub(super) fn residence(offload: &Offload, device: &Device) -> Residence {
    match offload {
        Offload::Cpu if computes_ahead(device) => Residence::Host,
        Offload::None | Offload::Cpu => Residence::Device,
        Offload::Nvme(folder) => Residence::Files(folder.clone()),
    }
}

/// What a bucket of a run holds at most.
pub(super) fn bucket_limit(parallel: &ParallelConfig) -> BucketLimit {
    let delays = parallel.delay_wgrad_compute;
    BucketLimit::of(placements(parallel), parallel.bucket_size, delays)
}

/// Where the parameters of stage `stage` lie.
///
/// # Errors
/// If the model cannot be cut this way.
pub(super) fn layout_of_stage(
    parallel: &ParallelConfig,
    model: &dyn ModelBuilder,
    stage: usize,
) -> Result<BucketLayout> {
    let limit = bucket_limit(parallel);
    let tp = parallel.tensor_model_parallel_size;
    Ok(declare_stage(parallel, model, stage)?.1.place(limit, parallel.num_replicas(), tp))
}

/// The names of types: of the layers of a chunk with each layer alone, of the input, and of the
/// output.
type Types = (Vec<Vec<&'static str>>, Option<&'static str>, Option<&'static str>);

fn types(model: &dyn ModelBuilder) -> Result<Types> {
    let (n, params) = (model.num_layers(), &mut ParamsBuilder::default());
    let mut chunk = |first, last, layers| model.chunk(Ends { first, last }, layers, params);
    let input = chunk(true, false, 0..0)?.input.map(|input| input.type_name());
    let layers = (0..n).map(|layer| {
        let chunk = chunk(false, false, layer..layer + 1)?;
        Ok(chunk.layers.iter().map(|layer| layer.type_name()).collect())
    });
    let layers = layers.collect::<Result<_>>()?;
    let output = chunk(false, true, n..n)?.output.map(|output| output.type_name());
    Ok((layers, input, output))
}

/// The layers of each virtual stage.
pub(super) fn layers_of_chunks(
    parallel: &ParallelConfig,
    model: &dyn ModelBuilder,
) -> Result<Vec<Range<usize>>> {
    let (layer_weights, (first_extra, last_extra)) = match &parallel.partition {
        PartitionMethod::Flops => {
            let (layers, head) = model.flops();
            (layers, (0, head))
        }
        PartitionMethod::Type(regex) => {
            let (layers, input, output) = types(model)?;
            matches_of_types(regex, &layers, input, output)?
        }
        _ => (model.layer_params(), model.end_params()),
    };
    let num_virtual_stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_size;
    partition(&parallel.partition, &layer_weights, first_extra, last_extra, num_virtual_stages)
}

/// The costs of the passes of each virtual stage.
///
/// # Errors
/// If the layers cannot be distributed over the stages.
pub(super) fn costs(
    parallel: &ParallelConfig,
    model: &dyn ModelBuilder,
    recompute: Recompute,
) -> Result<Costs> {
    let (layers, head) = model.costs();
    let dealt = layers_of_chunks(parallel, model)?;
    let last = dealt.len() - 1;
    let virtual_stages = dealt.into_iter().enumerate().map(|(stage, range)| {
        let mut sum = if stage == last { head } else { ChunkCosts::default() };
        for (segment, again) in recompute.segments(range.len()) {
            let end = segment.end;
            for i in segment {
                let mut layer = layers[range.start + i];
                if again {
                    // The output of a segment's last layer is not recomputed.
                    layer.input_gradients +=
                        if i + 1 == end { layer.recompute } else { layer.forward };
                    // A recomputed segment saves only its input, which is negligible next to the
                    // operands of delayed weight-gradient products.
                    layer.activations = 0;
                }
                sum = sum + layer;
            }
        }
        sum
    });
    Costs::new(parallel.pipeline_model_parallel_size, virtual_stages.collect())
}

/// The plan of a checkpoint: which rank of a layout writes which part of a model's state. It can be
/// made without running the ranks.
pub struct Layout {
    grid: RankGrid,
    /// Copies of all shards.
    num_copies: usize,
    /// Where the parameters lie on the ranks of each pipeline stage.
    stages: Vec<BucketLayout>,
}

impl Layout {
    /// The layout of a run under `parallel`.
    ///
    /// # Errors
    /// If the model cannot be split this way.
    pub fn new(parallel: &ParallelConfig, model: &dyn ModelBuilder) -> Result<Self> {
        let grid = RankGrid::from_config(parallel)?;
        let stages = 0..parallel.pipeline_model_parallel_size;
        let stages = stages.map(|stage| layout_of_stage(parallel, model, stage));
        let num_copies = parallel.num_distributed_optimizer_instances;
        Ok(Self { grid, num_copies, stages: stages.collect::<Result<_>>()? })
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.grid.world()
    }

    /// The elements that a rank writes of each parameter and of each tensor of its optimizer state,
    /// in the order of its file.
    pub fn written(&self, rank: usize) -> Vec<ParamShare> {
        let at = self.grid.coords(rank);
        let (replica, replicas) = (self.grid.replica(rank), self.grid.num_replicas());
        let replica = Replica::new(replica, replicas, self.num_copies);
        written(&self.stages[at.pp], (at.tp, self.grid.size(Axis::Tp)), replica)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{RecomputeMethod, valid};

    /// Layer i of five costs 10ⁱ times as much as the first.
    struct Layers;

    impl ModelBuilder for Layers {
        fn num_layers(&self) -> usize {
            5
        }

        fn costs(&self) -> (Vec<ChunkCosts>, ChunkCosts) {
            let layer = |times| ChunkCosts {
                forward: 3 * times,
                recompute: 2 * times,
                input_gradients: 4 * times,
                weight_gradients: times,
                activations: 5 * times,
                operands: 6 * times,
            };
            (
                vec![layer(1), layer(10), layer(100), layer(1000), layer(10_000)],
                ChunkCosts::default(),
            )
        }

        fn saved_activations(&self) -> SavedActivations {
            unreachable!("costs have their own count of activations")
        }

        fn chunk(&self, _: Ends, _: Range<usize>, _: &mut ParamsBuilder) -> Result<Chunk> {
            unreachable!("costs need no parameters")
        }
    }

    #[test]
    fn computing_segments_again_costs_their_forward_without_the_output_and_saves_their_activations()
    {
        let mut parallel = valid().parallel;
        (parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size) = (2, 1);
        parallel.partition = PartitionMethod::Uniform;
        let full = |method, num_layers| Recompute::Full { method, num_layers };
        let [uniform, block] = [RecomputeMethod::Uniform, RecomputeMethod::Block];
        // Three layers on the first stage, two on the second. Values: time of input gradients and
        // memory of activations.
        for (recompute, first, second) in [
            (Recompute::None, (444, 555), (44_000, 55_000)),
            (Recompute::Selective, (444, 555), (44_000, 55_000)),
            (full(uniform, 1), (444 + 222, 0), (44_000 + 22_000, 0)),
            (full(uniform, 2), (444 + 223, 0), (44_000 + 23_000, 0)),
            (full(uniform, 4), (444 + 233, 0), (44_000 + 23_000, 0)),
            (full(block, 0), (444, 555), (44_000, 55_000)),
            (full(block, 1), (444 + 2, 550), (44_000 + 2000, 50_000)),
            (full(block, 3), (444 + 222, 0), (44_000 + 22_000, 0)),
        ] {
            let costs = costs(&parallel, &Layers, recompute).unwrap();
            for (stage, expected) in [first, second].into_iter().enumerate() {
                let of = costs.of(stage, 0);
                assert_eq!(
                    (of.input_gradients, of.activations),
                    expected,
                    "{recompute:?} on stage {stage}"
                );
                assert_eq!((of.forward, of.operands), [(333, 666), (33_000, 66_000)][stage]);
            }
        }
    }
}
