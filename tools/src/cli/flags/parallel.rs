//! `[parallel]`: how the model and the batch are split over ranks, and how ranks connect.

use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use kernels::tensor::device::Choice;
use megatron::comm::Backend;
use megatron::config::{PartitionMethod, ScheduleKind};

use super::choice;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Parallelism: how the run is split over ranks, [parallel]")]
pub struct ParallelFlags {
    #[command(flatten)]
    pub layout: LayoutFlags,
    /// Device of every rank: a GPU if there is one (`auto`), `cpu`, the GPU of the rank's local
    /// number (`cuda`), or GPU N (`cuda:N`)
    #[arg(long, value_name = "auto|cpu|cuda|cuda:N", default_value = "auto")]
    pub device: Choice,
    /// How ranks exchange data: shared memory (`local`), `tcp` or `nccl`; `auto` is NCCL on GPUs,
    /// local if all ranks are on one machine, else TCP. CPU ranks treat `nccl` and Megatron-LM's
    /// `gloo` as `auto`
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = backends())]
    pub distributed_backend: Backend,
    /// Issue tensor-parallel collectives and pipeline receives before independent computation
    /// [default: true over NCCL, else false]
    #[arg(long, action = ArgAction::Set)]
    pub overlap_communication: Option<bool>,
    /// Longest time that a rank waits for its peers before it ends the run
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0)]
    pub distributed_timeout_minutes: f64,
    /// Where ranks meet: tcp://HOST:PORT or file:///DIR [default: MASTER_ADDR and MASTER_PORT]
    #[arg(long, value_name = "URL")]
    pub rdzv: Option<String>,
}

/// The layout, without the settings of communication.
#[derive(Args, Clone, Debug)]
pub struct LayoutFlags {
    /// tp: ranks that share each layer
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tensor_model_parallel_size: usize,
    /// pp: stages of the pipeline
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_model_parallel_size: usize,
    /// cp: ranks that share each sequence and distribute its attention heads
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub context_parallel_size: usize,
    /// dp: replicas [default: WORLD_SIZE / (tp·cp·pp) under a launcher, else 1]
    #[arg(long, value_name = "N")]
    pub data_parallel_size: Option<usize>,
    /// Layers of one virtual stage; selects the interleaved schedule
    #[arg(long, value_name = "N")]
    pub num_layers_per_virtual_pipeline_stage: Option<usize>,
    /// v: virtual stages per stage, instead of layers per virtual stage, and these may differ in
    /// size; selects the interleaved schedule
    #[arg(long, value_name = "N", alias = "virtual-pipeline-model-parallel-size")]
    pub num_virtual_stages_per_pipeline_rank: Option<usize>,
    /// Order of forward and backward passes [default: 1f1b, or interleaved with virtual stages]
    #[arg(long, value_name = "KIND", value_parser = choice::<ScheduleKind>(&["gpipe", "1f1b", "interleaved"]))]
    pub pipeline_schedule: Option<ScheduleKind>,
    /// Compute weight gradients separately from input gradients, when a stage would otherwise wait
    /// (zero-bubble schedules)
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub delay_wgrad_compute: bool,
    /// Extra forward passes that the first stage runs before its first backward, beyond 1f1b's;
    /// each costs one microbatch's activations. pp − 1 with --delay-wgrad-compute is ZB-H2
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub pipeline_extra_warmup: usize,
    /// Layers per stage: equally many (`uniform`), balanced by `parameters` or by `flops`, equally
    /// many of the types that a regular expression matches (`type:transformer`), or listed, e.g.
    /// `3,4,4,3`
    #[arg(
        long,
        value_name = "uniform|parameters|flops|type:REGEX|N,N,…",
        default_value = "uniform"
    )]
    pub pipeline_partition: Partition,
    /// Layers of the first stage; stages without a setting share the remaining layers evenly
    #[arg(long, value_name = "N", alias = "num-layers-in-first-pipeline-stage")]
    pub decoder_first_pipeline_num_layers: Option<usize>,
    /// Layers of the last stage
    #[arg(long, value_name = "N", alias = "num-layers-in-last-pipeline-stage")]
    pub decoder_last_pipeline_num_layers: Option<usize>,
    /// Count the embedding as a layer when layers are distributed evenly over stages
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub account_for_embedding_in_pipeline_split: bool,
    /// Count the head and the loss as a layer, likewise
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub account_for_loss_in_pipeline_split: bool,
    /// Embedding, layers and loss of every stage or virtual stage, in Megatron-LM's notation:
    /// `Et*2|(tt|)*6L`
    #[arg(long, value_name = "LAYOUT")]
    pub pipeline_model_parallel_layout: Option<String>,
    /// Split activations between tensor-parallel regions along the sequence; no effect if tp is 1
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub sequence_parallel: bool,
    /// ZeRO-1: shard optimizer state over the replicas; the same as --zero-stage 1
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub use_distributed_optimizer: bool,
    /// Stage of ZeRO. Replicas shard nothing (0), optimizer state (1), also gradients (2), also
    /// weights (3, as FSDP does) [default: 0]
    #[arg(long, value_name = "0|1|2|3", value_parser = stage_of_zero)]
    pub zero_stage: Option<u64>,
    /// Stage of ZeRO by Megatron-LM's names, which mean 0, 1, 2 and 3 in this order
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(STRATEGIES))]
    pub data_parallel_sharding_strategy: Option<String>,
    /// Hybrid sharding (HSDP): number of copies of all shards. Neighbouring replicas form a copy;
    /// gradients are summed over the copies
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub num_distributed_optimizer_instances: usize,
    /// ZeRO-3: free gathered weights after each layer of every pass, and gather them again for the
    /// next pass. With false they stay until the end of the step
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub zero_reshard_after_forward: bool,
    /// Reduce gradient buckets while backward is still running
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub overlap_grad_reduce: bool,
    /// Minimum elements of a gradient bucket [default: 2,000,000; on GPUs the larger of 40,000,000
    /// and 1,000,000·dp·cp]
    #[arg(long, value_name = "N", alias = "ddp-bucket-size")]
    pub bucket_size: Option<usize>,
}

