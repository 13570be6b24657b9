//! Breaks every equation once.

use std::path::PathBuf;

use super::*;
use crate::config::{
    CheckpointConfig, DataConfig, DataloaderType, DynamicLossScale, IncreaseStyle, LoggingConfig,
    Normalization, Retention, SlidingWindow, TensorboardConfig, WeightDecayIncrease, WsdDecayStyle,
};
use crate::config::{PartitionMethod, ScheduleKind};

fn increase(config: &mut RunConfig, start: f64, end: f64) {
    let style = IncreaseStyle::Linear;
    config.optimizer.weight_decay_increase =
        Some(WeightDecayIncrease { start, end, style, samples: 160 });
}

fn retain(config: &mut RunConfig, interval: u64) {
    let retention = Retention { interval: Some(interval), most_recent: None };
    (config.checkpoint.save, config.checkpoint.save_interval) = (Some("saved".into()), Some(6));
    config.checkpoint.retention = retention;
}

fn distribute(config: &mut RunConfig) {
    config.training.recompute = Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 };
    config.training.distribute_saved_activations = true;
}

/// A valid run of 2·1·2·2 (tp·cp·pp·dp) ranks.
pub(crate) fn valid() -> RunConfig {
    RunConfig {
        model: ModelConfig {
            num_layers: 8,
            hidden_size: 64,
            ffn_hidden_size: 256,
            num_attention_heads: 8,
            num_query_groups: 4,
            head_dim: 8,
            seq_length: 32,
            max_position_embeddings: 32,
            position_embedding: PositionEmbedding::Rope,
            rotary_base: 1e4,
            rope_scaling: RopeScaling::None,
            sliding_window: None,
            embed_layernorm: false,
            normalization: Normalization::RMSNorm,
            norm_epsilon: 1e-5,
            swiglu: true,
            bias_linear: false,
            qkv_bias: false,
            untie_embeddings_and_output_weights: true,
            vocab_size: 100,
            make_vocab_size_divisible_by: 128,
            attention_dropout: 0.1,
            hidden_dropout: 0.1,
            init_method_std: 0.02,
        },
        parallel: ParallelConfig {
            tensor_model_parallel_size: 2,
            pipeline_model_parallel_size: 2,
            context_parallel_size: 1,
            data_parallel_size: 2,
            virtual_pipeline_size: 2,
            schedule: ScheduleKind::Interleaved,
            delay_wgrad_compute: false,
            extra_warmup: 0,
            partition: PartitionMethod::Uniform,
            sequence_parallel: true,
            zero_stage: 1,
            num_distributed_optimizer_instances: 1,
            zero_reshard_after_forward: true,
            param_offload: crate::config::Offload::None,
            overlap_grad_reduce: true,
            bucket_size: 1000,
        },
        data: DataConfig {
            data_path: vec!["text".into()],
            split: "969,30,1".into(),
            tokenizer: Some("byte".into()),
            tokenizer_options: Default::default(),
            dataloader_type: DataloaderType::Shuffled,
            eod_mask_loss: false,
            reset_position_ids: false,
            reset_attention_mask: false,
            cache_dir: PathBuf::from("cache"),
            mock: false,
        },
        training: TrainingConfig {
            micro_batch_size: 2,
            global_batch_size: 16,
            rampup: None,
            train_iters: 10,
            train_samples: None,
            exit_interval: None,
            max_nonfinite_steps: 10,
            exit_duration_in_mins: None,
            iterations_to_skip: vec![],
            skip_train: false,
            seed: 1,
            recompute: Recompute::None,
            distribute_saved_activations: false,
            activation_offload: Default::default(),
            precision: Precision::Fp32,
            grad_reduce_in_bf16: false,
            grad_reduce_in_fp16: false,
            enable_cuda_graph: false,
        },
        optimizer: OptimizerConfig {
            kind: OptimizerKind::Adam,
            lr: 1e-3,
            min_lr: 1e-4,
            decay_style: DecayStyle::Cosine,
            decay_samples: 160,
            warmup_samples: 16,
            warmup_init: 0.0,
            wsd_decay_samples: 0,
            wsd_decay_style: WsdDecayStyle::Linear,
            lr_schedule: None,
            weight_decay: 0.01,
            weight_decay_increase: None,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
            exp_avg_dtype: Default::default(),
            exp_avg_sq_dtype: Default::default(),
            offload: Default::default(),
            sgd_momentum: 0.9,
            clip_grad: 1.0,
        },
        checkpoint: CheckpointConfig::default(),
        logging: LoggingConfig {
            log_interval: 1,
            eval_interval: None,
            eval_iters: 1,
            log_params_norm: false,
            log_num_zeros_in_grad: false,
            timing_log_level: 0,
            timing_log_option: Default::default(),
            metrics: None,
            tensorboard: None,
            prompt: None,
            prompt_tokens: 1,
            profile: None,
        },
    }
}

