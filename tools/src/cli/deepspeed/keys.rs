//! Every key of DeepSpeed 0.19's configuration, and what becomes of it.
//!
//! Source: deepspeed/runtime/config.py, constants.py, zero/config.py, zero/offload_config.py,
//! precision_config.py, activation_checkpointing/config.py, monitor/config.py; the page
//! "DeepSpeed Configuration JSON".

use serde_json::Value;

use super::Configuration;
use super::sections::{self, fp16, zero};

/// What becomes of a key.
pub enum Rule {
    /// An object with these keys.
    Section(Keys),
    /// An object with these keys, if its `enabled` is true; else it has no effect.
    IfEnabled(Keys),
    /// A flag of this program with the same meaning.
    Flag(&'static str, Kind),
    /// The same, or `auto`: what flags and run file say, else what transformers' Trainer has as its
    /// default, if that is not this program's.
    Auto(&'static str, Kind, Option<&'static str>),
    /// Known, and without a meaning here.
    NoEffect,
    /// These values say what is so here; others are refused, with what to use.
    Only(&'static [&'static str], &'static str),
    /// A feature that is refused unless it is off, with what to use.
    Off(&'static str),
    /// Code decides.
    By(fn(&mut Configuration, &str, &Value)),
}

/// The type of a flag's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Bool,
    Whole,
    Number,
    Text,
}

/// The keys of an object.
pub type Keys = &'static [(&'static str, Rule)];

use Kind::{Bool, Number, Text, Whole};
use Rule::{Auto, By, Flag, IfEnabled, NoEffect, Off, Only, Section};

/// Keys outside of any section.
pub const TOP: Keys = &[
    ("train_batch_size", Auto("global-batch-size", Whole, None)),
    ("train_micro_batch_size_per_gpu", Auto("micro-batch-size", Whole, Some("8"))),
    ("gradient_accumulation_steps", Auto("gradient-accumulation-steps", Whole, Some("1"))),
    ("managed_gradient_accumulation", Only(&["true"], "microbatches are always counted here")),
    ("optimizer", By(sections::optimizer)),
    ("scheduler", By(sections::scheduler)),
    ("fp16", By(fp16::section)),
    ("bf16", IfEnabled(BF16)),
    ("bfloat16", IfEnabled(BF16)),
    ("torch_autocast", Off("use \"bf16\" or \"fp16\", which keep weights in 16 bits")),
    ("amp", Off("use \"bf16\" or \"fp16\"")),
    ("gradient_clipping", Auto("clip-grad", Number, Some("1.0"))),
    ("communication_data_type", By(fp16::communication)),
    ("seq_parallel_communication_data_type", NoEffect),
    ("gradient_allreduce_op", Only(&["mean"], "gradients are those of the batch's mean loss")),
    ("prescale_gradients", NoEffect),
    ("gradient_predivide_factor", NoEffect),
    ("sparse_gradients", Only(&["false"], "gradients of embeddings are dense here")),
    ("zero_optimization", By(zero::section)),
    ("zero_allow_untested_optimizer", NoEffect),
    ("zero_force_ds_cpu_optimizer", NoEffect),
    ("aio", Section(AIO)),
    ("activation_checkpointing", By(sections::activation_checkpointing)),
    ("tensor_parallel", By(sections::tensor_parallel)),
    ("pipeline_parallel", By(sections::pipeline_parallel)),
    ("pipeline", Section(PIPELINE)),
    ("sequence_parallel_size", Flag("context-parallel-size", Whole)),
    ("use_data_before_expert_parallelism", NoEffect),
    ("expert_parallel", Off("there are no experts here")),
    ("steps_per_print", By(sections::steps_per_print)),
    ("wall_clock_breakdown", Flag("wall-clock-breakdown", Bool)),
    ("memory_breakdown", NoEffect),
    ("dump_state", Only(&["false"], "use --print-config")),
    ("log_level", NoEffect),
    ("flops_profiler", By(sections::flops_profiler)),
    ("monitor_config", Section(MONITORS)),
    ("tensorboard", By(sections::tensorboard)),
    ("csv_monitor", By(sections::csv_monitor)),
    ("wandb", Off("use --tensorboard-dir or --metrics")),
    ("comet", Off("use --tensorboard-dir or --metrics")),
    ("comms_logger", Off("use --profile, whose table has the collectives")),
    ("timers", NoEffect),
    ("checkpoint", Section(CHECKPOINT)),
    ("data_types", Section(DATA_TYPES)),
    ("dataloader_drop_last", NoEffect),
    ("disable_allgather", NoEffect),
    ("disable_python_gc", NoEffect),
    ("vocabulary_size", NoEffect),
    ("compress_communication", NoEffect),
    ("compile", Off("nothing is compiled at run time here; leave it out")),
    ("autotuning", Off("`megatron bench step` times a layout")),
    ("data_efficiency", Off("not supported; leave it out")),
    ("curriculum_learning", Off("not supported; leave it out")),
    ("progressive_layer_drop", Off("not supported; leave it out")),
    ("hybrid_engine", Off("not supported; leave it out")),
    ("elasticity", Off("the number of ranks is fixed; use --max-restarts")),
    ("nebula", Off("use --async-save")),
    ("datastates_ckpt", Off("use --async-save")),
    ("compression_training", Off("not supported; leave it out")),
    ("quantize_training", Off("not supported; leave it out")),
    ("weight_quantization", Off("not supported; leave it out")),
    ("eigenvalue", Off("not supported; leave it out")),
    ("sparse_attention", Off("use --sliding-window, or leave it out")),
    ("graph_harvesting", Only(&["false"], "use --enable-cuda-graph")),
];

