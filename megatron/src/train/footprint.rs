//! The memory that a run needs, computed from its settings and the parameters of its stages.
//! Nothing is allocated for the estimate.
//!
//! Weights, gradients, master weights and moments are counted exactly. Activations are a lower
//! bound: what layers save for the microbatches in flight, without temporary values inside a layer.

use std::ops::Range;

use candle_core::DType;

use super::model::{ModelBuilder, SavedActivations, layers_of_chunks, layout_of_stage, placements};
use crate::Result;
use crate::config::{Offload, OptimizerKind, PositionEmbedding, Recompute, RunConfig};
use crate::params::{ElementCounts, Placement, Placements};
use crate::pipeline::{Action, generate};
use crate::topology::RankGrid;

/// Microbatches per stage up to which a schedule is examined. At this number all schedules except
/// GPipe have reached their maximum number in flight.
const MOST_MICROBATCHES: usize = 64;

/// The bytes that a rank needs, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Footprint {
    /// Weights, in the model's dtype.
    pub weights: f64,
    /// Main gradients.
    pub gradients: f64,
    /// Master weights of 16-bit weights.
    pub masters: f64,
    /// Optimizer state, unless it is offloaded.
    pub moments: f64,
    /// Lower bound of the memory for activations at the time of the largest total.
    pub activations: f64,
}

impl Footprint {
    /// The footprint of one rank of each pipeline stage. All ranks of a stage have the same
    /// footprint.
    ///
    /// # Errors
    /// If the model cannot be split by the layout.
    pub fn of_stages(config: &RunConfig, model: &dyn ModelBuilder) -> Result<Vec<Self>> {
        let p = &config.parallel;
        let pp = p.pipeline_model_parallel_size;
        let layers = layers_of_chunks(p, model)?;
        let of_stage = |stage: usize| {
            let (layout, placements) = (layout_of_stage(p, model, stage)?, placements(p));
            let here = [&p.param_offload, &config.optimizer.offload]
                .map(|offload| !matches!(offload, Offload::Nvme(_)));
            let stepped = match placements.optimizer {
                Placement::Sharded => layout.len() / p.num_shards(),
                Placement::Replicated => layout.len(),
            };
            let ElementCounts { weights, gradients } =
                layout.elements(placements, p.num_shards(), here);
            let elements = (weights as f64, gradients as f64);
            let mut footprint = Self::of_parameters(config, elements, stepped as f64);
            let chunks = layers.iter().skip(stage).step_by(pp);
            let kept = chunks
                .map(|layers| kept_of_microbatch(config, model.saved_activations(), layers.len()))
                .map(|kept| kept.in_memory(&config.training.activation_offload))
                .collect::<Vec<_>>();
            footprint.activations = activations(config, stage, &kept, footprint.gradients)?;
            Ok(footprint)
        };
        (0..pp).map(of_stage).collect()
    }

    /// The host memory of one rank of each pipeline stage for the inputs that recomputed layers save,
    /// if ranks on GPUs offload them to it.
    ///
    /// # Errors
    /// If the model cannot be split by the layout.
    pub(super) fn saved_inputs(config: &RunConfig, model: &dyn ModelBuilder) -> Result<Vec<f64>> {
        let p = &config.parallel;
        let pp = p.pipeline_model_parallel_size;
        let layers = layers_of_chunks(p, model)?;
        let of_stage = |stage: usize| {
            let chunks = layers.iter().skip(stage).step_by(pp);
            let kept: Vec<f64> = chunks
                .map(|layers| kept_of_microbatch(config, model.saved_activations(), layers.len()))
                .map(|kept| kept.inputs)
                .collect();
            activations(config, stage, &kept, 0.0)
        };
        (0..pp).map(of_stage).collect()
    }

