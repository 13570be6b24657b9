//! Batch, length and precision.

use super::{
    BatchSizeRampup, Check, LossScaling, MOST_MICROBATCHES, ModelConfig, Offload, ParallelConfig,
    Precision, Recompute, RecomputeMethod, TrainingConfig,
};
use crate::config::ScheduleKind;

impl Check<'_> {
    pub(super) fn training(&mut self, t: &TrainingConfig, p: &ParallelConfig, m: &ModelConfig) {
        let (mbs, gbs, dp) = (t.micro_batch_size, t.global_batch_size, p.data_parallel_size);
        self.size("micro_batch_size", mbs);
        self.size("global_batch_size", gbs);
        self.positive_steps("exit_interval", t.exit_interval);
        self.require(t.train_iters > 0, |c| {
            format!("{} leaves nothing to train", c.cite("train_iters", t.train_iters))
        });
        self.divides(
            "global_batch_size",
            gbs,
            &[("micro_batch_size", mbs), ("data_parallel_size", dp)],
            "every replica takes the same number of whole microbatches",
        );
        let per_microbatch = mbs.saturating_mul(dp);
        self.require(per_microbatch == 0 || gbs / per_microbatch <= MOST_MICROBATCHES, |c| {
            format!(
                "{} makes {} microbatches per step, but a schedule has at most \
                 {MOST_MICROBATCHES}; raise micro_batch_size or data_parallel_size",
                c.cite("global_batch_size", gbs),
                gbs / per_microbatch
            )
        });
        if per_microbatch > 0
            && gbs.is_multiple_of(per_microbatch)
            && p.schedule == ScheduleKind::Interleaved
        {
            let (num_microbatches, pp) = (gbs / per_microbatch, p.pipeline_model_parallel_size);
            self.require(pp == 0 || num_microbatches.is_multiple_of(pp), |c| {
                format!(
                    "the interleaved schedule needs a multiple of {} microbatches per step, but \
                     there are {num_microbatches} ({} / ({} · {}))",
                    c.cite("pipeline_model_parallel_size", pp),
                    c.cite("global_batch_size", gbs),
                    c.cite("micro_batch_size", mbs),
                    c.cite("data_parallel_size", dp)
                )
            });
        }
        if let Some(rampup) = &t.rampup {
            self.rampup(rampup, t, p);
        }
        if let Recompute::Full { num_layers, method } = t.recompute {
            self.positive("recompute_num_layers", num_layers);
            self.require(num_layers <= m.num_layers || method == RecomputeMethod::Block, |c| {
                format!(
                    "{} exceeds {}",
                    c.cite("recompute_num_layers", num_layers),
                    c.cite("num_layers", m.num_layers)
                )
            });
        }
    }

    /// What is done with the inputs that full recompute saves.
    pub(super) fn saved_inputs(&mut self, t: &TrainingConfig, p: &ParallelConfig) {
        let full = matches!(t.recompute, Recompute::Full { .. });
        let distributed = self.cite("distribute_saved_activations", true);
        for (given, cited, does) in [
            (t.distribute_saved_activations, distributed.clone(), "splits"),
            (
                t.activation_offload != Offload::None,
                self.cite("offload_activations", t.activation_offload.name()),
                "moves",
            ),
        ] {
            self.require(!given || full, |_| {
                format!(
                    "{cited} {does} the inputs that full recompute saves; set recompute_granularity = full, or leave it out"
                )
            });
        }
        if !t.distribute_saved_activations {
            return;
        }
        let tp = p.tensor_model_parallel_size;
        self.require(tp != 1, |c| {
            format!(
                "{distributed} has no effect with {}: it splits saved inputs over tensor-parallel ranks; leave it out",
                c.cite("tensor_model_parallel_size", tp)
            )
        });
        self.require(tp == 1 || !p.sequence_parallel, |c| {
            format!(
                "{distributed} and {} cannot be combined: sequence parallelism already splits saved inputs over tensor-parallel ranks; leave one out",
                c.cite("sequence_parallel", true)
            )
        });
    }

    /// Every batch size up to the full one must fit the layout; this holds if the first size and
    /// the increment fit.
    fn rampup(&mut self, rampup: &BatchSizeRampup, t: &TrainingConfig, p: &ParallelConfig) {
        let BatchSizeRampup { start, increment, samples } = *rampup;
        let cited = self.cite("rampup_batch_size", format_args!("{start} {increment} {samples}"));
        let gbs = t.global_batch_size;
        self.require(start > 0 && increment > 0 && samples > 0, |_| {
            format!("{cited}: the first batch size, the increment and the number of samples must each be at least 1")
        });
        self.require(start < gbs, |c| {
            format!(
                "{cited} starts with {start} samples per step, which must be below {}; leave it out for a constant batch size",
                c.cite("global_batch_size", gbs)
            )
        });
        self.require(start >= gbs || increment == 0 || (gbs - start).is_multiple_of(increment), |c| {
            format!(
                "{cited} does not reach {}: {gbs} − {start} must be a multiple of the increment, and {} mod {increment} = {}",
                c.cite("global_batch_size", gbs),
                gbs - start,
                (gbs - start) % increment
            )
        });
        self.require(t.train_samples.is_some(), |c| {
            format!(
                "with {cited}, steps have different numbers of samples: set train_samples instead of {}",
                c.cite("train_iters", t.train_iters)
            )
        });
        let interleaved = p.schedule == ScheduleKind::Interleaved;
        let mut factors = vec![
            ("micro_batch_size", t.micro_batch_size),
            ("data_parallel_size", p.data_parallel_size),
        ];
        if interleaved {
            factors.push(("pipeline_model_parallel_size", p.pipeline_model_parallel_size));
        }
        let unit = factors.iter().fold(1usize, |product, &(_, size)| product.saturating_mul(size));
        let fits = |size: usize| unit == 0 || size.is_multiple_of(unit);
        self.require(fits(start) && fits(increment), |c| {
            let whole = if interleaved { "a multiple of the stages in " } else { "" };
            format!(
                "{cited}: the first batch size and the increment must be multiples of {unit} ({}), \
                 so that every step has {whole}whole microbatches; {start} mod {unit} = {}, \
                 {increment} mod {unit} = {}",
                c.cite_all(&factors),
                start % unit,
                increment % unit
            )
        });
    }

    pub(super) fn precision(&mut self, t: &TrainingConfig) {
        self.require(!t.grad_reduce_in_bf16 || t.precision == Precision::Bf16, |c| {
            format!(
                "{} is a setting of bf16, but the run is in {}",
                c.cite("grad_reduce_in_bf16", true),
                t.precision
            )
        });
        self.require(!t.grad_reduce_in_fp16 || matches!(t.precision, Precision::Fp16(_)), |c| {
            format!(
                "{} is a setting of fp16, but the run is in {}",
                c.cite("grad_reduce_in_fp16", true),
                t.precision
            )
        });
        match t.precision {
            Precision::Fp16(LossScaling::Static(scale)) => self.a_loss_scale("loss_scale", scale),
            Precision::Fp16(LossScaling::Dynamic(d)) => {
                self.a_loss_scale("initial_loss_scale", d.initial);
                self.a_loss_scale("min_loss_scale", d.min);
                self.require(d.min <= d.initial || d.min.is_nan() || d.initial.is_nan(), |c| {
                    format!(
                        "{} exceeds {}",
                        c.cite("min_loss_scale", d.min),
                        c.cite("initial_loss_scale", d.initial)
                    )
                });
                self.require(d.window > 0, |c| {
                    format!("{} must be at least 1", c.cite("loss_scale_window", d.window))
                });
                self.require(d.hysteresis > 0, |c| {
                    format!("{} must be at least 1", c.cite("hysteresis", d.hysteresis))
                });
            }
            Precision::Fp64 | Precision::Fp32 | Precision::Bf16 => {}
        }
    }
}
