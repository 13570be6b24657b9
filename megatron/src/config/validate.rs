//! The equations that a run's settings must satisfy.
//!
//! Each error shows the equation with every number and its origin, and what to change. All errors
//! are reported at once.

mod deepspeed_schedule;
mod ends;
mod parallel;
mod training;
mod weight_decay;

use std::fmt::Display;

use super::{
    BatchSizeRampup, DecayStyle, DeepSpeedSchedule, LossScaling, ModelConfig, MomentDtype, Offload,
    OptimizerConfig, OptimizerKind, Origins, ParallelConfig, PositionEmbedding, Precision,
    Recompute, RecomputeMethod, RopeScaling, RunConfig, TrainingConfig,
};
use crate::{Error, Result};

impl RunConfig {
    /// Checks every section and their equations; see [`RunConfig::validate_with`].
    ///
    /// # Errors
    /// [`Error::Config`] that lists everything found wrong.
    pub fn validate(&self) -> Result<()> {
        self.validate_with(&Origins::default())
    }

    /// Checks every section and their equations, citing the origin of each number. A `vocab_size`
    /// of 0 means that the data have not been opened yet, and is not checked.
    ///
    /// # Errors
    /// [`Error::Config`] that lists everything found wrong.
    pub fn validate_with(&self, origins: &Origins) -> Result<()> {
        let mut check = Check { origins, problems: Vec::new() };
        check.model(&self.model);
        check.parallel(&self.parallel, &self.model);
        check.training(&self.training, &self.parallel, &self.model);
        check.saved_inputs(&self.training, &self.parallel);
        check.precision(&self.training);
        check.optimizer(&self.optimizer);
        check.lr_schedule(self);
        check.files(self);
        check.cuda_graph(self);
        check.finish()
    }

    /// Checks the settings that CUDA graphs can be combined with: a part of
    /// [`RunConfig::validate`].
    ///
    /// # Errors
    /// As for [`RunConfig::validate`].
    pub fn validate_cuda_graph(&self) -> Result<()> {
        let mut check = Check { origins: &Origins::default(), problems: Vec::new() };
        check.cuda_graph(self);
        check.finish()
    }

    /// Checks DeepSpeed's learning-rate schedule, which a checkpoint may have supplied: a part of
    /// [`RunConfig::validate`].
    ///
    /// # Errors
    /// As for [`RunConfig::validate`].
    pub fn validate_lr_schedule(&self) -> Result<()> {
        let mut check = Check { origins: &Origins::default(), problems: Vec::new() };
        check.lr_schedule(self);
        check.finish()
    }

    /// Microbatches per step and replica: GBS / (MBS·dp).
    pub fn num_microbatches(&self) -> usize {
        self.training.global_batch_size
            / (self.training.micro_batch_size * self.parallel.data_parallel_size)
    }
}

impl ParallelConfig {
    /// Checks the model and its layout, citing the origin of each number.
    ///
    /// # Errors
    /// [`Error::Config`] that lists everything found wrong with either.
    pub fn validate_with(&self, model: &ModelConfig, origins: &Origins) -> Result<()> {
        let mut check = Check { origins, problems: Vec::new() };
        check.model(model);
        check.parallel(self, model);
        check.finish()
    }
}

/// Limit of all sizes; no model comes near.
const LARGEST: usize = i32::MAX as usize;

/// Limit per step, because a schedule lists every action.
const MOST_MICROBATCHES: usize = 1 << 20;

struct Check<'a> {
    origins: &'a Origins,
    problems: Vec<String>,
}