fn dynamic(scale: DynamicLossScale) -> Precision {
    Precision::Fp16(LossScaling::Dynamic(scale))
}

#[test]
fn a_valid_run_is_accepted() {
    valid().validate().unwrap();
}

#[test]
fn every_broken_equation_is_named_with_its_numbers() {
    type Break = fn(&mut RunConfig);
    let cases: [(Break, &str); 58] = [
        (
            |c| c.model.num_query_groups = 3,
            "num_attention_heads = 8 must be a multiple of num_query_groups = 3: 8 mod 3 = 2",
        ),
        (
            |c| c.model.num_attention_heads = 12,
            "must be a multiple of tensor_model_parallel_size = 8",
        ),
        (
            |c| c.model.num_query_groups = 1,
            "num_query_groups = 1 must be a multiple of tensor_model_parallel_size = 2",
        ),
        (|c| c.model.ffn_hidden_size = 255, "ffn_hidden_size = 255 must be a multiple of"),
        (|c| c.model.seq_length = 31, "seq_length = 31 must be a multiple of"),
        (|c| c.model.seq_length = 34, "seq_length = 34 exceeds max_position_embeddings = 32"),
        (|c| c.model.head_dim = 7, "kv_channels = 7 must be even"),
        (
            |c| c.model.sliding_window = Some(SlidingWindow { size: 0, full_layers: vec![] }),
            "sliding_window = 0 must be at least 1",
        ),
        (
            |c| {
                (c.model.position_embedding, c.data.reset_position_ids) =
                    (PositionEmbedding::Alibi, true)
            },
            "reset_position_ids = true has no effect",
        ),
        (|c| c.model.attention_dropout = 1.0, "attention_dropout = 1 must be in [0, 1)"),
        (|c| c.model.norm_epsilon = f64::NAN, "norm_epsilon = NaN must be a finite number above 0"),
        (|c| c.model.num_layers = 3, "num_layers = 3 cannot fill 4 stages"),
        (
            |c| c.parallel.partition = PartitionMethod::Explicit(vec![4, 4]),
            "lists 2 stages, but there are 4",
        ),
        (
            |c| c.parallel.partition = PartitionMethod::Explicit(vec![2, 2, 2, 1]),
            "distributes 7 layers, but num_layers = 8",
        ),
        (
            |c| c.parallel.context_parallel_size = 5,
            "num_query_groups = 4 must be a multiple of 10 (the product of tensor_model_parallel_size = 2, context_parallel_size = 5)",
        ),
        (
            |c| {
                (
                    c.parallel.context_parallel_size,
                    c.model.seq_length,
                    c.model.max_position_embeddings,
                ) = (4, 20, 20)
            },
            "seq_length = 20 must be a multiple of 8 (the product of tensor_model_parallel_size = 2, context_parallel_size = 4)",
        ),
        (
            |c| {
                (c.parallel.context_parallel_size, c.model.seq_length) = (4, 18);
                c.parallel.sequence_parallel = false;
            },
            "seq_length = 18 must be a multiple of context_parallel_size = 4",
        ),
        (
            |c| c.parallel.partition = PartitionMethod::Type("(trans".into()),
            "pipeline_partition = type:(trans is no regular expression: unclosed group",
        ),
        (
            |c| c.training.distribute_saved_activations = true,
            "distribute_saved_activations = true splits the inputs that full recompute saves; set recompute_granularity = full",
        ),
        (
            |c| {
                c.training.recompute = Recompute::Selective;
                c.training.distribute_saved_activations = true;
            },
            "distribute_saved_activations = true splits the inputs that full recompute saves; set recompute_granularity = full",
        ),
        (
            |c| c.training.activation_offload = Offload::Nvme("disk".into()),
            "offload_activations = nvme moves the inputs that full recompute saves; set recompute_granularity = full",
        ),
        (
            |c| {
                c.training.recompute = Recompute::Selective;
                c.training.activation_offload = Offload::Cpu;
            },
            "offload_activations = cpu moves the inputs that full recompute saves; set recompute_granularity = full",
        ),
        (
            |c| {
                c.parallel.tensor_model_parallel_size = 1;
                distribute(c);
            },
            "distribute_saved_activations = true has no effect with tensor_model_parallel_size = 1",
        ),
        (
            distribute,
            "distribute_saved_activations = true and sequence_parallel = true cannot be combined: sequence parallelism already splits",
        ),
        (|c| c.parallel.context_parallel_size = 0, "context_parallel_size = 0 must be at least 1"),
        (|c| c.parallel.schedule = ScheduleKind::OneFOneB, "need pipeline_schedule = interleaved"),
        (|c| c.parallel.pipeline_model_parallel_size = 1, "needs at least 2 stages"),
        (|c| c.training.global_batch_size = 18, "global_batch_size = 18 must be a multiple of 4"),
        (
            |c| c.training.global_batch_size = 12,
            "there are 3 (global_batch_size = 12 / (micro_batch_size = 2 · data_parallel_size = 2))",
        ),
        (|c| c.training.micro_batch_size = 0, "micro_batch_size = 0 must be at least 1"),
        (|c| c.optimizer.min_lr = 1.0, "min_lr = 1 exceeds lr = 0.001"),
        (|c| c.optimizer.warmup_samples = 161, "the warm-up of 161 samples"),
        (|c| c.optimizer.warmup_init = 1.0, "lr_warmup_init = 1 exceeds lr = 0.001"),
        (|c| increase(c, 0.2, 0.1), "start_weight_decay = 0.2 exceeds end_weight_decay = 0.1"),
        (
            |c| increase(c, -0.1, 0.1),
            "start_weight_decay = -0.1 must be a finite number that is not negative",
        ),
        (|c| c.data.mock = true, "mock_data = true and data_path = text are two sources of data"),
        (|c| c.data.data_path.clear(), "data_path is empty"),
        (
            |c| c.training.exit_duration_in_mins = Some(0.0),
            "exit_duration_in_mins = 0 must be a finite number above 0",
        ),
        (
            |c| c.training.iterations_to_skip = vec![3, 0],
            "iterations_to_skip = 0: steps are counted from 1",
        ),
        (
            |c| (c.training.skip_train, c.logging.eval_iters) = (true, 0),
            "skip_train = true only evaluates, but eval_iters = 0 turns evaluation off",
        ),
        (
            |c| c.checkpoint.retention.most_recent = Some(2),
            "most_recent_k = 2 has no effect: no checkpoints are saved",
        ),
        (|c| retain(c, 0), "save_retain_interval = 0 must be at least 1"),
        (
            |c| retain(c, 9),
            "save_retain_interval = 9 must be a multiple of save_interval = 6: 9 mod 6 = 3",
        ),
        (|c| c.data.split = "0,0,0".into(), "split = \"0,0,0\""),
        (|c| c.checkpoint.save_interval = Some(5), "save_interval = 5 has no folder"),
        (|c| c.logging.log_interval = 0, "log_interval = 0 must be at least 1"),
        (|c| c.logging.timing_log_level = 3, "timing_log_level = 3 must be 0, 1 or 2"),
        (
            |c| {
                c.logging.tensorboard = Some(TensorboardConfig {
                    dir: "board".into(),
                    log_interval: 0,
                    log_validation_ppl: false,
                    log_timers: false,
                    log_memory: false,
                });
            },
            "tensorboard_log_interval = 0 must be at least 1",
        ),
        (|c| c.training.train_iters = 0, "train_iters = 0 leaves nothing to train"),
        (
            |c| {
                (c.parallel.pipeline_model_parallel_size, c.parallel.virtual_pipeline_size) =
                    (1, 1);
                (c.parallel.schedule, c.parallel.delay_wgrad_compute) =
                    (ScheduleKind::OneFOneB, true);
            },
            "delay_wgrad_compute = true fills the time",
        ),
        (
            |c| {
                (c.parallel.pipeline_model_parallel_size, c.parallel.virtual_pipeline_size) =
                    (1, 1);
                (c.parallel.schedule, c.parallel.extra_warmup) = (ScheduleKind::OneFOneB, 1);
            },
            "pipeline_extra_warmup = 1 has no effect",
        ),
        (|c| c.parallel.extra_warmup = 2, "pipeline_extra_warmup = 2 is for the 1f1b schedule"),
        (
            |c| {
                c.optimizer.kind = OptimizerKind::Sgd;
                c.optimizer.exp_avg_sq_dtype = MomentDtype::Bf16;
            },
            "exp_avg_sq_dtype = bf16 is for Adam's moments, but the optimizer is SGD",
        ),
        (
            |c| c.training.grad_reduce_in_bf16 = true,
            "grad_reduce_in_bf16 = true is a setting of bf16",
        ),
        (
            |c| c.training.grad_reduce_in_fp16 = true,
            "grad_reduce_in_fp16 = true is a setting of fp16",
        ),
        (
            |c| c.training.precision = Precision::Fp16(LossScaling::Static(0.0)),
            "loss_scale = 0 must be a finite number",
        ),
        (
            |c| c.training.precision = dynamic(DynamicLossScale { min: 1e6, ..Default::default() }),
            "min_loss_scale = 1000000 exceeds",
        ),
        (
            |c| {
                c.training.precision = dynamic(DynamicLossScale { window: 0, ..Default::default() })
            },
            "loss_scale_window = 0",
        ),
    ];
    for (broken, expected) in cases {
        let mut run = valid();
        broken(&mut run);
        if expected.ends_with("tensor_model_parallel_size = 8") {
            run.parallel.tensor_model_parallel_size = 8;
        }
        let message = run.validate().unwrap_err().to_string();
        assert!(message.contains(expected), "no {expected:?} in {message}");
    }
}