    /// A rough mean over the ranks of one replica, from the sizes of matrices. It uses floats, so
    /// that mistyped sizes that would overflow integers are reported.
    pub(super) fn rough(config: &RunConfig) -> Self {
        let (m, p) = (&config.model, &config.parallel);
        let [layers, hidden, ffn] =
            [m.num_layers, m.hidden_size, m.ffn_hidden_size].map(|size| size as f64);
        let [heads, groups, head_dim] =
            [m.num_attention_heads, m.num_query_groups, m.head_dim].map(|size| size as f64);
        let positions = match m.position_embedding {
            PositionEmbedding::LearnedAbsolute => m.max_position_embeddings as f64,
            _ => 0.0,
        };
        let attention = 2.0 * (heads + groups) * head_dim * hidden;
        let [tp, pp, cp] =
            [p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size]
                .map(|n| n as f64);
        let parameters = layers * (2.0 * hidden * ffn + attention) + m.vocab_size as f64 * hidden;
        // Every rank of a stage holds all positions.
        let elements = parameters / (tp * pp) + positions * hidden / pp;
        let shards =
            p.data_parallel_size as f64 * cp / p.num_distributed_optimizer_instances.max(1) as f64;
        let of = |placement| match placement {
            Placement::Sharded => elements / shards,
            Placement::Replicated => elements,
        };
        // Sizes may be wrong by typing; that there are several shards is all that counts.
        let Placements { weights, gradients, optimizer } =
            Placements::of_zero_stage(p.zero_stage, shards <= 1.0);
        // The input of a microbatch's first layer.
        let stream = hidden / if p.sequence_parallel { tp } else { 1.0 };
        let activations = tokens(config) * stream * size_of(config.training.precision.dtype());
        let counts = (of(weights), of(gradients));
        Self { activations, ..Self::of_parameters(config, counts, of(optimizer)) }
    }

    /// The footprint of a rank with `elements` parameters that updates `stepped` of them.
    fn of_parameters(config: &RunConfig, (weights, gradients): (f64, f64), stepped: f64) -> Self {
        let (dtype, o) = (config.training.precision.dtype(), &config.optimizer);
        let main = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let master = match dtype {
            _ if matches!(o.offload, Offload::Nvme(_)) => 0.0,
            // The weights themselves are the high halves.
            DType::BF16 => 2.0,
            DType::F16 => 4.0,
            _ => 0.0,
        };
        let moments = match (&o.offload, o.kind) {
            (Offload::Nvme(_), _) => 0.0,
            (_, OptimizerKind::Adam) => {
                size_of(o.exp_avg_dtype.dtype(main)) + size_of(o.exp_avg_sq_dtype.dtype(main))
            }
            (_, OptimizerKind::Sgd) => size_of(main),
        };
        Self {
            weights: weights * size_of(dtype),
            gradients: gradients * size_of(main),
            masters: stepped * master,
            moments: stepped * moments,
            activations: 0.0,
        }
    }

    /// Sum of all parts, in bytes.
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Each part with its name.
    pub fn parts(&self) -> [(&'static str, f64); 5] {
        let Self { weights, gradients, masters, moments, activations } = *self;
        [
            ("weights", weights),
            ("gradients", gradients),
            ("masters", masters),
            ("moments", moments),
            ("activations", activations),
        ]
    }
}

impl std::ops::Add for Footprint {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            gradients: self.gradients + other.gradients,
            masters: self.masters + other.masters,
            moments: self.moments + other.moments,
            activations: self.activations + other.activations,
        }
    }
}

/// The sum of the footprints of `ranks`, given one footprint per stage.
pub(super) fn of_ranks(
    config: &RunConfig,
    stages: &[Footprint],
    ranks: Range<usize>,
) -> Result<Vec<Footprint>> {
    let grid = RankGrid::from_config(&config.parallel)?;
    Ok(ranks.filter(|&rank| rank < grid.world()).map(|rank| stages[grid.coords(rank).pp]).collect())
}

fn size_of(dtype: DType) -> f64 {
    dtype.size_in_bytes() as f64
}

/// Tokens of a microbatch on one rank.
fn tokens(config: &RunConfig) -> f64 {
    let cp = config.parallel.context_parallel_size.max(1) as f64;
    config.training.micro_batch_size as f64 * config.model.seq_length as f64 / cp
}

/// Bytes that a chunk saves for one microbatch between forward and backward.
struct Kept {
    /// Inputs of the layers that are recomputed.
    inputs: f64,
    /// Activations of the others.
    others: f64,
}

impl Kept {
    /// Those in the memory where a rank computes. Of a CPU, host memory is that memory.
    fn in_memory(&self, inputs_in: &Offload) -> f64 {
        match inputs_in {
            Offload::Nvme(_) => self.others,
            Offload::None | Offload::Cpu => self.inputs + self.others,
        }
    }
}

/// What the `layers` layers of a chunk save.
fn kept_of_microbatch(config: &RunConfig, kept: SavedActivations, layers: usize) -> Kept {
    let (p, t) = (&config.parallel, &config.training);
    let bytes = tokens(config) * size_of(t.precision.dtype());
    let cut = t.distribute_saved_activations && !p.sequence_parallel;
    let parts = if cut { p.tensor_model_parallel_size.max(1) } else { 1 };
    let others: usize = t
        .recompute
        .segments(layers)
        .into_iter()
        .filter_map(|(segment, again)| (!again).then_some(segment.len()))
        .sum();
    Kept {
        inputs: (t.recompute.num_inputs(layers) as u64 * kept.input) as f64 * bytes / parts as f64,
        others: (others as u64 * kept.all) as f64 * bytes,
    }
}