const BF16: Keys = &[
    ("enabled", Auto("bf16", Bool, None)),
    ("immediate_grad_update", NoEffect),
    ("check_grad_overflow", NoEffect),
    ("check_overflow", NoEffect),
    ("auto_cast", NoEffect),
    (
        "bf16_master_weights_and_grads",
        Only(&["false"], "master weights and sums of gradients are in fp32 here"),
    ),
    ("bf16_optimizer_states", Only(&["false"], "use --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")),
];

/// Files are read and written in blocks of a fixed size here.
const AIO: Keys = &[
    ("block_size", NoEffect),
    ("queue_depth", NoEffect),
    ("intra_op_parallelism", NoEffect),
    ("thread_count", NoEffect),
    ("single_submit", NoEffect),
    ("overlap_events", NoEffect),
    ("use_gds", NoEffect),
];

const PIPELINE: Keys = &[
    ("stages", By(sections::stages)),
    ("partition", By(sections::partition)),
    ("partition_method", By(sections::partition)),
    ("seed_layers", NoEffect),
    ("activation_checkpoint_interval", By(sections::checkpoint_interval)),
    ("pipe_partitioned", NoEffect),
    ("grad_partitioned", NoEffect),
    ("use_reentrant", NoEffect),
];

const MONITORS: Keys = &[
    ("enabled", NoEffect),
    ("tensorboard", By(sections::tensorboard)),
    ("csv_monitor", By(sections::csv_monitor)),
    ("wandb", Off("use --tensorboard-dir or --metrics")),
    ("comet", Off("use --tensorboard-dir or --metrics")),
];

/// Every checkpoint is one for any layout here, and its folder's name is checked.
const CHECKPOINT: Keys = &[
    ("tag_validation", NoEffect),
    ("load_universal", NoEffect),
    (
        "use_node_local_storage",
        Only(&["false"], "all ranks save to one folder, which every machine can read"),
    ),
    ("parallel_write", Section(&[("pipeline_stage", NoEffect)])),
];

const DATA_TYPES: Keys = &[
    ("grad_accum_dtype", Only(&["fp32", "float32", "float"], "gradients are summed in fp32 here")),
    ("param_dtype", By(fp16::param_dtype)),
    ("buffer_dtype", NoEffect),
    ("keep_in_fp32_modules", NoEffect),
];