/// Every batch size of a ramp-up must fit the layout; the valid run needs multiples of 8 (2·2·2:
/// mbs·dp, and pp microbatches).
#[test]
fn batches_that_do_not_grow_evenly_or_do_not_fit_the_layout_are_refused() {
    let growing = |start, increment, samples| {
        let mut run = valid();
        run.training.global_batch_size = 64;
        run.training.train_samples = Some(1000);
        run.training.rampup = Some(BatchSizeRampup { start, increment, samples });
        run
    };
    growing(8, 8, 100).validate().unwrap();
    growing(16, 24, 1).validate().unwrap();
    for (start, increment, samples, expected) in [
        (0, 8, 100, "must each be at least 1"),
        (8, 0, 100, "must each be at least 1"),
        (8, 8, 0, "must each be at least 1"),
        (
            64,
            8,
            100,
            "rampup_batch_size = 64 8 100 starts with 64 samples per step, which must be below global_batch_size = 64",
        ),
        (
            8,
            24,
            100,
            "does not reach global_batch_size = 64: 64 − 8 must be a multiple of the increment, and 56 mod 24 = 8",
        ),
        (
            4,
            4,
            100,
            "must be multiples of 8 (micro_batch_size = 2, data_parallel_size = 2, pipeline_model_parallel_size = 2)",
        ),
        (16, 12, 100, "16 mod 8 = 0, 12 mod 8 = 4"),
    ] {
        let message = growing(start, increment, samples).validate().unwrap_err().to_string();
        assert!(message.contains(expected), "no {expected:?} in {message}");
    }
    let mut in_steps = growing(8, 8, 100);
    in_steps.training.train_samples = None;
    let message = in_steps.validate().unwrap_err().to_string();
    assert!(message.contains("set train_samples instead of train_iters = 10"), "{message}");
    // Without an interleaved schedule, any number of microbatches is valid.
    let mut plain = growing(4, 4, 100);
    (plain.parallel.schedule, plain.parallel.virtual_pipeline_size) = (ScheduleKind::OneFOneB, 1);
    plain.validate().unwrap();
}