/// The largest memory that activations of a step need beyond the gradients at the step's end.
/// `kept` is the bytes of one microbatch, per chunk.
fn activations(config: &RunConfig, stage: usize, kept: &[f64], gradients: f64) -> Result<f64> {
    let (p, t) = (&config.parallel, &config.training);
    let (pp, v) = (p.pipeline_model_parallel_size, p.virtual_pipeline_size);
    let microbatches =
        t.global_batch_size_at(0) / (t.micro_batch_size * p.data_parallel_size).max(1);
    let schedule =
        generate(p.schedule, pp, v, microbatches.clamp(1, MOST_MICROBATCHES * pp), p.extra_warmup)?;
    let (mut in_flight, mut most) = (0.0, 0f64);
    let mut has_gradients = vec![false; v];
    for action in &schedule.stages[stage] {
        match *action {
            Action::Forward { chunk, .. } => in_flight += kept[chunk],
            Action::Backward { chunk, .. } => {
                in_flight -= kept[chunk];
                has_gradients[chunk] = true;
            }
            _ => {}
        }
        // With delayed weight gradients, gradients get their memory later than in this schedule.
        let beside = !p.delay_wgrad_compute && has_gradients.iter().all(|has| *has);
        most = most.max(in_flight + if beside { gradients } else { 0.0 });
    }
    Ok((most - gradients).max(0.0))
}

/// Flags that reduce the memory of the ranks on one machine, cheapest first.
pub(super) fn advice(config: &RunConfig, all: &Footprint) -> Vec<String> {
    let (p, t, o) = (&config.parallel, &config.training, &config.optimizer);
    let (dp, replicas) = (p.data_parallel_size, p.data_parallel_size * p.context_parallel_size);
    let mut flags = Vec::new();
    if replicas > 1 && p.zero_stage == 0 {
        flags.push(format!(
            "--use-distributed-optimizer (shards masters and moments over {replicas} replicas)"
        ));
    }
    if replicas > 1 && p.zero_stage < 3 {
        flags.push(format!(
            "--zero-stage 3 (cuts weights, gradients and optimizer state over {replicas} replicas)"
        ));
    }
    if dp > 1 {
        flags.push(format!(
            "a smaller --data-parallel-size (each of {dp} replicas holds all weights and gradients)"
        ));
    }
    if matches!(t.precision, crate::config::Precision::Fp32) {
        flags.push("--bf16".into());
    }
    if !matches!(o.offload, Offload::Nvme(_)) {
        flags.push("--offload-optimizer nvme --nvme-path DIR (optimizer state in files)".into());
    }
    if all.moments > 0.0
        && o.kind == OptimizerKind::Adam
        && size_of(o.exp_avg_sq_dtype.dtype(DType::F32)) > 2.0
    {
        flags.push("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".into());
    }
    if all.activations > 0.1 * all.total() {
        match t.recompute {
            Recompute::Full { .. } => flags.extend(fewer_saved_inputs(config)),
            _ => flags.push("--recompute-granularity full".into()),
        }
        if t.micro_batch_size > 1 {
            flags.push(format!("a smaller --micro-batch-size (now {})", t.micro_batch_size));
        }
    }
    flags.push("a smaller model".into());
    flags.push("ranks on more machines".into());
    flags
}

/// Flags that reduce the memory of the inputs that full recompute saves, on CPUs.
fn fewer_saved_inputs(config: &RunConfig) -> Vec<String> {
    let mut flags = Vec::from_iter(distributed_inputs(config));
    if !matches!(config.training.activation_offload, Offload::Nvme(_)) {
        flags
            .push("--offload-activations nvme --nvme-path DIR (saved activations in files)".into());
    }
    flags
}

