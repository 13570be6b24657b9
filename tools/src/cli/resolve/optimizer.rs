//! `[optimizer]`, and lengths in steps or samples.

use megatron::config::{DecayStyle, OptimizerConfig, OptimizerOffload, TrainingConfig};

use super::{Required, Resolver};
use crate::error::{Error, Result};

impl Resolver<'_> {
    pub(super) fn optimizer(
        &mut self,
        required: &Required,
        training: &TrainingConfig,
    ) -> Result<OptimizerConfig> {
        let o = &self.flags.optimizer;
        let gbs = training.global_batch_size as u64;
        let decay = self
            .samples("lr_decay", o.lr_decay_iters, o.lr_decay_samples, gbs)
            .unwrap_or_else(|| {
                self.origins.record("lr_decay", "default: the whole run");
                training.samples()
            });
        let warmup = |length: Option<u64>| length.filter(|length| *length > 0);
        let warmup = match (
            self.samples("lr_warmup", warmup(o.lr_warmup_iters), warmup(o.lr_warmup_samples), gbs),
            o.lr_warmup_fraction,
        ) {
            (Some(samples), _) => samples,
            (None, Some(fraction)) if (0.0..=1.0).contains(&fraction) => {
                let cited = self.origins.cite("lr_warmup_fraction", fraction);
                self.origins.record("lr_warmup", cited);
                (fraction * decay as f64) as u64
            }
            (None, Some(fraction)) => {
                let cited = self.origins.cite("lr_warmup_fraction", fraction);
                return Err(Error::usage(format!("{cited} must be in [0, 1]")));
            }
            (None, None) => 0,
        };
        let wsd = self.samples("lr_wsd_decay", o.lr_wsd_decay_iters, o.lr_wsd_decay_samples, gbs);
        if o.lr_decay_style == DecayStyle::Wsd && wsd.is_none() {
            return Err(Error::usage(format!(
                "{} needs the length of the annealing; set lr_wsd_decay_iters",
                self.origins.cite("lr_decay_style", "WSD")
            )));
        }
        let moments = &o.moments;
        let offload = match (moments.optimizer_cpu_offload, &moments.offload_optimizer_nvme_path) {
            (false, None) => OptimizerOffload::None,
            (true, None) => OptimizerOffload::Cpu,
            (false, Some(folder)) => OptimizerOffload::Nvme(folder.clone()),
            (true, Some(folder)) => {
                return Err(Error::usage(format!(
                    "{} and {} both move the optimizer state; leave one out",
                    self.origins.cite("optimizer_cpu_offload", true),
                    self.origins.cite("offload_optimizer_nvme_path", folder.display())
                )));
            }
        };
        Ok(OptimizerConfig {
            kind: o.optimizer,
            lr: required.lr,
            min_lr: o.min_lr,
            decay_style: o.lr_decay_style,
            decay_samples: decay,
            warmup_samples: warmup,
            warmup_init: o.lr_warmup_init,
            wsd_decay_samples: wsd.unwrap_or(0),
            wsd_decay_style: o.lr_wsd_decay_style,
            weight_decay: o.weight_decay,
            weight_decay_increase: self.weight_decay_increase(training.samples())?,
            adam_beta1: o.adam_beta1,
            adam_beta2: o.adam_beta2,
            adam_eps: o.adam_eps,
            exp_avg_dtype: o.moments.exp_avg_dtype,
            exp_avg_sq_dtype: o.moments.exp_avg_sq_dtype,
            offload,
            sgd_momentum: o.sgd_momentum,
            clip_grad: o.clip_grad,
        })
    }

    /// A length given as `NAME_iters` or `NAME_samples`, in samples. Its origin is recorded under
    /// NAME.
    pub(super) fn samples(
        &mut self,
        name: &str,
        iters: Option<u64>,
        samples: Option<u64>,
        gbs: u64,
    ) -> Option<u64> {
        let (key, value, length) = match (iters, samples) {
            (Some(iters), _) => (format!("{name}_iters"), iters, iters.saturating_mul(gbs)),
            (None, Some(samples)) => (format!("{name}_samples"), samples, samples),
            (None, None) => return None,
        };
        let cited = self.origins.cite(&key, value);
        self.origins.record(name, cited);
        Some(length)
    }
}
