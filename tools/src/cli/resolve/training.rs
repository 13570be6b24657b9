//! `[training]`: batches, steps, precision, recompute.

use megatron::config::{
    BatchSizeRampup, DynamicLossScale, LossScaling, ParallelConfig, Precision, Recompute,
    RecomputeMethod, TrainingConfig,
};

use super::Resolver;
use crate::cli::flags::{Granularity, RecomputeFlags};
use crate::error::{Error, Result};

impl Resolver<'_> {
    pub(super) fn training(&mut self, parallel: &ParallelConfig) -> Result<TrainingConfig> {
        self.exit_signal()?;
        let t = &self.flags.training;
        let (micro_batch_size, global_batch_size) = self.batch(parallel.data_parallel_size)?;
        let mut training = TrainingConfig {
            micro_batch_size,
            global_batch_size,
            rampup: self.rampup()?,
            train_iters: 0,
            train_samples: t.train_samples,
            exit_interval: t.exit_interval,
            max_nonfinite_steps: self.max_nonfinite_steps()?,
            exit_duration_in_mins: t.ends.exit_duration_in_mins,
            iterations_to_skip: t.iterations_to_skip.clone(),
            skip_train: t.skip_train,
            seed: t.seed,
            recompute: self.recompute(&t.recompute)?,
            distribute_saved_activations: t.recompute.distribute_saved_activations,
            activation_offload: self.activation_offload()?,
            precision: self.precision()?,
            grad_reduce_in_bf16: t.precision.grad_reduce_in_bf16,
            grad_reduce_in_fp16: t.precision.grad_reduce_in_fp16,
            enable_cuda_graph: t.enable_cuda_graph,
        };
        training.train_iters = match (t.train_iters, t.train_samples) {
            (Some(steps), _) => steps,
            (None, samples) => {
                let samples = samples.unwrap_or(0);
                let cited = self.origins.cite("train_samples", samples);
                self.origins.record("train_iters", format!("{cited} / global_batch_size"));
                training.steps_left(0, samples)
            }
        };
        Ok(training)
    }

    /// The number of consecutive non-finite steps that ends a run as diverged.
    pub(super) fn max_nonfinite_steps(&self) -> Result<u64> {
        let t = &self.flags.training;
        if !t.check_for_nan_in_loss_and_grad {
            return Ok(t.max_nonfinite_steps);
        }
        if t.max_nonfinite_steps != 1 && self.origins.of("max_nonfinite_steps") != Some("default") {
            return Err(Error::usage(format!(
                "{} ends the run at the first step that is not finite, but {} does not; give only one",
                self.origins.cite("check_for_nan_in_loss_and_grad", true),
                self.origins.cite("max_nonfinite_steps", t.max_nonfinite_steps)
            )));
        }
        Ok(1)
    }

    /// How the global batch grows. With a growing batch, lengths in steps do not determine a number
    /// of samples.
    pub(super) fn rampup(&self) -> Result<Option<BatchSizeRampup>> {
        let (given, o) = (&self.flags.training.rampup_batch_size, &self.flags.optimizer);
        if given.is_empty() {
            return Ok(None);
        }
        let shown = given.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        let cited = self.origins.cite("rampup_batch_size", shown);
        let sizes =
            given.iter().map(|&n| usize::try_from(n)).collect::<std::result::Result<Vec<_>, _>>();
        let (Ok([start, increment, _]), [_, _, samples]) = (sizes.as_deref(), given.as_slice())
        else {
            return Err(Error::usage(format!(
                "{cited} must be three numbers: the first batch size, the increment, and the samples over which the batch grows"
            )));
        };
        let in_steps = [
            ("train", self.flags.training.train_iters),
            ("lr_decay", o.lr_decay_iters),
            // Megatron-LM's default, 0, means none.
            ("lr_warmup", o.lr_warmup_iters.filter(|steps| *steps > 0)),
            ("lr_wsd_decay", o.lr_wsd_decay_iters),
        ];
        let in_steps: Vec<String> = in_steps
            .into_iter()
            .filter_map(|(name, steps)| {
                let flag = format!("--{}-samples", name.replace('_', "-"));
                Some(format!(
                    "{flag} instead of {}",
                    self.origins.cite(&format!("{name}_iters"), steps?)
                ))
            })
            .collect();
        if !in_steps.is_empty() {
            return Err(Error::usage(format!(
                "with {cited}, steps have different numbers of samples, so give lengths in samples: {}",
                in_steps.join(", ")
            )));
        }
        Ok(Some(BatchSizeRampup { start: *start, increment: *increment, samples: *samples }))
    }

    pub(super) fn precision(&mut self) -> Result<Precision> {
        let p = &self.flags.training.precision;
        self.at_most_one(&[("bf16", p.bf16), ("fp16", p.fp16)])?;
        // In Megatron-LM and DeepSpeed, 0 means a dynamic loss scale.
        let loss_scale = p.loss_scale.filter(|scale| *scale != 0.0);
        let of_dynamic = [
            ("initial_loss_scale", p.initial_loss_scale.is_some()),
            ("min_loss_scale", p.min_loss_scale.is_some()),
            ("loss_scale_window", p.loss_scale_window.is_some()),
            ("hysteresis", p.hysteresis.is_some()),
            ("consecutive_hysteresis", p.consecutive_hysteresis),
        ];
        let scaling = [&[("loss_scale", loss_scale.is_some())][..], &of_dynamic].concat();
        if p.bf16 {
            self.pass_over(&scaling);
        } else if let Some((key, _)) = scaling.iter().find(|(_, given)| *given && !p.fp16) {
            return Err(Error::usage(format!(
                "{key} ({}) is a setting of fp16, but the run is in fp32, which needs no loss \
                 scale; leave it out or add fp16 = true",
                self.origins.of(key).unwrap_or("?")
            )));
        }
        if let (true, Some(scale), Some((key, _))) =
            (p.fp16, loss_scale, of_dynamic.iter().find(|(_, given)| *given))
        {
            return Err(Error::usage(format!(
                "{key} ({}) is for a dynamic loss scale, but {} is fixed; give only one",
                self.origins.of(key).unwrap_or("?"),
                self.origins.cite("loss_scale", scale)
            )));
        }
        let default = DynamicLossScale::default();
        let dynamic = DynamicLossScale {
            initial: p.initial_loss_scale.unwrap_or(default.initial),
            min: p.min_loss_scale.unwrap_or(default.min),
            window: p.loss_scale_window.unwrap_or(default.window),
            hysteresis: p.hysteresis.unwrap_or(default.hysteresis),
            consecutive_hysteresis: p.consecutive_hysteresis,
        };
        Ok(match (p.bf16, p.fp16, loss_scale) {
            (true, ..) => Precision::Bf16,
            (_, true, Some(scale)) => Precision::Fp16(LossScaling::Static(scale)),
            (_, true, None) => Precision::Fp16(LossScaling::Dynamic(dynamic)),
            _ => Precision::Fp32,
        })
    }

    pub(super) fn recompute(&self, t: &RecomputeFlags) -> Result<Recompute> {
        let of_full = [
            ("recompute_method", t.recompute_method.is_some()),
            ("recompute_num_layers", t.recompute_num_layers.is_some()),
        ];
        match t.recompute_granularity {
            Some(Granularity::Full) => Ok(Recompute::Full {
                method: t.recompute_method.unwrap_or(RecomputeMethod::Uniform),
                num_layers: t.recompute_num_layers.unwrap_or(1),
            }),
            other => match of_full.iter().find(|(_, given)| *given) {
                Some((key, _)) => Err(Error::usage(format!(
                    "{key} ({}) is a setting of full recompute; add recompute_granularity = full",
                    self.origins.of(key).unwrap_or("?")
                ))),
                None if other.is_some() => Ok(Recompute::Selective),
                None => Ok(Recompute::None),
            },
        }
    }
}
