//! `[optimizer]`, and lengths in steps or samples.

use std::path::PathBuf;

use megatron::config::{DecayStyle, Offload, OptimizerConfig, RunConfig, TrainingConfig};

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
        let offload = self.optimizer_offload()?;
        let lr_schedule = self.deepspeed_schedule(required.lr, training);
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
            lr_schedule,
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

    /// Where optimizer state is kept, by whichever of the flags says it.
    fn optimizer_offload(&self) -> Result<Offload> {
        let o = &self.flags.optimizer.moments;
        let older = match (o.optimizer_cpu_offload, &o.offload_optimizer_nvme_path) {
            (false, None) => None,
            (true, None) => Some((Offload::Cpu, self.origins.cite("optimizer_cpu_offload", true))),
            (false, Some(folder)) => {
                let cited = self.origins.cite("offload_optimizer_nvme_path", folder.display());
                Some((Offload::Nvme(folder.clone()), cited))
            }
            (true, Some(folder)) => {
                return Err(Error::usage(format!(
                    "{} and {} both move the optimizer state; leave one out",
                    self.origins.cite("optimizer_cpu_offload", true),
                    self.origins.cite("offload_optimizer_nvme_path", folder.display())
                )));
            }
        };
        let Some(kind) = o.offload_optimizer.as_deref() else {
            return Ok(older.map_or(Offload::None, |(offload, _)| offload));
        };
        let path = o.nvme_path.as_ref().or(o.offload_optimizer_nvme_path.as_ref());
        let new = self.offload("offload_optimizer", kind, path)?;
        match older {
            Some((older, cited)) if older != new => Err(Error::usage(format!(
                "{} and {cited} say different things; leave one out",
                self.origins.cite("offload_optimizer", kind)
            ))),
            _ => Ok(new),
        }
    }

    /// Where weights are kept.
    pub(super) fn param_offload(&self) -> Result<Offload> {
        self.offload_in_folder("offload_param", &self.flags.optimizer.moments.offload_param)
    }

    /// Where the saved inputs of recomputed layers are kept.
    pub(super) fn activation_offload(&self) -> Result<Offload> {
        let kind = &self.flags.training.recompute.offload_activations;
        self.offload_in_folder("offload_activations", kind)
    }

    fn offload_in_folder(&self, key: &str, kind: &Option<String>) -> Result<Offload> {
        let o = &self.flags.optimizer.moments;
        let path = o.nvme_path.as_ref().or(o.offload_optimizer_nvme_path.as_ref());
        self.offload(key, kind.as_deref().unwrap_or("none"), path)
    }

    fn offload(&self, key: &str, kind: &str, path: Option<&PathBuf>) -> Result<Offload> {
        match (kind, path) {
            ("cpu", _) => Ok(Offload::Cpu),
            ("nvme", Some(folder)) => Ok(Offload::Nvme(folder.clone())),
            ("nvme", None) => Err(Error::usage(format!(
                "{} needs the folder whose disk gets the files; set nvme_path",
                self.origins.cite(key, kind)
            ))),
            _ => Ok(Offload::None),
        }
    }

    /// What to say of elements that are moved to the memory of a CPU by a run that computes there.
    pub(super) fn note_on_offload(&self, run: &RunConfig, on_gpus: bool) -> Option<String> {
        let moved = [
            (&run.optimizer.offload, "optimizer state"),
            (&run.parallel.param_offload, "weights"),
            (&run.training.activation_offload, "saved activations"),
        ];
        let moved = moved.into_iter().filter(|(offload, _)| **offload == Offload::Cpu);
        let what: Vec<&str> = moved.map(|(_, what)| what).collect();
        (!on_gpus && !what.is_empty()).then(|| {
            format!(
                "note: this run computes on the CPU, so offload to `cpu` changes nothing: {} in host memory \
                 already. `nvme` keeps them in files",
                match what[..] {
                    ["optimizer state"] => "optimizer state is".to_string(),
                    _ => format!("{} are", what.join(" and ")),
                }
            )
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
