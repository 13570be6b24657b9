//! `[data]`, `[checkpoint]`, `[logging]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::TokenizerOptions;
use crate::{Error, Result};

/// The order in which samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataloaderType {
    /// Sample i is tokens [i·S, i·S + S] of the split, in order.
    Sequential,
    /// The same samples in a random order, drawn again every epoch from the seed.
    Shuffled,
    /// Megatron's `GPTDataset` read in order: documents, and the samples cut from them, shuffled as
    /// numpy does under the seed.
    Single,
    /// The samples of `Single` in an order drawn again every epoch, as Megatron's random sampler
    /// does.
    Cyclic,
}

/// Where training data comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataConfig {
    /// Text files, folders of text, or indexed-dataset prefixes, each preceded by its weight if
    /// there are weights.
    pub data_path: Vec<String>,
    /// Weights of train, valid and test, e.g. `969,30,1`.
    pub split: String,
    /// `byte`, the path of a `tokenizer.json` or of GPT-2's `vocab.json`, `train:VOCAB`, or
    /// `null:VOCAB`. May be absent for indexed datasets.
    pub tokenizer: Option<String>,
    /// Options that a tokenizer's own files do not determine.
    #[serde(default)]
    pub tokenizer_options: TokenizerOptions,
    /// The order in which training samples are read.
    pub dataloader_type: DataloaderType,
    /// Exclude end-of-document tokens from the loss.
    pub eod_mask_loss: bool,
    /// Restart positions at 0 after each end-of-document token.
    #[serde(default)]
    pub reset_position_ids: bool,
    /// Restrict attention to the token's own document.
    #[serde(default)]
    pub reset_attention_mask: bool,
    /// Where trained tokenizers and tokenized text are cached.
    pub cache_dir: PathBuf,
    /// Made-up tokens in place of `data_path`.
    #[serde(default)]
    pub mock: bool,
}

/// The parts of a loaded checkpoint that a run takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Takes {
    /// Everything: the run continues where the other stopped.
    #[default]
    All,
    /// Weights and progress; the optimizer and the loss scale start fresh (Megatron-LM's
    /// `--no-load-optim`).
    WithoutOptimizer,
    /// Only weights: a new run that starts at step 1 (`--finetune`).
    Weights,
}

/// The source of a resumed run's learning rate, schedule and weight decay, if they differ from the
/// checkpoint's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulerOf {
    /// The run's, with a note for each difference.
    #[default]
    RunNoted,
    /// The run's, as requested (Megatron-LM's `--override-opt_param-scheduler`).
    Run,
    /// The checkpoint's (`--use-checkpoint-opt_param-scheduler`).
    Checkpoint,
}

/// Which of a run's checkpoints stay once a newer one is complete; all if nothing is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// Checkpoints of steps that are multiples of this stay.
    pub interval: Option<u64>,
    /// This many of the latest stay. If only `interval` is set, the latest stays too.
    pub most_recent: Option<u64>,
}

impl Retention {
    /// Whether the checkpoint of step `iteration` stays if there are `newer` newer ones. The newest
    /// always stays.
    pub fn keeps(&self, iteration: u64, newer: u64) -> bool {
        let Self { interval, most_recent } = *self;
        let is_multiple =
            interval.is_some_and(|interval| interval > 0 && iteration.is_multiple_of(interval));
        let all = interval.is_none() && most_recent.is_none();
        all || is_multiple || newer < most_recent.unwrap_or(1).max(1)
    }
}

/// Where checkpoints are saved to and loaded from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointConfig {
    /// Folder to write checkpoints to.
    pub save: Option<PathBuf>,
    /// Steps between checkpoints; the last step is always saved if `save` is given.
    pub save_interval: Option<u64>,
    /// Checkpoints of `save_interval` are written in the background while training continues, from
    /// a copy of the state.
    #[serde(default)]
    pub async_save: bool,
    /// Which checkpoints in `save` stay.
    #[serde(default)]
    pub retention: Retention,
    /// Folder to resume from, or the folder of one checkpoint in it; without a checkpoint, the run
    /// starts fresh.
    pub load: Option<PathBuf>,
    /// The iteration to resume from instead of the latest in `load`.
    #[serde(default)]
    pub ckpt_step: Option<u64>,
    /// The source of a resumed run's schedule.
    #[serde(default)]
    pub scheduler: SchedulerOf,
    /// If `load` holds no checkpoint, the run ends with an error instead.
    #[serde(default)]
    pub exit_on_missing_checkpoint: bool,
    /// The parts taken from `load`; unless it is `All`, a checkpoint must exist.
    #[serde(default)]
    pub takes: Takes,
    /// Hugging Face folder that gives the architecture and, if `load` holds no checkpoint, the
    /// weights.
    #[serde(default)]
    pub init_from_hf: Option<PathBuf>,
}

