//! Turns the given settings into a complete [`RunConfig`]: adds Megatron-LM's defaults and derived
//! values, and detects contradictions.

mod batch;
mod checkpoint;
mod ends;
mod logging;
mod lr_schedule;
mod model;
mod optimizer;
mod training;
mod without_effect;

use std::path::PathBuf;
use std::time::Duration;

use megatron::checkpoint::{resumable, same_folder};
use megatron::comm::{Backend, RankInfo, Rendezvous};
use megatron::config::{DataConfig, Origins, RunConfig};

use megatron::private::user;
use models::hf::HfConfig;

use super::flags::{ChosenTokenizer, Flags};
use super::layout::resolve_layout;
use super::{Gathered, SAME_THING, other_names};
use crate::error::{Error, Result};
use crate::ranks::Distributed;

/// Ten years in seconds, which is practically no timeout.
const LONGEST_TIMEOUT: f64 = 10.0 * 365.0 * 24.0 * 3600.0;

/// A run that was checked, except for what depends on its data.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// `model.vocab_size` is 0 until the data are opened.
    pub run: RunConfig,
    /// `--vocab-size`.
    pub vocab_size: Option<usize>,
    pub distributed: Distributed,
    /// Where every setting comes from.
    pub origins: Origins,
    /// Notes that the run prints once, before it starts.
    pub notes: Vec<String>,
    /// The checkpoint that supplies data path or tokenizer, if no other setting does.
    pub data_of: Option<PathBuf>,
}

/// Resolves and validates the settings; `launcher` is this process's place in the world of a
/// launcher.
///
/// # Errors
/// If settings are missing, contradict each other, or break an equation of the layout.
pub fn resolve(gathered: &Gathered, launcher: Option<&RankInfo>) -> Result<Resolved> {
    let hf = match &gathered.flags.checkpoint.init_from_hf {
        Some(folder) => Some(HfConfig::read(folder)?),
        None => None,
    };
    let passed_over = gathered.passed_over.clone();
    let mut r = Resolver { flags: &gathered.flags, origins: Origins::default(), hf, passed_over };
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
    let mut parallel =
        resolve_layout(&flags.layout, &mut r.origins, launcher, model.num_layers, on_gpus)?;
    parallel.param_offload = r.param_offload()?;
    let training = r.training(&parallel)?;
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
    run.validate_with(&r.origins)?;
    let mut distributed = r.distributed()?;
    let mut notes: Vec<String> = other_names::passed_over(&r.passed_over).into_iter().collect();
    notes.extend(gathered.notes.iter().cloned());
    notes.extend(tokenizer.note);
    if r.flags.data.mock_data && !r.flags.data.data_path.is_empty() {
        let mock = r.origins.cite("mock_data", true);
        notes.push(format!("note: {mock} generates data; data_path is not read"));
    }
    notes.extend(r.without_effect(&run, gathered));
    notes.extend(r.note_on_offload(&run, on_gpus));
    if distributed.backend == Backend::Nccl && !on_gpus {
        notes.push(format!(
            "{}: this run computes on CPUs, so ranks exchange data through shared memory, or over TCP between machines",
            r.origins.cite("distributed_backend", "nccl")
        ));
        distributed.backend = Backend::Auto;
    }
    // For Megatron-LM's NullTokenizer, it does not count the end-of-document token.
    let vocab_size =
        r.flags.model.vocab_size.filter(|_| !is_null).or(r.hf.map(|hf| hf.model.vocab_size));
    let data_of = gathered.recorded.as_ref().filter(|recorded| {
        ["data_path", "tokenizer"]
            .iter()
            .any(|key| gathered.origins.get(*key) == Some(&recorded.origin()))
    });
    let data_of = data_of.map(|recorded| recorded.path.clone());
    Ok(Resolved { run, vocab_size, distributed, origins: r.origins, notes, data_of })
}

/// Settings that have no default.
struct Required {
    num_layers: usize,
    hidden_size: usize,
    num_attention_heads: usize,
    seq_length: usize,
    lr: f64,
}

struct Resolver<'a> {
    flags: &'a Flags,
    origins: Origins,
    /// What `init_from_hf` describes.
    hf: Option<HfConfig>,
    /// Given settings without effect.
    passed_over: Vec<String>,
}