/// The flag that cuts these inputs, where that helps.
pub(super) fn distributed_inputs(config: &RunConfig) -> Option<String> {
    let (p, t) = (&config.parallel, &config.training);
    let tp = p.tensor_model_parallel_size;
    let is_whole = tp > 1 && !p.sequence_parallel && !t.distribute_saved_activations;
    is_whole.then(|| {
        format!("--distribute-saved-activations (splits saved activations over tp = {tp})")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{MomentDtype, Precision, ScheduleKind, valid};

    fn config() -> RunConfig {
        let mut config = valid();
        config.parallel.zero_stage = 0;
        config
    }

    #[test]
    fn a_parameter_takes_what_its_dtypes_take() {
        let mut config = config();
        let of = |config: &RunConfig| {
            Footprint::of_parameters(config, (100.0, 100.0), 50.0).parts().map(|(_, bytes)| bytes)
        };
        assert_eq!(of(&config), [400.0, 400.0, 0.0, 400.0, 0.0]);
        config.training.precision = Precision::Bf16;
        config.optimizer.exp_avg_sq_dtype = MomentDtype::Bf16;
        assert_eq!(of(&config), [200.0, 400.0, 100.0, 300.0, 0.0]);
        config.optimizer.offload = Offload::Nvme("disk".into());
        assert_eq!(of(&config)[3], 0.0);
        config.training.precision = Precision::Fp64;
        assert_eq!(of(&config), [800.0, 800.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn activations_are_those_in_flight_beside_the_gradients_that_are_there_then() {
        let mut config = config();
        let p = &mut config.parallel;
        (p.schedule, p.virtual_pipeline_size, p.pipeline_model_parallel_size) =
            (ScheduleKind::OneFOneB, 1, 2);
        (p.data_parallel_size, config.training.micro_batch_size) = (1, 1);
        let mut of = |batch: usize, stage: usize, gradients: f64| {
            config.training.global_batch_size = batch;
            activations(&config, stage, &[10.0], gradients).unwrap()
        };
        // One microbatch: the maximum is before its backward, when there are no gradients yet.
        assert_eq!([of(1, 0, 3.0), of(1, 0, 30.0)], [7.0, 0.0]);
        // The first stage runs one forward ahead. The last stage already has its gradients when the
        // second microbatch arrives.
        assert_eq!([of(8, 0, 30.0), of(8, 1, 30.0)], [20.0, 10.0]);
        assert_eq!(
            of(2, 0, 30.0),
            10.0,
            "the second microbatch's, while the first one has made gradients"
        );
    }

    #[test]
    fn a_layer_that_is_computed_again_keeps_its_input_alone() {
        let mut config = config();
        config.parallel.context_parallel_size = 2;
        let tokens = (config.training.micro_batch_size * config.model.seq_length / 2) as f64;
        let mut of = |recompute| {
            config.training.recompute = recompute;
            let kept = kept_of_microbatch(&config, SavedActivations { all: 100, input: 7 }, 5);
            kept.in_memory(&Offload::None) / 4.0 / tokens
        };
        let full = |method, num_layers| Recompute::Full { method, num_layers };
        use crate::config::RecomputeMethod::{Block, Uniform};
        assert_eq!(of(Recompute::None), 500.0);
        assert_eq!(
            [of(full(Uniform, 1)), of(full(Uniform, 2)), of(full(Block, 2))],
            [35.0, 21.0, 314.0]
        );
    }

    #[test]
    fn saved_inputs_are_cut_over_tp_and_leave_the_memory_for_files() {
        use crate::config::RecomputeMethod::Block;
        let mut config = config();
        config.parallel.sequence_parallel = false;
        config.training.recompute = Recompute::Full { method: Block, num_layers: 2 };
        let tokens = (config.training.micro_batch_size * config.model.seq_length) as f64;
        let of = |config: &RunConfig, offload: &Offload| {
            let kept = kept_of_microbatch(config, SavedActivations { all: 100, input: 7 }, 5);
            kept.in_memory(offload) / 4.0 / tokens
        };
        let nvme = Offload::Nvme("disk".into());
        assert_eq!([of(&config, &Offload::None), of(&config, &nvme)], [314.0, 300.0]);
        assert_eq!(of(&config, &Offload::Cpu), 314.0, "a CPU computes in host memory");
        let advised = |config: &RunConfig| {
            let all = Footprint { activations: 1.0, ..Footprint::default() };
            let flags = advice(config, &all).join(", ");
            ["--distribute-saved-activations", "--offload-activations nvme"]
                .map(|flag| flags.contains(flag))
        };
        assert_eq!(advised(&config), [true, true]);
        config.training.distribute_saved_activations = true;
        assert_eq!([of(&config, &Offload::None), of(&config, &nvme)], [307.0, 300.0]);
        assert_eq!(advised(&config), [false, true]);
        config.training.activation_offload = nvme;
        assert_eq!(advised(&config), [false, false]);
        config.training.recompute = Recompute::Selective;
        assert_eq!(advised(&config), [false, false]);
    }
}
