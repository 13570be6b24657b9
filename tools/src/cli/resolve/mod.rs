//! From what was typed to a whole [`RunConfig`]: Megatron-LM's defaults, derived values, and
//! contradictions.

mod ends;
mod logging;
mod model;
mod without_effect;

use std::path::PathBuf;
use std::time::Duration;

use megatron::checkpoint::{resumable, same_folder};
use megatron::comm::{Backend, RankInfo, Rendezvous};
use megatron::config::{
    BatchSizeRampup, CheckpointConfig, DataConfig, DecayStyle, DynamicLossScale, LossScaling,
    OptimizerConfig, OptimizerOffload, ParallelConfig, Precision, Recompute, RecomputeMethod,
    Retention, RunConfig, SchedulerOf, Sources, Takes, TrainingConfig,
};

use megatron::private::user;
use models::hf::HfConfig;

use super::flags::{ChosenTokenizer, Flags, Granularity, RecomputeFlags};
use super::layout::resolve_layout;
use super::{Gathered, SAME_THING, other_names};
use crate::error::{Error, Result};
use crate::ranks::Distributed;

/// Seconds of ten years, which is as good as no timeout.
const LONGEST_TIMEOUT: f64 = 10.0 * 365.0 * 24.0 * 3600.0;

/// A run that was checked, except for what only its data can tell.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// `model.vocab_size` is 0 until the data are opened.
    pub run: RunConfig,
    /// `--vocab-size`.
    pub vocab_size: Option<usize>,
    pub distributed: Distributed,
    /// What the run says once, before it starts.
    pub notes: Vec<String>,
    /// The checkpoint that names data or tokenizer, where nothing else does.
    pub data_of: Option<PathBuf>,
}

/// Resolves and validates; `launcher` is the place in a world that a launcher gave this process.
///
/// # Errors
/// If settings are missing, contradict each other, or break an equation of the layout.
pub fn resolve(gathered: &Gathered, launcher: Option<&RankInfo>) -> Result<Resolved> {
    let hf = match &gathered.flags.checkpoint.init_from_hf {
        Some(folder) => Some(HfConfig::read(folder)?),
        None => None,
    };
    let passed_over = gathered.passed_over.clone();
    let mut r = Resolver { flags: &gathered.flags, sources: Sources::default(), hf, passed_over };
    r.record_origins(gathered);
    r.refuse_contradictions(gathered)?;
    let required = r.required(gathered)?;
    let mut model = match &r.hf {
        Some(_) => r.model_from_hf(gathered, required.seq_length)?,
        None => r.model(&required)?,
    };
    if let (Some(recorded), None) = (&gathered.recorded, &r.hf) {
        recorded.complete(&mut model, |key| {
            gathered.origins.get(key).is_some_and(|origin| *origin != recorded.origin())
        });
    }
    let flags = &gathered.flags.parallel;
    let on_gpus = crate::ranks::on_gpus(flags.device);
    let parallel =
        resolve_layout(&flags.layout, &mut r.sources, launcher, model.num_layers, on_gpus)?;
    let training = r.training(&required, &parallel)?;
    let optimizer = r.optimizer(&required, &training)?;
    let training_iters = training.train_iters;
    let tokenizer = r.flags.data.tokenizer.choose(r.flags.model.vocab_size)?;
    let is_null = tokenizer.name.as_deref().is_some_and(|name| name.starts_with("null:"));
    let run = RunConfig {
        model,
        parallel,
        data: r.data(&tokenizer),
        training,
        optimizer,
        checkpoint: r.checkpoint()?,
        logging: r.logging(training_iters),
    };
    run.validate_with(&r.sources)?;
    let mut distributed = r.distributed()?;
    let mut notes: Vec<String> = other_names::passed_over(&r.passed_over).into_iter().collect();
    notes.extend(tokenizer.note);
    if r.flags.data.mock_data && !r.flags.data.data_path.is_empty() {
        let mock = r.sources.cite("mock_data", true);
        notes.push(format!("note: {mock} makes data up; data_path is not read"));
    }
    notes.extend(r.without_effect(&run, gathered));
    if distributed.backend == Backend::Nccl && !on_gpus {
        notes.push(format!(
            "{}: this run computes on CPUs, whose ranks exchange data through shared memory, and over TCP between machines",
            r.sources.cite("distributed_backend", "nccl")
        ));
        distributed.backend = Backend::Auto;
    }
    // Of Megatron-LM's NullTokenizer it is the tokens without the one that ends documents.
    let vocab_size =
        r.flags.model.vocab_size.filter(|_| !is_null).or(r.hf.map(|hf| hf.model.vocab_size));
    let data_of = gathered.recorded.as_ref().filter(|recorded| {
        ["data_path", "tokenizer"]
            .iter()
            .any(|key| gathered.origins.get(*key) == Some(&recorded.origin()))
    });
    let data_of = data_of.map(|recorded| recorded.path.clone());
    Ok(Resolved { run, vocab_size, distributed, notes, data_of })
}