/// What a run reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoggingConfig {
    /// Steps between log lines.
    pub log_interval: u64,
    /// Steps between evaluations; `None`: only at the end, if there is validation data.
    pub eval_interval: Option<u64>,
    /// Global batches per evaluation.
    pub eval_iters: u64,
    /// Adds the norm of all parameters to log lines (Megatron-LM's `--log-params-norm`).
    #[serde(default)]
    pub log_params_norm: bool,
    /// Adds the number of zero elements in the gradient to log lines (`--log-num-zeros-in-grad`).
    #[serde(default)]
    pub log_num_zeros_in_grad: bool,
    /// 0: no timers; 1: the time of each part of a step; 2: also of details.
    #[serde(default)]
    pub timing_log_level: u8,
    /// How timers summarize the ranks.
    #[serde(default)]
    pub timing_log_option: TimingLogOption,
    /// File that receives one JSON object per step.
    pub metrics: Option<PathBuf>,
    /// Event files for TensorBoard, if any.
    #[serde(default)]
    pub tensorboard: Option<TensorboardConfig>,
    /// Prompt continued at the end of the run.
    pub prompt: Option<String>,
    /// Tokens of the continuation.
    pub prompt_tokens: usize,
    /// Steps to record, if any.
    #[serde(default)]
    pub profile: Option<ProfileConfig>,
}

/// How the timers of a run summarize its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimingLogOption {
    /// The smallest and the largest time of a rank.
    #[default]
    Minmax,
    /// The largest time of a rank.
    Max,
    /// The times of all ranks.
    All,
}

/// The values of a run written for TensorBoard, under Megatron-LM's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorboardConfig {
    /// Folder of the curves over steps.
    pub dir: PathBuf,
    /// Steps between values of a curve.
    pub log_interval: u64,
    /// Also write the perplexity of evaluations.
    pub log_validation_ppl: bool,
    /// Time and throughput of a step: means over the steps between log lines.
    pub log_timers: bool,
    /// Largest memory of a rank so far.
    pub log_memory: bool,
}

impl TensorboardConfig {
    /// Folder of the curves over consumed samples.
    pub fn samples_dir(&self) -> PathBuf {
        self.dir.join("vs-samples")
    }
}

/// Which steps of which ranks are recorded, and where the traces go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileConfig {
    /// Folder for the traces, one file per rank.
    pub dir: PathBuf,
    /// The first recorded step, from 1.
    pub step_start: u64,
    /// The step at which recording ends; not recorded.
    pub step_end: u64,
    /// Ranks to record; empty: all.
    pub ranks: Vec<usize>,
}

/// Weights of train, valid and test; missing ones are 0. They sum to 1.
///
/// # Errors
/// `Error::Config` unless `text` is one to three finite, non-negative, comma-separated numbers that
/// are not all 0.
pub fn parse_split(text: &str) -> Result<[f64; 3]> {
    let wrong = |why: String| {
        Error::config(format!(
            "split \"{text}\" {why}; give the weights of train, valid and test as numbers, for example 969,30,1"
        ))
    };
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    if fields.len() > 3 {
        return Err(wrong(format!("has {} weights, but at most three are allowed", fields.len())));
    }
    let mut weights = [0.0; 3];
    for (weight, field) in weights.iter_mut().zip(&fields) {
        *weight = field
            .parse::<f64>()
            .map_err(|_| wrong(format!("has \"{field}\", which is not a number")))?;
        if !weight.is_finite() || *weight < 0.0 {
            return Err(wrong(format!("has the weight {field}, which is negative or not finite")));
        }
    }
    let sum: f64 = weights.iter().sum();
    if !(sum > 0.0 && sum.is_finite()) {
        return Err(wrong(format!("has weights that sum to {sum}")));
    }
    Ok(weights.map(|weight| weight / sum))
}

/// No data: a program that uses the library provides its own samples.
impl Default for DataConfig {
    fn default() -> Self {
        Self {
            data_path: Vec::new(),
            split: "969,30,1".into(),
            tokenizer: None,
            tokenizer_options: TokenizerOptions::default(),
            dataloader_type: DataloaderType::Sequential,
            eod_mask_loss: false,
            reset_position_ids: false,
            reset_attention_mask: false,
            cache_dir: PathBuf::new(),
            mock: false,
        }
    }
}

/// A log line for each step, and nothing else.
impl Default for LoggingConfig {
    fn default() -> Self {
        Self {
            log_interval: 1,
            eval_interval: None,
            eval_iters: 1,
            log_params_norm: false,
            log_num_zeros_in_grad: false,
            timing_log_level: 0,
            timing_log_option: TimingLogOption::default(),
            metrics: None,
            tensorboard: None,
            prompt: None,
            prompt_tokens: 1,
            profile: None,
        }
    }
}