#[test]
fn a_graph_is_refused_where_it_would_repeat_what_differs() {
    let mut plain = valid();
    plain.parallel = ParallelConfig {
        tensor_model_parallel_size: 1,
        pipeline_model_parallel_size: 1,
        virtual_pipeline_size: 1,
        schedule: ScheduleKind::OneFOneB,
        sequence_parallel: false,
        overlap_grad_reduce: false,
        ..plain.parallel
    };
    plain.training.enable_cuda_graph = true;
    plain.training.recompute = Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 };
    plain.validate().unwrap();

    type Break = fn(&mut RunConfig);
    let cases: [(Break, &str); 4] = [
        (|c| c.parallel.tensor_model_parallel_size = 2, "tensor_model_parallel_size = 2"),
        (|c| c.parallel.pipeline_model_parallel_size = 2, "pipeline_model_parallel_size = 2"),
        (|c| c.parallel.overlap_grad_reduce = true, "overlap_grad_reduce = true"),
        (|c| c.training.activation_offload = Offload::Cpu, "offload_activations = cpu"),
    ];
    for (broken, setting) in cases {
        let mut run = plain.clone();
        broken(&mut run);
        let message = run.validate().unwrap_err().to_string();
        let expected = format!("{setting} cannot be combined with enable_cuda_graph = true: ");
        assert!(message.contains(&expected), "no {expected:?} in {message}");
        run.training.enable_cuda_graph = false;
        run.validate().unwrap();
    }
}

#[test]
fn everything_wrong_is_listed_at_once() {
    let mut run = valid();
    run.optimizer.lr = 0.0;
    run.training.train_iters = 0;
    let message = run.validate().unwrap_err().to_string();
    assert!(message.starts_with("3 settings are wrong:\n  - "), "{message}");
}

#[test]
fn an_unknown_vocabulary_is_not_an_error_yet() {
    let mut run = valid();
    run.model.vocab_size = 0;
    run.validate().unwrap();
}

#[test]
fn microbatches_are_the_global_batch_over_what_a_pass_takes() {
    assert_eq!(valid().num_microbatches(), 4);
}

#[test]
fn saved_inputs_are_cut_and_moved_under_full_recompute() {
    let mut run = valid();
    distribute(&mut run);
    run.parallel.sequence_parallel = false;
    run.training.activation_offload = Offload::Cpu;
    run.validate().unwrap();
    run.parallel.partition = PartitionMethod::Type("transformer|embedding".into());
    run.validate().unwrap();
}
