//! How a model presents itself to the trainer, and how a layout deals it to ranks.

use std::ops::Range;

use crate::Result;
use crate::config::{ParallelConfig, PartitionMethod, Recompute};
use crate::optim::written;
use crate::params::{ParamShare, ParamsBuilder, Placement};
use crate::pipeline::{Chunk, ChunkCosts, Costs, partition};
use crate::topology::{Axis, RankGrid};

/// Which ends of the model a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The embedding.
    pub first: bool,
    /// The final normalization, output matrix and loss.
    pub last: bool,
}

/// Elements that a rank keeps of a token between a layer's forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedActivations {
    /// Where nothing but what selective recompute leaves out is computed again.
    pub all: u64,
    /// The layer's input alone.
    pub input: u64,
}

/// Builds one rank's share of a model.
///
/// A model must say how many layers it has and build its chunks. The rest is for those that
/// partition by parameters or operations, delay weight gradients, or tell memory beforehand.
pub trait ModelBuilder {
    /// What a checkpoint calls the model. Tools know `gpt` by its settings; of others they know the
    /// tensors.
    fn architecture(&self) -> &str {
        "custom"
    }
    /// Layers between input and output.
    fn num_layers(&self) -> usize;
    /// Builds the chunk with these layers and declares its parameters in forward order.
    ///
    /// # Errors
    /// If the model cannot be cut this way.
    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk>;
    /// Parameters of every layer, for partitioning; by default all have as many.
    fn layer_params(&self) -> Vec<u64> {
        vec![1; self.num_layers()]
    }
    /// Parameters of the input and of the output, for partitioning.
    fn end_params(&self) -> (u64, u64) {
        (0, 0)
    }
    /// Operations of every layer, and of the output, for partitioning; in any unit.
    fn flops(&self) -> (Vec<u64>, u64) {
        (self.layer_params(), 0)
    }
    /// What the passes of every layer cost, without full recompute, and those of the output, which
    /// has no weight gradients of its own: they are made in its forward. By default forward, input
    /// and weight gradients take as long.
    fn costs(&self) -> (Vec<ChunkCosts>, ChunkCosts) {
        let layer = ChunkCosts {
            forward: 1,
            recompute: 1,
            input_gradients: 1,
            weight_gradients: 1,
            activations: 1,
            operands: 1,
        };
        (vec![layer; self.num_layers()], ChunkCosts::default())
    }
    /// What a rank keeps of every token in a layer, at least; by default nothing is known.
    fn saved_activations(&self) -> SavedActivations {
        SavedActivations { all: 0, input: 0 }
    }
    /// Whether the output's matrix is the input's, as a tied token embedding is.
    fn tied(&self) -> bool {
        false
    }
}

/// The chunks of pipeline stage `stage`, and their parameters in forward order.
///
/// # Errors
/// If the layers cannot be dealt to the stages, or the model cannot be cut this way.
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
    Ok((chunks, params))
}

/// The layers of each virtual stage.
pub(super) fn layers_of_chunks(
    parallel: &ParallelConfig,
    model: &dyn ModelBuilder,
) -> Result<Vec<Range<usize>>> {
    let (layer_weights, (first_extra, last_extra)) = match parallel.partition {
        PartitionMethod::Flops => {
            let (layers, head) = model.flops();
            (layers, (0, head))
        }
        _ => (model.layer_params(), model.end_params()),
    };
    let num_virtual_stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_size;
    partition(&parallel.partition, &layer_weights, first_extra, last_extra, num_virtual_stages)
}

/// What the passes of each virtual stage cost.
///
/// # Errors
/// If the layers cannot be dealt to the stages.
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
                    // The output of a segment's last layer is not made again.
                    layer.input_gradients +=
                        if i + 1 == end { layer.recompute } else { layer.forward };
                    // Of a whole segment its input is all that is kept, next to nothing beside what
                    // its products need.
                    layer.activations = 0;
                }
                sum = sum + layer;
            }
        }
        sum
    });
    Costs::new(parallel.pipeline_model_parallel_size, virtual_stages.collect())
}

/// Which rank of a layout writes what of a model's state: the plan of a checkpoint, made without
/// the ranks.
pub struct Layout {
    grid: RankGrid,
    /// Where parameters lie on the ranks of each pipeline stage.
    stages: Vec<Placement>,
}

impl Layout {
    /// The layout that a run under `parallel` has.
    ///
    /// # Errors
    /// If the model cannot be cut this way.
    pub fn new(parallel: &ParallelConfig, model: &dyn ModelBuilder) -> Result<Self> {
        let grid = RankGrid::from_config(parallel)?;
        let (replicas, tp) = (grid.num_replicas(), parallel.tensor_model_parallel_size);
        let place = |stage| {
            Ok(declare_stage(parallel, model, stage)?.1.place(parallel.bucket_size, replicas, tp))
        };
        let stages =
            (0..parallel.pipeline_model_parallel_size).map(place).collect::<Result<_>>()?;
        Ok(Self { grid, stages })
    }

    /// Ranks of the layout.
    pub fn world_size(&self) -> usize {
        self.grid.world()
    }

    /// What a rank writes of each parameter, and of each tensor of its optimizer state, in the
    /// order of its file.
    pub fn written(&self, rank: usize) -> Vec<ParamShare> {
        let at = self.grid.coords(rank);
        let replica = (self.grid.replica(rank), self.grid.num_replicas());
        written(&self.stages[at.pp], (at.tp, self.grid.size(Axis::Tp)), replica)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{RecomputeMethod, valid};

    /// Layer i of five costs 10ⁱ times the first.
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
        // Three layers on the first stage, two on the second: time of input gradients and memory of
        // activations.
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