/// Megatron-LM's names of ZeRO's stages, from 0.
pub const STRATEGIES: [&str; 4] = ["no_shard", "optim", "optim_grads", "optim_grads_params"];

/// A [`PartitionMethod`] as it is written on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition(pub PartitionMethod);

impl FromStr for Partition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // DeepSpeed ignores the case of its methods.
        let is_type = |at: &usize| text[..*at].eq_ignore_ascii_case("type");
        if let Some(at) = text.find(':').filter(is_type) {
            return Ok(Self(PartitionMethod::Type(text[at + 1..].into())));
        }
        let method = match text {
            "uniform" => PartitionMethod::Uniform,
            "parameters" => PartitionMethod::Parameters,
            "flops" => PartitionMethod::Flops,
            list => {
                let sizes: Result<Vec<usize>, _> =
                    list.split(',').map(|n| n.trim().parse()).collect();
                PartitionMethod::Explicit(sizes.map_err(
                    |_| "expected uniform, parameters, flops, type:REGEX, or layers per stage such as 3,4,4,3",
                )?)
            }
        };
        Ok(Self(method))
    }
}

fn backends() -> impl TypedValueParser<Value = Backend> {
    let gloo = PossibleValue::new("gloo").hide(true);
    let shown = ["auto", "local", "tcp", "nccl"].map(PossibleValue::new);
    PossibleValuesParser::new(shown.into_iter().chain([gloo])).map(|name| match name.as_str() {
        "local" => Backend::Local,
        "tcp" => Backend::Tcp,
        "nccl" => Backend::Nccl,
        _ => Backend::Auto,
    })
}

fn stage_of_zero(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(stage @ 0..=3) => Ok(stage),
        _ => Err("must be 0, 1, 2 or 3".to_string()),
    }
}