/// Units of ZeRO travel whole, as layers: what tunes the traffic of single parameters has no effect.
pub const ZERO: Keys = &[
    ("stage", Flag("zero-stage", Whole)),
    ("allgather_partitions", NoEffect),
    ("allgather_bucket_size", NoEffect),
    ("overlap_comm", Auto("overlap-grad-reduce", Bool, None)),
    ("compute_grad_norm", NoEffect),
    ("reduce_scatter", NoEffect),
    ("reduce_bucket_size", By(zero::bucket_size)),
    ("use_multi_rank_bucket_allreduce", NoEffect),
    ("contiguous_gradients", NoEffect),
    ("load_from_fp32_weights", NoEffect),
    ("elastic_checkpoint", NoEffect),
    ("round_robin_gradients", NoEffect),
    ("parameter_alignment", NoEffect),
    ("legacy_stage1", NoEffect),
    ("ignore_unused_parameters", NoEffect),
    ("offload_param", By(zero::offload_param)),
    ("offload_optimizer", By(zero::offload_optimizer)),
    ("cpu_offload", By(zero::cpu_offload)),
    ("cpu_offload_param", By(zero::cpu_offload_param)),
    ("cpu_offload_params", By(zero::cpu_offload_param)),
    ("cpu_offload_use_pin_memory", NoEffect),
    ("sub_group_size", NoEffect),
    ("stage3_max_live_parameters", NoEffect),
    ("stage3_max_reuse_distance", NoEffect),
    ("stage3_prefetch_bucket_size", NoEffect),
    ("stage3_param_persistence_threshold", NoEffect),
    ("stage3_model_persistence_threshold", NoEffect),
    ("stage3_gather_16bit_weights_on_model_save", NoEffect),
    ("stage3_gather_fp16_weights_on_model_save", NoEffect),
    ("stage3_module_granularity_threshold", NoEffect),
    ("stage3_use_all_reduce_for_fetch_params", NoEffect),
    ("stage3_allgather_sequential", NoEffect),
    ("max_live_parameters", NoEffect),
    ("max_reuse_distance", NoEffect),
    ("prefetch_bucket_size", NoEffect),
    ("param_persistence_threshold", NoEffect),
    ("model_persistence_threshold", NoEffect),
    ("gather_16bit_weights_on_model_save", NoEffect),
    ("module_granularity_threshold", NoEffect),
    ("use_all_reduce_for_fetch_params", NoEffect),
    ("allgather_sequential", NoEffect),
    ("memory_efficient_linear", NoEffect),
    ("pipeline_loading_checkpoint", NoEffect),
    ("override_module_apply", NoEffect),
    ("log_trace_cache_warnings", NoEffect),
    ("enable_sanity_checks", NoEffect),
    ("leaf_module", NoEffect),
    ("save_muon_momentum_buffer_in_memory", NoEffect),
    (
        "zero_hpz_partition_size",
        Only(&["1"], "use --num-distributed-optimizer-instances, which shards within a node"),
    ),
    ("mics_shard_size", Only(&["-1"], "use --num-distributed-optimizer-instances")),
    ("mics_hierarchical_params_gather", Only(&["false"], "leave it out")),
    ("zero_quantized_weights", Only(&["false"], "weights travel in the model's dtype here")),
    (
        "zero_quantized_nontrainable_weights",
        Only(&["false"], "weights travel in the model's dtype here"),
    ),
    (
        "zero_quantized_gradients",
        Only(&["false"], "use \"communication_data_type\", which halves the traffic"),
    ),
    ("zeropp_loco_param", Off("leave it out")),
    ("zenflow", Off("leave it out")),
];

/// Of `offload_param` and `offload_optimizer`, beside `device` and `nvme_path`.
pub const OFFLOAD: Keys = &[
    ("device", NoEffect),
    ("nvme_path", NoEffect),
    ("pin_memory", NoEffect),
    ("buffer_count", NoEffect),
    ("buffer_size", NoEffect),
    ("max_in_cpu", NoEffect),
    ("pipeline", NoEffect),
    ("pipeline_read", NoEffect),
    ("pipeline_write", NoEffect),
    ("fast_init", NoEffect),
    ("cpuadam_cores_perc", NoEffect),
    ("ratio", Only(&["1", "1.0"], "all of the optimizer's state is offloaded here")),
    ("super_offload", Only(&["false"], "leave it out")),
];

/// `optimizer.params` of Adam and AdamW.
pub const ADAM: Keys = &[
    ("lr", Auto("lr", Number, Some("5e-5"))),
    ("betas", By(sections::betas)),
    ("eps", Auto("adam-eps", Number, None)),
    ("weight_decay", Auto("weight-decay", Number, Some("0"))),
    ("bias_correction", Only(&["true"], "moments are always corrected here")),
    ("amsgrad", Only(&["false"], "not supported; leave it out")),
    ("maximize", Only(&["false"], "not supported; leave it out")),
    ("torch_adam", NoEffect),
    ("adam_w_mode", By(sections::adam_w_mode)),
    ("fused", NoEffect),
    ("foreach", NoEffect),
    ("fp32_optimizer_states", Only(&["true"], "use --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")),
    ("max_grad_norm", Only(&["0", "0.0"], "use \"gradient_clipping\"")),
];

/// `optimizer.params` of SGD.
pub const SGD: Keys = &[
    ("lr", Auto("lr", Number, Some("5e-5"))),
    ("momentum", Flag("sgd-momentum", Number)),
    ("weight_decay", Auto("weight-decay", Number, Some("0"))),
    ("dampening", Only(&["0", "0.0"], "not supported; leave it out")),
    ("nesterov", Only(&["false"], "not supported; leave it out")),
    ("maximize", Only(&["false"], "not supported; leave it out")),
    ("fused", NoEffect),
    ("foreach", NoEffect),
    ("max_grad_norm", Only(&["0", "0.0"], "use \"gradient_clipping\"")),
];