/// Settings that have no default.
struct Required {
    num_layers: usize,
    hidden_size: usize,
    num_attention_heads: usize,
    seq_length: usize,
    micro_batch_size: usize,
    lr: f64,
}

struct Resolver<'a> {
    flags: &'a Flags,
    sources: Sources,
    /// What `init_from_hf` describes.
    hf: Option<HfConfig>,
    /// What was given and changes nothing.
    passed_over: Vec<String>,
}

impl Resolver<'_> {
    fn record_origins(&mut self, gathered: &Gathered) {
        for (_, args) in super::flags::sections() {
            for arg in args {
                self.sources.record(arg.get_id().as_str(), "default");
            }
        }
        for (key, origin) in &gathered.origins {
            self.sources.record(key, origin);
        }
    }

    /// Notes those of `settings` that are given, which the run as it is does not read:
    /// Megatron-LM's scripts leave them on their lines.
    fn pass_over(&mut self, settings: &[(&str, bool)]) {
        for (key, _) in settings.iter().filter(|(_, given)| *given) {
            let origin = self.sources.of(key).unwrap_or_default();
            self.passed_over.push(if origin.starts_with("--") { origin } else { key }.to_string());
        }
    }

    fn derived<T>(
        &mut self,
        key: &str,
        given: Option<T>,
        from: &str,
        value: impl FnOnce() -> T,
    ) -> T {
        given.unwrap_or_else(|| {
            self.sources.record(key, format!("default: {from}"));
            value()
        })
    }

    /// An error if more than one of the settings that say the same thing is given.
    fn at_most_one(&self, settings: &[(&str, bool)]) -> Result<()> {
        let given: Vec<&str> =
            settings.iter().filter(|(_, given)| *given).map(|(key, _)| *key).collect();
        match given.as_slice() {
            [first, second, ..] => Err(Error::usage(format!(
                "{first} ({}) and {second} ({}) set the same thing; give one of them",
                self.sources.of(first).unwrap_or("?"),
                self.sources.of(second).unwrap_or("?")
            ))),
            _ => Ok(()),
        }
    }

    fn refuse_contradictions(&self, gathered: &Gathered) -> Result<()> {
        let o = &gathered.flags.optimizer;
        // As with Megatron-LM, whose defaults these are.
        let no_warmup = |key: &str| match key {
            "lr_warmup_iters" => o.lr_warmup_iters == Some(0),
            "lr_warmup_samples" => o.lr_warmup_samples == Some(0),
            _ => false,
        };
        let given =
            |key: &&'static str| (*key, gathered.origins.contains_key(*key) && !no_warmup(key));
        SAME_THING
            .iter()
            .try_for_each(|keys| self.at_most_one(&keys.iter().map(given).collect::<Vec<_>>()))
    }

    fn required(&self, gathered: &Gathered) -> Result<Required> {
        let (m, t, o) = (&self.flags.model, &self.flags.training, &self.flags.optimizer);
        let steps = t.train_iters.or(t.train_samples);
        let data =
            (!self.flags.data.data_path.is_empty() || self.flags.data.mock_data).then_some(());
        let hf = self.hf.as_ref().map(|hf| &hf.model);
        let num_layers = m.num_layers.or(hf.map(|hf| hf.num_layers));
        let hidden_size = m.hidden_size.or(hf.map(|hf| hf.hidden_size));
        let heads = m.num_attention_heads.or(hf.map(|hf| hf.num_attention_heads));
        let all =
            (num_layers, hidden_size, heads, m.seq_length, t.micro_batch_size, o.lr, steps, data);
        if let (
            Some(num_layers),
            Some(hidden_size),
            Some(num_attention_heads),
            Some(seq_length),
            Some(micro_batch_size),
            Some(lr),
            Some(_),
            Some(()),
        ) = all
        {
            return Ok(Required {
                num_layers,
                hidden_size,
                num_attention_heads,
                seq_length,
                micro_batch_size,
                lr,
            });
        }
        let missing: Vec<&str> = [
            ("num_layers under [model]", num_layers.is_none()),
            ("hidden_size under [model]", hidden_size.is_none()),
            ("num_attention_heads under [model]", heads.is_none()),
            ("seq_length under [model]", m.seq_length.is_none()),
            ("data_path under [data]", data.is_none()),
            ("micro_batch_size under [training]", t.micro_batch_size.is_none()),
            ("train_iters (or train_samples) under [training]", steps.is_none()),
            ("lr under [optimizer]", o.lr.is_none()),
        ]
        .into_iter()
        .filter_map(|(name, missing)| missing.then_some(name))
        .collect();
        let swallowed = self.flags.data.data_path.last().filter(|p| p.ends_with(".toml"));
        let hint = swallowed.map_or(String::new(), |path| {
            format!("; if {path} is the run file, put it before --data-path, which takes every word that follows")
        });
        let recorded = match (&gathered.recorded, &self.flags.checkpoint.load) {
            (Some(recorded), _) => format!(
                "; the checkpoint {} does not record {}, as one that was imported or is of an early version",
                recorded.path.display(),
                recorded.lacks.join(" ")
            ),
            (None, Some(load)) if resumable(load)?.is_some() => {
                format!(
                    "; with --use-checkpoint-args the checkpoint in {} tells them",
                    load.display()
                )
            }
            (None, Some(load)) => {
                format!("; {} holds no checkpoint that would tell them", load.display())
            }
            (None, None) => String::new(),
        };
        Err(Error::usage(format!(
            "not set: {}. Set them in a run file, or by the flags of the same names{hint}{recorded}",
            missing.join(", ")
        )))
    }

    fn training(
        &mut self,
        required: &Required,
        parallel: &ParallelConfig,
    ) -> Result<TrainingConfig> {
        self.exit_signal()?;
        let t = &self.flags.training;
        let mbs = required.micro_batch_size;
        let global_batch_size = self.derived(
            "global_batch_size",
            t.global_batch_size,
            "micro_batch_size · data_parallel_size",
            || mbs.saturating_mul(parallel.data_parallel_size),
        );
        let mut training = TrainingConfig {
            micro_batch_size: mbs,
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
            precision: self.precision()?,
            grad_reduce_in_bf16: t.precision.grad_reduce_in_bf16,
            enable_cuda_graph: t.enable_cuda_graph,
        };
        training.train_iters = match (t.train_iters, t.train_samples) {
            (Some(steps), _) => steps,
            (None, samples) => {
                let samples = samples.unwrap_or(0);
                let cited = self.sources.cite("train_samples", samples);
                self.sources.record("train_iters", format!("{cited} / global_batch_size"));
                training.steps_left(0, samples)
            }
        };
        Ok(training)
    }

    /// The steps in a row that end a run as diverged.
    fn max_nonfinite_steps(&self) -> Result<u64> {
        let t = &self.flags.training;
        if !t.check_for_nan_in_loss_and_grad {
            return Ok(t.max_nonfinite_steps);
        }
        if t.max_nonfinite_steps != 1 && self.sources.of("max_nonfinite_steps") != Some("default") {
            return Err(Error::usage(format!(
                "{} ends the run at the first step that is not finite, and {} does not; give one of them",
                self.sources.cite("check_for_nan_in_loss_and_grad", true),
                self.sources.cite("max_nonfinite_steps", t.max_nonfinite_steps)
            )));
        }
        Ok(1)
    }

    /// How the global batch grows. Lengths in steps say nothing then of how many samples they are.
    fn rampup(&self) -> Result<Option<BatchSizeRampup>> {
        let (given, o) = (&self.flags.training.rampup_batch_size, &self.flags.optimizer);
        if given.is_empty() {
            return Ok(None);
        }
        let shown = given.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        let cited = self.sources.cite("rampup_batch_size", shown);
        let sizes =
            given.iter().map(|&n| usize::try_from(n)).collect::<std::result::Result<Vec<_>, _>>();
        let (Ok([start, increment, _]), [_, _, samples]) = (sizes.as_deref(), given.as_slice())
        else {
            return Err(Error::usage(format!(
                "{cited} must be three numbers: samples of the first steps, by how many they grow at a time, and samples after which they are whole"
            )));
        };
        let in_steps = [
            ("train", self.flags.training.train_iters),
            ("lr_decay", o.lr_decay_iters),
            // Megatron-LM's default is none.
            ("lr_warmup", o.lr_warmup_iters.filter(|steps| *steps > 0)),
            ("lr_wsd_decay", o.lr_wsd_decay_iters),
        ];
        let in_steps: Vec<String> = in_steps
            .into_iter()
            .filter_map(|(name, steps)| {
                let flag = format!("--{}-samples", name.replace('_', "-"));
                Some(format!(
                    "{flag} instead of {}",
                    self.sources.cite(&format!("{name}_iters"), steps?)
                ))
            })
            .collect();
        if !in_steps.is_empty() {
            return Err(Error::usage(format!(
                "with {cited} steps have different numbers of samples, so lengths are given in samples: {}",
                in_steps.join(", ")
            )));
        }
        Ok(Some(BatchSizeRampup { start: *start, increment: *increment, samples: *samples }))
    }

    fn precision(&mut self) -> Result<Precision> {
        let p = &self.flags.training.precision;
        self.at_most_one(&[("bf16", p.bf16), ("fp16", p.fp16)])?;
        // Megatron-LM's and DeepSpeed's for a scale that adapts itself.
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
                "{key} ({}) is a setting of fp16, and the run is in fp32, which needs no loss scale; leave it out or add fp16 \
                 = true",
                self.sources.of(key).unwrap_or("?")
            )));
        }
        if let (true, Some(scale), Some((key, _))) =
            (p.fp16, loss_scale, of_dynamic.iter().find(|(_, given)| *given))
        {
            return Err(Error::usage(format!(
                "{key} ({}) is a setting of a loss scale that adapts itself, and {} is fixed; give one of them",
                self.sources.of(key).unwrap_or("?"),
                self.sources.cite("loss_scale", scale)
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

    fn recompute(&self, t: &RecomputeFlags) -> Result<Recompute> {
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
                    self.sources.of(key).unwrap_or("?")
                ))),
                None if other.is_some() => Ok(Recompute::Selective),
                None => Ok(Recompute::None),
            },
        }
    }

    fn optimizer(
        &mut self,
        required: &Required,
        training: &TrainingConfig,
    ) -> Result<OptimizerConfig> {
        let o = &self.flags.optimizer;
        let gbs = training.global_batch_size as u64;
        let decay = self
            .samples("lr_decay", o.lr_decay_iters, o.lr_decay_samples, gbs)
            .unwrap_or_else(|| {
                self.sources.record("lr_decay", "default: the whole run");
                training.samples()
            });
        let warmup = |length: Option<u64>| length.filter(|length| *length > 0);
        let warmup = match (
            self.samples("lr_warmup", warmup(o.lr_warmup_iters), warmup(o.lr_warmup_samples), gbs),
            o.lr_warmup_fraction,
        ) {
            (Some(samples), _) => samples,
            (None, Some(fraction)) if (0.0..=1.0).contains(&fraction) => {
                let cited = self.sources.cite("lr_warmup_fraction", fraction);
                self.sources.record("lr_warmup", cited);
                (fraction * decay as f64) as u64
            }
            (None, Some(fraction)) => {
                let cited = self.sources.cite("lr_warmup_fraction", fraction);
                return Err(Error::usage(format!("{cited} must lie in [0, 1]")));
            }
            (None, None) => 0,
        };
        let wsd = self.samples("lr_wsd_decay", o.lr_wsd_decay_iters, o.lr_wsd_decay_samples, gbs);
        if o.lr_decay_style == DecayStyle::Wsd && wsd.is_none() {
            return Err(Error::usage(format!(
                "{} needs the length of its annealing; set lr_wsd_decay_iters",
                self.sources.cite("lr_decay_style", "WSD")
            )));
        }
        let moments = &o.moments;
        let offload = match (moments.optimizer_cpu_offload, &moments.offload_optimizer_nvme_path) {
            (false, None) => OptimizerOffload::None,
            (true, None) => OptimizerOffload::Cpu,
            (false, Some(folder)) => OptimizerOffload::Nvme(folder.clone()),
            (true, Some(folder)) => {
                return Err(Error::usage(format!(
                    "{} and {} are two places for one state; leave one out",
                    self.sources.cite("optimizer_cpu_offload", true),
                    self.sources.cite("offload_optimizer_nvme_path", folder.display())
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

    /// A length given as `NAME_iters` or `NAME_samples`, in samples; its origin is recorded as
    /// NAME's.
    fn samples(
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
        let cited = self.sources.cite(&key, value);
        self.sources.record(name, cited);
        Some(length)
    }

    fn data(&self, tokenizer: &ChosenTokenizer) -> DataConfig {
        let d = &self.flags.data;
        DataConfig {
            // As in Megatron-LM made-up data come first.
            data_path: if d.mock_data { Vec::new() } else { d.data_path.clone() },
            split: d.split.clone(),
            tokenizer: tokenizer.name.clone(),
            tokenizer_options: tokenizer.options.clone(),
            dataloader_type: d.dataloader_type,
            eod_mask_loss: d.eod_mask_loss,
            reset_position_ids: d.reset_position_ids,
            reset_attention_mask: d.reset_attention_mask,
            cache_dir: d.cache_dir.clone().unwrap_or_else(default_cache),
            mock: d.mock_data,
        }
    }

    fn checkpoint(&mut self) -> Result<CheckpointConfig> {
        let c = &self.flags.checkpoint;
        if c.load.is_none() {
            self.pass_over(&[("no_load_optim", c.no_load_optim)]);
        }
        let (takes, key) = match (c.finetune, c.no_load_optim && c.load.is_some()) {
            (true, _) => (Takes::Weights, "finetune"),
            (false, true) => (Takes::WithoutOptimizer, "no_load_optim"),
            (false, false) => (Takes::All, ""),
        };
        if takes != Takes::All && c.load.is_none() {
            let cited = self.sources.cite(key, true);
            return Err(Error::usage(format!(
                "{cited} has no effect without load; name a checkpoint's folder with --load"
            )));
        }
        if let (Some(step), None) = (c.ckpt_step, &c.load) {
            let cited = self.sources.cite("ckpt_step", step);
            return Err(Error::usage(format!(
                "{cited} has no effect without load; name the folder of the checkpoints with --load"
            )));
        }
        if c.exit_on_missing_checkpoint && c.load.is_none() {
            let cited = self.sources.cite("exit_on_missing_checkpoint", true);
            return Err(Error::usage(format!(
                "{cited} has no effect without load; name the folder of the checkpoints with --load"
            )));
        }
        if takes != Takes::All && c.max_restarts > 0 {
            return Err(Error::usage(format!(
                "{} would take as little of this run's own checkpoints when it is started again, as {} asks for; make the first steps without restarts",
                self.sources.cite(key, true),
                self.sources.cite("max_restarts", c.max_restarts)
            )));
        }
        // Megatron-LM's command lines name --save beside --skip-train, which saves nothing.
        let saves = !self.flags.training.skip_train;
        Ok(CheckpointConfig {
            save: c.save.clone().filter(|_| saves),
            save_interval: c.save_interval.filter(|_| saves),
            async_save: c.async_save && saves,
            retention: if saves { self.retention()? } else { Retention::default() },
            load: c.load.clone(),
            ckpt_step: c.ckpt_step,
            scheduler: self.scheduler()?,
            exit_on_missing_checkpoint: c.exit_on_missing_checkpoint,
            takes,
            init_from_hf: c.init_from_hf.clone(),
        })
    }

    fn scheduler(&self) -> Result<SchedulerOf> {
        let o = &self.flags.optimizer;
        match (o.override_opt_param_scheduler, o.use_checkpoint_opt_param_scheduler) {
            (false, false) => Ok(SchedulerOf::RunNoted),
            (true, false) => Ok(SchedulerOf::Run),
            (false, true) => Ok(SchedulerOf::Checkpoint),
            (true, true) => Err(Error::usage(format!(
                "{} takes this run's schedule, and {} the checkpoint's; give one of them",
                self.sources.cite("override_opt_param_scheduler", true),
                self.sources.cite("use_checkpoint_opt_param_scheduler", true)
            ))),
        }
    }

    fn distributed(&self) -> Result<Distributed> {
        let p = &self.flags.parallel;
        let minutes = p.distributed_timeout_minutes;
        // Longer than any run, and short enough for deadlines to be reckoned with.
        let seconds = if minutes.is_nan() { 0.0 } else { (minutes * 60.0).min(LONGEST_TIMEOUT) };
        let timeout = Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|t| !t.is_zero())
            .ok_or_else(|| {
                let cited = self.sources.cite("distributed_timeout_minutes", minutes);
                Error::usage(format!("{cited} must be a number of minutes above 0"))
            })?;
        if let Some(url) = &p.rdzv {
            let cited = self.sources.cite("rdzv", url);
            Rendezvous::from_url(0, url).map_err(|_| {
                Error::usage(format!("{cited} must be tcp://HOST:PORT or file:///DIR"))
            })?;
        }
        let c = &self.flags.checkpoint;
        let goes_on =
            matches!((&c.save, &c.load), (Some(save), Some(load)) if same_folder(save, load));
        if c.max_restarts > 0 && !goes_on {
            return Err(Error::usage(format!(
                "{} starts a run that failed again from its last checkpoint, which needs --save, and --load with the same folder",
                self.sources.cite("max_restarts", c.max_restarts)
            )));
        }
        Ok(Distributed {
            device: p.device,
            backend: p.distributed_backend,
            overlap: p.overlap_communication,
            timeout,
            rendezvous: p.rdzv.clone(),
            max_restarts: c.max_restarts,
        })
    }
}

/// The user's cache folder as the XDG Base Directory Specification finds it. Who has no folder gets
/// one in that of temporary files, which has the user's number in its name; whether it is the
/// user's own is found out where it is used, as of every cache.
pub fn default_cache() -> PathBuf {
    let folder =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache"))).map_or_else(
        || std::env::temp_dir().join(format!("megatron-{}", user())),
        |folder| folder.join("megatron"),
    )
}