impl Resolver<'_> {
    fn record_origins(&mut self, gathered: &Gathered) {
        for (_, args) in super::flags::sections() {
            for arg in args {
                self.origins.record(arg.get_id().as_str(), "default");
            }
        }
        for (key, origin) in &gathered.origins {
            self.origins.record(key, origin);
        }
    }

    /// Records the given ones of `settings`, which this run does not read. They are not errors,
    /// because Megatron-LM's scripts often contain them.
    fn pass_over(&mut self, settings: &[(&str, bool)]) {
        for (key, _) in settings.iter().filter(|(_, given)| *given) {
            let origin = self.origins.of(key).unwrap_or_default();
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
            self.origins.record(key, format!("default: {from}"));
            value()
        })
    }

    /// An error if more than one of these equivalent settings is given.
    fn at_most_one(&self, settings: &[(&str, bool)]) -> Result<()> {
        let given: Vec<&str> =
            settings.iter().filter(|(_, given)| *given).map(|(key, _)| *key).collect();
        match given.as_slice() {
            [first, second, ..] => Err(Error::usage(format!(
                "{first} ({}) and {second} ({}) set the same thing; give only one",
                self.origins.of(first).unwrap_or("?"),
                self.origins.of(second).unwrap_or("?")
            ))),
            _ => Ok(()),
        }
    }

    fn refuse_contradictions(&self, gathered: &Gathered) -> Result<()> {
        let o = &gathered.flags.optimizer;
        // Megatron-LM treats its defaults (0) in the same way.
        let no_warmup = |key: &str| match key {
            "lr_warmup_iters" => o.lr_warmup_iters == Some(0),
            "lr_warmup_samples" => o.lr_warmup_samples == Some(0),
            _ => false,
        };
        let given =
            |key: &&'static str| (*key, gathered.origins.contains_key(*key) && !no_warmup(key));
        SAME_THING
            .iter()
            .try_for_each(|keys| self.at_most_one(&keys.iter().map(given).collect::<Vec<_>>()))?;
        self.refuse_other_schedules(gathered, &|key: &&'static str| given(key).1)
    }

    fn required(&self, gathered: &Gathered) -> Result<Required> {
        let (m, t) = (&self.flags.model, &self.flags.training);
        let steps = t.train_iters.or(t.train_samples);
        let data =
            (!self.flags.data.data_path.is_empty() || self.flags.data.mock_data).then_some(());
        let hf = self.hf.as_ref().map(|hf| &hf.model);
        let num_layers = m.num_layers.or(hf.map(|hf| hf.num_layers));
        let hidden_size = m.hidden_size.or(hf.map(|hf| hf.hidden_size));
        let heads = m.num_attention_heads.or(hf.map(|hf| hf.num_attention_heads));
        let (lr, name_of_lr) = self.peak_lr();
        let batch = self.has_batch().then_some(());
        let all = (num_layers, hidden_size, heads, m.seq_length, batch, lr, steps, data);
        if let (
            Some(num_layers),
            Some(hidden_size),
            Some(num_attention_heads),
            Some(seq_length),
            Some(()),
            Some(lr),
            Some(_),
            Some(()),
        ) = all
        {
            return Ok(Required { num_layers, hidden_size, num_attention_heads, seq_length, lr });
        }
        let missing: Vec<&str> = [
            ("num_layers under [model]", num_layers.is_none()),
            ("hidden_size under [model]", hidden_size.is_none()),
            ("num_attention_heads under [model]", heads.is_none()),
            ("seq_length under [model]", m.seq_length.is_none()),
            ("data_path under [data]", data.is_none()),
            ("micro_batch_size under [training]", batch.is_none()),
            ("train_iters (or train_samples) under [training]", steps.is_none()),
            (name_of_lr, lr.is_none()),
        ]
        .into_iter()
        .filter_map(|(name, missing)| missing.then_some(name))
        .collect();
        let swallowed = self.flags.data.data_path.last().filter(|p| p.ends_with(".toml"));
        let hint = swallowed.map_or(String::new(), |path| {
            format!("; if {path} is the run file, put it before --data-path, which takes all words after it")
        });
        let recorded = match (&gathered.recorded, &self.flags.checkpoint.load) {
            (Some(recorded), _) => format!(
                "; the checkpoint {} does not record {}: it was imported, or an early version wrote it",
                recorded.path.display(),
                recorded.lacks.join(" ")
            ),
            (None, Some(load)) if resumable(load)?.is_some() => {
                format!(
                    "; --use-checkpoint-args takes them from the checkpoint in {}",
                    load.display()
                )
            }
            (None, Some(load)) => {
                format!("; {} holds no checkpoint to take them from", load.display())
            }
            (None, None) => String::new(),
        };
        Err(Error::usage(format!(
            "not set: {}. Set them in a run file, or with the flags of the same names{hint}{recorded}",
            missing.join(", ")
        )))
    }

    fn data(&self, tokenizer: &ChosenTokenizer) -> DataConfig {
        let d = &self.flags.data;
        DataConfig {
            // As in Megatron-LM, made-up data take priority.
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

    fn distributed(&self) -> Result<Distributed> {
        let p = &self.flags.parallel;
        let minutes = p.distributed_timeout_minutes;
        // Longer than any run, and short enough to compute deadlines without overflow.
        let seconds = if minutes.is_nan() { 0.0 } else { (minutes * 60.0).min(LONGEST_TIMEOUT) };
        let timeout = Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|t| !t.is_zero())
            .ok_or_else(|| {
                let cited = self.origins.cite("distributed_timeout_minutes", minutes);
                Error::usage(format!("{cited} must be a number of minutes above 0"))
            })?;
        if let Some(url) = &p.rdzv {
            let cited = self.origins.cite("rdzv", url);
            Rendezvous::from_url(0, url).map_err(|_| {
                Error::usage(format!("{cited} must be tcp://HOST:PORT or file:///DIR"))
            })?;
        }
        let c = &self.flags.checkpoint;
        let goes_on =
            matches!((&c.save, &c.load), (Some(save), Some(load)) if same_folder(save, load));
        if c.max_restarts > 0 && !goes_on {
            return Err(Error::usage(format!(
                "{} restarts a failed run from its last checkpoint; set --save, and --load with the same folder",
                self.origins.cite("max_restarts", c.max_restarts)
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

/// The user's cache folder according to the XDG Base Directory Specification. Without a home folder
/// it is a folder in the temporary directory with the user's id in its name. As for every cache,
/// its ownership is checked where it is used.
pub fn default_cache() -> PathBuf {
    let folder =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache"))).map_or_else(
        || std::env::temp_dir().join(format!("megatron-{}", user())),
        |folder| folder.join("megatron"),
    )
}