/// Optimizer, its parameters, and what DeepSpeed takes where one is missing.
pub type Optimizer = (&'static str, Keys, &'static [(&'static str, &'static str)]);

/// The kinds of optimizer, by `type` in lower case.
pub const OPTIMIZERS: &[(&[&str], Optimizer)] = &[
    (
        &["adam", "adamw", "fusedadam", "deepspeedcpuadam"],
        ("adam", ADAM, &[("lr", "0.001"), ("weight-decay", "0")]),
    ),
    (&["sgd"], ("sgd", SGD, &[("lr", "0.001"), ("weight-decay", "0"), ("sgd-momentum", "0")])),
];

const LAST: (&str, Rule) =
    ("last_batch_iteration", Only(&["-1"], "a resumed run goes on by itself"));

const WARMUP: Keys = &[
    ("warmup_min_lr", Auto("warmup-min-lr", Number, None)),
    ("warmup_max_lr", Auto("warmup-max-lr", Number, None)),
    ("warmup_num_steps", Auto("warmup-num-steps", Whole, Some("1"))),
    ("warmup_type", Flag("warmup-type", Text)),
    LAST,
];

const WARMUP_DECAY: Keys = &[
    ("total_num_steps", Auto("total-num-steps", Whole, None)),
    ("warmup_min_lr", Auto("warmup-min-lr", Number, None)),
    ("warmup_max_lr", Auto("warmup-max-lr", Number, None)),
    ("warmup_num_steps", Auto("warmup-num-steps", Whole, Some("1"))),
    ("warmup_type", Flag("warmup-type", Text)),
    LAST,
];

const WARMUP_COSINE: Keys = &[
    ("total_num_steps", Auto("total-num-steps", Whole, None)),
    ("warmup_min_ratio", Flag("warmup-min-ratio", Number)),
    ("warmup_num_steps", Auto("warmup-num-steps", Whole, Some("1"))),
    ("cos_min_ratio", Flag("cos-min-ratio", Number)),
    ("warmup_type", Flag("warmup-type", Text)),
    LAST,
];

const ONE_CYCLE: Keys = &[
    ("cycle_min_lr", Flag("cycle-min-lr", Number)),
    ("cycle_max_lr", Flag("cycle-max-lr", Number)),
    ("decay_lr_rate", Flag("decay-lr-rate", Number)),
    ("cycle_first_step_size", Flag("cycle-first-step-size", Whole)),
    ("cycle_second_step_size", Flag("cycle-second-step-size", Whole)),
    ("cycle_first_stair_count", Flag("cycle-first-stair-count", Whole)),
    ("cycle_second_stair_count", Flag("cycle-second-stair-count", Whole)),
    ("decay_step_size", Flag("decay-step-size", Whole)),
    ("cycle_momentum", Flag("cycle-momentum", Bool)),
    ("cycle_min_mom", Flag("cycle-min-mom", Number)),
    ("cycle_max_mom", Flag("cycle-max-mom", Number)),
    ("decay_mom_rate", Flag("decay-mom-rate", Number)),
    LAST,
];

const RANGE_TEST: Keys = &[
    ("lr_range_test_min_lr", Flag("lr-range-test-min-lr", Number)),
    ("lr_range_test_step_size", Flag("lr-range-test-step-size", Whole)),
    ("lr_range_test_step_rate", Flag("lr-range-test-step-rate", Number)),
    ("lr_range_test_staircase", Flag("lr-range-test-staircase", Bool)),
    LAST,
];

/// The schedules of the learning rate, by `type`.
pub const SCHEDULES: &[(&str, Keys)] = &[
    ("WarmupLR", WARMUP),
    ("WarmupDecayLR", WARMUP_DECAY),
    ("WarmupCosineLR", WARMUP_COSINE),
    ("OneCycle", ONE_CYCLE),
    ("LRRangeTest", RANGE_TEST),
];

/// The flags that keys become.
#[cfg(test)]
pub fn flags() -> Vec<&'static str> {
    fn of(keys: Keys, flags: &mut Vec<&'static str>) {
        for (_, rule) in keys {
            match rule {
                Section(keys) | IfEnabled(keys) => of(keys, flags),
                Flag(flag, _) | Auto(flag, ..) => flags.push(flag),
                NoEffect | Only(..) | Off(_) | By(_) => {}
            }
        }
    }
    let mut flags = Vec::new();
    let schedules = SCHEDULES.iter().map(|(_, keys)| *keys);
    [TOP, ZERO, ADAM, SGD].into_iter().chain(schedules).for_each(|keys| of(keys, &mut flags));
    flags
}
