//! Writes the settings that a checkpoint records as a run file.

use std::fmt::{Debug, Display};
use std::path::Path;

use megatron::config::{
    CheckpointConfig, DataConfig, DecayStyle, DeepSpeedSchedule, LoggingConfig, LossScaling,
    ModelConfig, Offload, OneCycle, OptimizerConfig, ParallelConfig, PartitionMethod, Precision,
    Recompute, RopeScaling, TrainingConfig, Warmup,
};
use megatron::train::RecordedRun;
use serde::Serialize;

use crate::cli::default_cache;
use crate::error::{Error, Result};

/// Paths of the run that takes the settings.
pub struct Places<'a> {
    /// The folder where it saves, if no given setting names one.
    pub save: Option<&'a Path>,
    /// Whether it saves.
    pub saves: bool,
    /// Whether it continues the recorded run, and therefore its reports.
    pub continues: bool,
    /// The tokenizer's copy beside the checkpoint, if there is one.
    pub tokenizer: Option<&'a Path>,
}

/// The text of the run file. Values that equal a default are left out where the default depends on
/// other settings.
///
/// # Errors
/// If a path is not UTF-8, which TOML requires.
pub fn text_of(run: &RecordedRun, places: &Places) -> Result<String> {
    let mut text = Text::default();
    text.model(&run.model);
    if let Some(parallel) = &run.parallel {
        text.parallel(parallel);
    }
    if let Some(data) = &run.data {
        text.data(data, places)?;
    }
    if let Some(training) = &run.training {
        text.training(training);
    }
    if let (Some(optimizer), Some(training)) = (&run.optimizer, &run.training) {
        let params = run.parallel.as_ref().map(|parallel| &parallel.param_offload);
        text.optimizer(optimizer, training, params.unwrap_or(&Offload::None))?;
    }
    if let Some(checkpoint) = &run.checkpoint {
        text.checkpoint(checkpoint, places)?;
    }
    if let Some(logging) = &run.logging {
        text.logging(logging, places)?;
    }
    Ok(text.0)
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn section(&mut self, name: &str) {
        self.0.push_str(&format!("[{name}]\n"));
    }

    /// Writes a number or a boolean.
    fn put(&mut self, key: &str, value: impl Display) {
        self.0.push_str(&format!("{key} = {value}\n"));
    }

    fn put_some(&mut self, key: &str, value: Option<impl Display>) {
        value.into_iter().for_each(|value| self.put(key, value));
    }

    /// Writes a float with a decimal point or an exponent, and all of its digits.
    fn float(&mut self, key: &str, value: f64) {
        self.put(key, format_args!("{value:?}"));
    }

    fn text(&mut self, key: &str, value: &str) {
        self.put(key, quoted(value));
    }

    fn list(&mut self, key: &str, values: impl IntoIterator<Item = impl Display>) {
        let values: Vec<String> = values.into_iter().map(|value| value.to_string()).collect();
        if !values.is_empty() {
            self.put(key, format_args!("[{}]", values.join(", ")));
        }
    }

    fn path(&mut self, key: &str, path: &Path) -> Result<()> {
        let text = path.to_str().ok_or_else(|| {
            Error::usage(format!(
                "{}: the path is not UTF-8, so {key} cannot be read from the checkpoint; give --{}",
                path.display(),
                key.replace('_', "-")
            ))
        })?;
        self.text(key, text);
        Ok(())
    }

    /// Writes one of a flag's possible values, which is also the serialized form of its type.
    fn choice(&mut self, key: &str, value: &(impl Serialize + Debug)) {
        if let Ok(serde_json::Value::String(word)) = serde_json::to_value(value) {
            self.text(key, &word);
        }
    }

    fn model(&mut self, m: &ModelConfig) {
        self.section("model");
        self.put("num_layers", m.num_layers);
        self.put("hidden_size", m.hidden_size);
        self.put("ffn_hidden_size", m.ffn_hidden_size);
        self.put("num_attention_heads", m.num_attention_heads);
        self.put("num_query_groups", m.num_query_groups);
        self.put("kv_channels", m.head_dim);
        self.put("seq_length", m.seq_length);
        // Otherwise it follows seq_length, which the user may set.
        if m.max_position_embeddings != m.seq_length {
            self.put("max_position_embeddings", m.max_position_embeddings);
        }
        self.choice("position_embedding_type", &m.position_embedding);
        self.float("rotary_base", m.rotary_base);
        match m.rope_scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                self.float("rotary_seq_len_interpolation_factor", factor)
            }
            RopeScaling::Llama3 { factor, .. } => {
                self.put("use_rope_scaling", true);
                self.float("rope_scaling_factor", factor);
            }
        }
        self.put_some("sliding_window", m.sliding_window.as_ref().map(|window| window.size));
        self.put("embed_layernorm", m.embed_layernorm);
        self.choice("normalization", &m.normalization);
        self.float("norm_epsilon", m.norm_epsilon);
        self.put("swiglu", m.swiglu);
        self.put("disable_bias_linear", !m.bias_linear);
        self.put("add_qkv_bias", m.qkv_bias);
        self.put("untie_embeddings_and_output_weights", m.untie_embeddings_and_output_weights);
        self.put("vocab_size", m.vocab_size);
        self.put("make_vocab_size_divisible_by", m.make_vocab_size_divisible_by);
        self.float("attention_dropout", m.attention_dropout);
        self.float("hidden_dropout", m.hidden_dropout);
        self.float("init_method_std", m.init_method_std);
    }

    fn parallel(&mut self, p: &ParallelConfig) {
        self.section("parallel");
        self.put("tensor_model_parallel_size", p.tensor_model_parallel_size);
        self.put("pipeline_model_parallel_size", p.pipeline_model_parallel_size);
        self.put("context_parallel_size", p.context_parallel_size);
        self.put("data_parallel_size", p.data_parallel_size);
        if p.virtual_pipeline_size > 1 {
            self.put("num_virtual_stages_per_pipeline_rank", p.virtual_pipeline_size);
        }
        self.choice("pipeline_schedule", &p.schedule);
        self.put("delay_wgrad_compute", p.delay_wgrad_compute);
        self.put("pipeline_extra_warmup", p.extra_warmup);
        match &p.partition {
            PartitionMethod::Explicit(sizes) => self.list("pipeline_partition", sizes),
            PartitionMethod::Type(regex) => {
                self.text("pipeline_partition", &format!("type:{regex}"));
            }
            method => self.choice("pipeline_partition", method),
        }
        self.put("sequence_parallel", p.sequence_parallel);
        self.put("zero_stage", p.zero_stage);
        self.put("num_distributed_optimizer_instances", p.num_distributed_optimizer_instances);
        self.put("zero_reshard_after_forward", p.zero_reshard_after_forward);
        self.put("overlap_grad_reduce", p.overlap_grad_reduce);
    }

    fn data(&mut self, d: &DataConfig, places: &Places) -> Result<()> {
        self.section("data");
        self.list("data_path", d.data_path.iter().map(|path| quoted(path)));
        if d.mock {
            self.put("mock_data", true);
        }
        self.text("split", &d.split);
        let options = &d.tokenizer_options;
        match (&d.tokenizer, places.tokenizer, &options.merge_file) {
            // The copy moves together with the checkpoint.
            (Some(spec), Some(copy), _) if spec != "byte" && !spec.starts_with("null:") => {
                self.path("tokenizer", copy)?;
            }
            (Some(vocab), _, Some(merges)) => {
                self.text("vocab_file", vocab);
                self.path("merge_file", merges)?;
            }
            (Some(spec), ..) => self.text("tokenizer", spec),
            (None, ..) => {}
        }
        self.put("tokenizer_hf_no_include_special_tokens", options.no_special_tokens);
        self.put("split_special_tokens", options.split_special_tokens);
        self.choice("dataloader_type", &d.dataloader_type);
        self.put("eod_mask_loss", d.eod_mask_loss);
        self.put("reset_position_ids", d.reset_position_ids);
        self.put("reset_attention_mask", d.reset_attention_mask);
        if d.cache_dir != default_cache() {
            self.path("cache_dir", &d.cache_dir)?;
        }
        Ok(())
    }

    fn training(&mut self, t: &TrainingConfig) {
        self.section("training");
        self.put("micro_batch_size", t.micro_batch_size);
        self.put("global_batch_size", t.global_batch_size);
        if let Some(rampup) = &t.rampup {
            let (start, increment) = (rampup.start as u64, rampup.increment as u64);
            self.list("rampup_batch_size", [start, increment, rampup.samples]);
        }
        match t.train_samples {
            Some(samples) => self.put("train_samples", samples),
            None => self.put("train_iters", t.train_iters),
        }
        self.put_some("exit_interval", t.exit_interval);
        t.exit_duration_in_mins
            .into_iter()
            .for_each(|minutes| self.float("exit_duration_in_mins", minutes));
        self.put("max_nonfinite_steps", t.max_nonfinite_steps);
        self.list("iterations_to_skip", &t.iterations_to_skip);
        self.put("seed", t.seed);
        match t.recompute {
            Recompute::None => {}
            Recompute::Selective => self.text("recompute_granularity", "selective"),
            Recompute::Full { method, num_layers } => {
                self.text("recompute_granularity", "full");
                self.choice("recompute_method", &method);
                self.put("recompute_num_layers", num_layers);
                self.put("distribute_saved_activations", t.distribute_saved_activations);
                self.text("offload_activations", t.activation_offload.name());
            }
        }
        self.put("enable_cuda_graph", t.enable_cuda_graph);
        match t.precision {
            Precision::Fp64 | Precision::Fp32 => {}
            Precision::Bf16 => self.put("bf16", true),
            Precision::Fp16(scaling) => {
                self.put("fp16", true);
                self.scaling(scaling);
            }
        }
        self.put("grad_reduce_in_bf16", t.grad_reduce_in_bf16);
        self.put("grad_reduce_in_fp16", t.grad_reduce_in_fp16);
    }

    fn scaling(&mut self, scaling: LossScaling) {
        match scaling {
            LossScaling::Static(scale) => self.float("loss_scale", scale),
            LossScaling::Dynamic(d) => {
                self.float("initial_loss_scale", d.initial);
                self.float("min_loss_scale", d.min);
                self.put("loss_scale_window", d.window);
                self.put("hysteresis", d.hysteresis);
                self.put("consecutive_hysteresis", d.consecutive_hysteresis);
            }
        }
    }

    fn optimizer(
        &mut self,
        o: &OptimizerConfig,
        t: &TrainingConfig,
        params: &Offload,
    ) -> Result<()> {
        self.section("optimizer");
        self.choice("optimizer", &o.kind);
        match &o.lr_schedule {
            None => self.megatron_schedule(o, t),
            Some(schedule) => self.deepspeed_schedule(schedule, o.lr, t),
        }
        self.float("weight_decay", o.weight_decay);
        if let Some(increase) = &o.weight_decay_increase {
            self.choice("weight_decay_incr_style", &increase.style);
            self.float("start_weight_decay", increase.start);
            self.float("end_weight_decay", increase.end);
        }
        // A schedule that cycles the momentum replaces both.
        if !matches!(&o.lr_schedule, Some(DeepSpeedSchedule::OneCycle(c)) if c.cycle_momentum) {
            self.float("adam_beta1", o.adam_beta1);
            self.float("adam_beta2", o.adam_beta2);
        }
        self.float("adam_eps", o.adam_eps);
        self.choice("exp_avg_dtype", &o.exp_avg_dtype);
        self.choice("exp_avg_sq_dtype", &o.exp_avg_sq_dtype);
        self.text("offload_optimizer", o.offload.name());
        self.text("offload_param", params.name());
        // They have one folder.
        let folder =
            [&o.offload, params, &t.activation_offload].into_iter().find_map(|to| match to {
                Offload::Nvme(folder) => Some(folder),
                Offload::None | Offload::Cpu => None,
            });
        if let Some(folder) = folder {
            self.path("nvme_path", folder)?;
        }
        self.float("sgd_momentum", o.sgd_momentum);
        self.float("clip_grad", o.clip_grad);
        Ok(())
    }

    fn megatron_schedule(&mut self, o: &OptimizerConfig, t: &TrainingConfig) {
        self.float("lr", o.lr);
        self.float("min_lr", o.min_lr);
        self.choice("lr_decay_style", &o.decay_style);
        // Otherwise it follows the run's length, which the user may set.
        if o.decay_samples != t.samples() {
            self.put("lr_decay_samples", o.decay_samples);
        }
        self.put("lr_warmup_samples", o.warmup_samples);
        self.float("lr_warmup_init", o.warmup_init);
        if o.decay_style == DecayStyle::Wsd || o.wsd_decay_samples > 0 {
            self.put("lr_wsd_decay_samples", o.wsd_decay_samples);
        }
        self.choice("lr_wsd_decay_style", &o.wsd_decay_style);
    }

    fn deepspeed_schedule(&mut self, schedule: &DeepSpeedSchedule, lr: f64, t: &TrainingConfig) {
        let name = match schedule {
            DeepSpeedSchedule::WarmupLr(warmup) => {
                self.warmup(warmup);
                "WarmupLR"
            }
            DeepSpeedSchedule::WarmupDecayLr(decay) => {
                self.warmup(&decay.warmup);
                self.total_num_steps(decay.total_num_steps, t);
                "WarmupDecayLR"
            }
            DeepSpeedSchedule::WarmupCosineLr(cosine) => {
                self.float("lr", lr);
                self.float("warmup_min_ratio", cosine.warmup_min_ratio);
                self.put("warmup_num_steps", cosine.warmup_num_steps);
                self.choice("warmup_type", &cosine.warmup_type);
                self.float("cos_min_ratio", cosine.cos_min_ratio);
                self.total_num_steps(cosine.total_num_steps, t);
                "WarmupCosineLR"
            }
            DeepSpeedSchedule::OneCycle(cycle) => {
                self.one_cycle(cycle);
                "OneCycle"
            }
            DeepSpeedSchedule::LrRangeTest(test) => {
                self.float("lr_range_test_min_lr", test.lr_range_test_min_lr);
                self.put("lr_range_test_step_size", test.lr_range_test_step_size);
                self.float("lr_range_test_step_rate", test.lr_range_test_step_rate);
                self.put("lr_range_test_staircase", test.lr_range_test_staircase);
                "LRRangeTest"
            }
        };
        self.text("lr_schedule", name);
    }

    /// The highest rate is written as `lr`, which the user may set.
    fn warmup(&mut self, warmup: &Warmup) {
        self.float("lr", warmup.warmup_max_lr);
        self.float("warmup_min_lr", warmup.warmup_min_lr);
        self.put("warmup_num_steps", warmup.warmup_num_steps);
        self.choice("warmup_type", &warmup.warmup_type);
    }

    /// Otherwise it follows the run's length, which the user may set.
    fn total_num_steps(&mut self, steps: u64, t: &TrainingConfig) {
        if steps != t.train_iters {
            self.put("total_num_steps", steps);
        }
    }

    fn one_cycle(&mut self, cycle: &OneCycle) {
        self.float("cycle_min_lr", cycle.cycle_min_lr);
        self.float("cycle_max_lr", cycle.cycle_max_lr);
        self.float("decay_lr_rate", cycle.decay_lr_rate);
        self.put("cycle_first_step_size", cycle.cycle_first_step_size);
        self.put("cycle_second_step_size", cycle.cycle_second_step_size);
        self.put("cycle_first_stair_count", cycle.cycle_first_stair_count);
        self.put("cycle_second_stair_count", cycle.cycle_second_stair_count);
        self.put("decay_step_size", cycle.decay_step_size);
        self.put("cycle_momentum", cycle.cycle_momentum);
        if cycle.cycle_momentum {
            self.float("cycle_min_mom", cycle.cycle_min_mom);
            self.float("cycle_max_mom", cycle.cycle_max_mom);
            self.float("decay_mom_rate", cycle.decay_mom_rate);
        }
    }

    fn checkpoint(&mut self, c: &CheckpointConfig, places: &Places) -> Result<()> {
        self.section("checkpoint");
        if let Some(save) = places.save {
            self.path("save", save)?;
        }
        if places.saves {
            self.put_some("save_interval", c.save_interval);
            self.put("async_save", c.async_save);
            self.put_some("save_retain_interval", c.retention.interval);
            self.put_some("most_recent_k", c.retention.most_recent);
        }
        Ok(())
    }

    fn logging(&mut self, l: &LoggingConfig, places: &Places) -> Result<()> {
        self.section("logging");
        self.put("log_interval", l.log_interval);
        self.put_some("eval_interval", l.eval_interval);
        self.put("eval_iters", l.eval_iters);
        self.put("log_params_norm", l.log_params_norm);
        self.put("log_num_zeros_in_grad", l.log_num_zeros_in_grad);
        self.put("timing_log_level", l.timing_log_level);
        self.choice("timing_log_option", &l.timing_log_option);
        l.prompt.iter().for_each(|prompt| self.text("prompt", prompt));
        self.put("prompt_tokens", l.prompt_tokens);
        if !places.continues {
            return Ok(());
        }
        if let Some(metrics) = &l.metrics {
            self.path("metrics", metrics)?;
        }
        if let Some(tensorboard) = &l.tensorboard {
            self.path("tensorboard_dir", &tensorboard.dir)?;
            self.put("tensorboard_log_interval", tensorboard.log_interval);
            self.put("log_validation_ppl_to_tensorboard", tensorboard.log_validation_ppl);
            self.put("log_timers_to_tensorboard", tensorboard.log_timers);
            self.put("log_memory_to_tensorboard", tensorboard.log_memory);
        }
        Ok(())
    }
}

/// A TOML string: like a JSON string except for one character.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007F")
}