impl Check<'_> {
    fn finish(self) -> Result<()> {
        match self.problems.as_slice() {
            [] => Ok(()),
            [one] => Err(Error::config(one.clone())),
            many => Err(Error::config(format!(
                "{} settings are wrong:\n  - {}",
                many.len(),
                many.join("\n  - ")
            ))),
        }
    }

    fn cite(&self, key: &str, value: impl Display) -> String {
        self.origins.cite(key, value)
    }

    fn require(&mut self, holds: bool, problem: impl FnOnce(&Self) -> String) {
        if !holds {
            let problem = problem(self);
            self.problems.push(problem);
        }
    }

    fn positive(&mut self, key: &str, value: usize) {
        self.require(value > 0, |c| format!("{} must be at least 1", c.cite(key, value)));
    }

    /// A size of a model, a batch or a layout: at least 1, and small enough that products of a few
    /// sizes do not overflow.
    fn size(&mut self, key: &str, value: usize) {
        self.positive(key, value);
        self.require(value <= LARGEST, |c| {
            format!("{} must be at most {LARGEST}", c.cite(key, value))
        });
    }

    fn positive_steps(&mut self, key: &str, value: Option<u64>) {
        self.require(value != Some(0), |c| {
            format!("{} must be at least 1; leave it out to turn it off", c.cite(key, 0))
        });
    }

    /// `value` is in [0, 1); used for probabilities and momenta.
    fn fraction(&mut self, key: &str, value: f64) {
        self.require((0.0..1.0).contains(&value), |c| {
            format!("{} must be in [0, 1)", c.cite(key, value))
        });
    }

    fn non_negative(&mut self, key: &str, value: f64) {
        self.require(value.is_finite() && value >= 0.0, |c| {
            format!("{} must be a finite number that is not negative", c.cite(key, value))
        });
    }

    fn above_zero(&mut self, key: &str, value: f64) {
        self.require(value.is_finite() && value > 0.0, |c| {
            format!("{} must be a finite number above 0", c.cite(key, value))
        });
    }

    /// Losses are multiplied by the loss scale in f32.
    fn a_loss_scale(&mut self, key: &str, value: f64) {
        self.require(value > 0.0 && value <= f64::from(f32::MAX), |c| {
            format!(
                "{} must be a finite number above 0, and at most the largest of f32, 3.4e38",
                c.cite(key, value)
            )
        });
    }

    /// `key = value` must be a multiple of the product of `factors`. Zeros are reported elsewhere.
    fn divides(&mut self, key: &str, value: usize, factors: &[(&str, usize)], advice: &str) {
        let Some(divisor) =
            factors.iter().try_fold(1usize, |product, &(_, factor)| product.checked_mul(factor))
        else {
            self.problems.push(format!("the product of {} is too large", self.cite_all(factors)));
            return;
        };
        if divisor == 0 {
            return;
        }
        self.require(value.is_multiple_of(divisor), |c| {
            let product = match factors {
                [_] => String::new(),
                _ => format!(" (the product of {})", c.cite_all(factors)),
            };
            let by = match factors {
                [(key, value)] => c.cite(key, value),
                _ => divisor.to_string(),
            };
            format!(
                "{} must be a multiple of {by}{product}: {value} mod {divisor} = {}; {advice}",
                c.cite(key, value),
                value % divisor
            )
        });
    }

    fn cite_all(&self, settings: &[(&str, usize)]) -> String {
        settings.iter().map(|&(key, value)| self.cite(key, value)).collect::<Vec<_>>().join(", ")
    }

    fn model(&mut self, m: &ModelConfig) {
        self.size("num_layers", m.num_layers);
        self.size("hidden_size", m.hidden_size);
        self.size("ffn_hidden_size", m.ffn_hidden_size);
        self.size("num_attention_heads", m.num_attention_heads);
        self.size("num_query_groups", m.num_query_groups);
        self.size("kv_channels", m.head_dim);
        self.size("seq_length", m.seq_length);
        self.size("make_vocab_size_divisible_by", m.make_vocab_size_divisible_by);
        self.size("max_position_embeddings", m.max_position_embeddings);
        self.divides(
            "num_attention_heads",
            m.num_attention_heads,
            &[("num_query_groups", m.num_query_groups)],
            "every key/value head serves the same number of query heads",
        );
        if m.position_embedding == PositionEmbedding::Rope {
            self.require(m.head_dim.is_multiple_of(2), |c| {
                format!(
                    "{} must be even for rotary positions, which rotate pairs",
                    c.cite("kv_channels", m.head_dim)
                )
            });
            self.above_zero("rotary_base", m.rotary_base);
        }
        if let RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. } = m.rope_scaling
        {
            self.above_zero("rope_scaling_factor", factor);
            self.require(m.position_embedding == PositionEmbedding::Rope, |c| {
                format!(
                    "{} scales rotary positions, but the model has none",
                    c.cite("rope_scaling_factor", factor)
                )
            });
        }
        if let Some(window) = &m.sliding_window {
            self.positive("sliding_window", window.size);
        }
        self.require(m.seq_length <= m.max_position_embeddings, |c| {
            format!(
                "{} exceeds {}; a sample would have tokens without a position",
                c.cite("seq_length", m.seq_length),
                c.cite("max_position_embeddings", m.max_position_embeddings)
            )
        });
        self.above_zero("norm_epsilon", m.norm_epsilon);
        self.fraction("attention_dropout", m.attention_dropout);
        self.fraction("hidden_dropout", m.hidden_dropout);
        self.non_negative("init_method_std", m.init_method_std);
    }

    /// A graph replays what it recorded: only the contents of its inputs may differ from step to
    /// step.
    fn cuda_graph(&mut self, run: &RunConfig) {
        let (t, p) = (&run.training, &run.parallel);
        if !t.enable_cuda_graph {
            return;
        }
        let graph = self.cite("enable_cuda_graph", true);
        let whole = "a graph holds the computation of one rank and cannot record messages between ranks; set it to 1";
        let both = p.overlap_grad_reduce && p.data_parallel_size > 1;
        let (tp, cp, pp) =
            (p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size);
        for (holds, what, why) in [
            (tp <= 1, self.cite("tensor_model_parallel_size", tp), whole),
            (cp <= 1, self.cite("context_parallel_size", cp), whole),
            (pp <= 1, self.cite("pipeline_model_parallel_size", pp), whole),
            (
                !both,
                self.cite("overlap_grad_reduce", true),
                "gradients are reduced during backward, but the graph contains backward as a whole; leave it out",
            ),
            (
                p.zero_stage < 2 || p.num_shards() == 1,
                self.cite("zero_stage", p.zero_stage),
                "a graph needs gradients and weights that stay where they are; use stage 1",
            ),
            (
                t.activation_offload == Offload::None,
                self.cite("offload_activations", t.activation_offload.name()),
                "a graph cannot copy from or to the host; leave it out",
            ),
        ] {
            self.require(holds, |_| {
                format!(
                    "{what} cannot be combined with {graph}: {why}, or leave out enable_cuda_graph"
                )
            });
        }
    }

    fn optimizer(&mut self, o: &OptimizerConfig) {
        self.rates(o);
        self.weight_decay(o);
        self.non_negative("clip_grad", o.clip_grad);
        match o.kind {
            OptimizerKind::Adam => {
                self.fraction("adam_beta1", o.adam_beta1);
                self.fraction("adam_beta2", o.adam_beta2);
                self.above_zero("adam_eps", o.adam_eps);
            }
            OptimizerKind::Sgd => {
                self.fraction("sgd_momentum", o.sgd_momentum);
                for (key, dtype) in
                    [("exp_avg_dtype", o.exp_avg_dtype), ("exp_avg_sq_dtype", o.exp_avg_sq_dtype)]
                {
                    self.require(dtype == MomentDtype::Fp32, |c| {
                        format!(
                            "{} is for Adam's moments, but the optimizer is SGD",
                            c.cite(key, dtype)
                        )
                    });
                }
            }
        }
        self.require(o.warmup_samples <= o.decay_samples, |c| {
            format!(
                "the warm-up of {} samples ({}) must end no later than the decay, which ends after {} samples ({}); \
                 give fewer --lr-warmup-iters, or a part of the decay with --lr-warmup-fraction",
                o.warmup_samples,
                c.origins.of("lr_warmup").unwrap_or("warmup_samples"),
                o.decay_samples,
                c.origins.of("lr_decay").unwrap_or("decay_samples")
            )
        });
        if o.decay_style == DecayStyle::Wsd {
            self.require(o.wsd_decay_samples <= o.decay_samples.saturating_sub(o.warmup_samples), |c| {
                format!(
                    "the annealing of {} samples ({}) does not fit between the warm-up's end at {} and the decay's end at {} samples",
                    o.wsd_decay_samples,
                    c.origins.of("lr_wsd_decay").unwrap_or("wsd_decay_samples"),
                    o.warmup_samples,
                    o.decay_samples
                )
            });
        }
    }

    /// Learning rates; a schedule of DeepSpeed may have its own.
    fn rates(&mut self, o: &OptimizerConfig) {
        if !matches!(o.lr_schedule, None | Some(DeepSpeedSchedule::WarmupCosineLr(_))) {
            return;
        }
        self.above_zero("lr", o.lr);
        self.non_negative("min_lr", o.min_lr);
        self.require(o.min_lr <= o.lr || o.lr.is_nan(), |c| {
            format!("{} exceeds {}", c.cite("min_lr", o.min_lr), c.cite("lr", o.lr))
        });
        self.non_negative("lr_warmup_init", o.warmup_init);
        self.require(o.warmup_init <= o.lr || o.lr.is_nan() || o.warmup_init.is_nan(), |c| {
            format!("{} exceeds {}", c.cite("lr_warmup_init", o.warmup_init), c.cite("lr", o.lr))
        });
    }

    fn files(&mut self, run: &RunConfig) {
        self.require(!run.data.data_path.is_empty() || run.data.mock, |_| {
            "data_path is empty".to_string()
        });
        self.require(run.data.data_path.is_empty() || !run.data.mock, |c| {
            format!(
                "{} and {} are two sources of data; leave one out",
                c.cite("mock_data", true),
                c.cite("data_path", run.data.data_path.join(" "))
            )
        });
        self.require(super::parse_split(&run.data.split).is_ok(), |c| {
            format!(
                "{} must be up to three numbers, train,valid,test, not negative and not all 0",
                c.cite("split", format_args!("{:?}", run.data.split))
            )
        });
        let positions = run.model.position_embedding;
        let embedded =
            matches!(positions, PositionEmbedding::LearnedAbsolute | PositionEmbedding::Rope);
        self.require(embedded || !run.data.reset_position_ids, |c| {
            format!(
                "{} has no effect: {} has no positions to reset; leave it out (reset_attention_mask separates documents)",
                c.cite("reset_position_ids", true),
                c.cite("position_embedding_type", format!("{positions:?}").to_lowercase())
            )
        });
        self.positive_steps("save_interval", run.checkpoint.save_interval);
        self.require(
            run.checkpoint.save_interval.is_none() || run.checkpoint.save.is_some(),
            |c| {
                format!(
                    "{} has no folder to save to; set save",
                    c.cite("save_interval", run.checkpoint.save_interval.unwrap_or(0))
                )
            },
        );
        self.require(!run.checkpoint.async_save || run.checkpoint.save_interval.is_some(), |c| {
            format!(
                "{} has no effect: it writes the checkpoints of save_interval in the background; set save_interval",
                c.cite("async_save", true)
            )
        });
        self.retention(&run.checkpoint);
        self.skipped_training(run);
        for (offload, what, key) in [
            (&run.optimizer.offload, "optimizer state", "offload_optimizer"),
            (&run.parallel.param_offload, "weights", "offload_param"),
        ] {
            let Offload::Nvme(folder) = offload else { continue };
            self.require(!run.checkpoint.async_save, |c| {
                let older = "offload_optimizer_nvme_path";
                let moved = match c.origins.of(older) {
                    Some(origin) if key == "offload_optimizer" && origin != "default" => {
                        c.cite(older, folder.display())
                    }
                    _ => c.cite(key, "nvme"),
                };
                format!(
                    "{} copies the {what} in memory, but {moved} keeps them out of memory; leave one out",
                    c.cite("async_save", true)
                )
            });
        }
        self.require(run.logging.log_interval > 0, |c| {
            format!("{} must be at least 1", c.cite("log_interval", 0))
        });
        let level = run.logging.timing_log_level;
        self.require(level <= 2, |c| {
            format!("{} must be 0, 1 or 2", c.cite("timing_log_level", level))
        });
        let tensorboard =
            run.logging.tensorboard.as_ref().map(|tensorboard| tensorboard.log_interval);
        self.positive_steps("tensorboard_log_interval", tensorboard);
        self.positive_steps("eval_interval", run.logging.eval_interval);
        if let Some(profile) = &run.logging.profile {
            self.require((1..profile.step_end).contains(&profile.step_start), |c| {
                format!(
                    "{} and {} leave no step to record: the first is the first recorded step (1 or \
                     more), the second the step at which recording ends",
                    c.cite("profile_step_start", profile.step_start),
                    c.cite("profile_step_end", profile.step_end)
                )
            });
            let world = run.parallel.world_size();
            let missing = profile.ranks.iter().find(|rank| **rank >= world);
            self.require(missing.is_none(), |c| {
                format!(
                    "{} names a rank that is not among the {world} (0 to {})",
                    c.cite("profile_ranks", missing.unwrap_or(&0)),
                    world - 1
                )
            });
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
