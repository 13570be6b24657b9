//! `[data]`, `[checkpoint]`, `[logging]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::TokenizerOptions;
use crate::{Error, Result};

/// In which order samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataloaderType {
    /// Sample i is tokens [i·S, i·S + S] of the split, in order.
    Sequential,
    /// The same samples in a random order, drawn anew every epoch from the seed.
    Shuffled,
    /// Megatron's `GPTDataset` read in order: documents, and the samples cut from them, shuffled as
    /// numpy does under the seed.
    Single,
    /// The samples of `Single` in an order drawn anew every epoch, as Megatron's random sampler
    /// does.
    Cyclic,
}

/// Where training data comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataConfig {
    /// Text files, folders of text, or indexed-dataset prefixes, each after its weight if there are
    /// weights.
    pub data_path: Vec<String>,
    /// Weights of train, valid and test, e.g. `969,30,1`.
    pub split: String,
    /// `byte`, the path of a `tokenizer.json` or of GPT-2's `vocab.json`, `train:VOCAB`, or
    /// `null:VOCAB`. May be absent for indexed datasets.
    pub tokenizer: Option<String>,
    /// What a tokenizer's own files do not settle.
    #[serde(default)]
    pub tokenizer_options: TokenizerOptions,
    /// The order in which training samples are read.
    pub dataloader_type: DataloaderType,
    /// Leave out the loss at tokens that end documents.
    pub eod_mask_loss: bool,
    /// Count positions from 0 again behind tokens that end documents.
    #[serde(default)]
    pub reset_position_ids: bool,
    /// Keep attention within documents: tokens see nothing before the start of their own.
    #[serde(default)]
    pub reset_attention_mask: bool,
    /// Where trained tokenizers and tokenized text are cached.
    pub cache_dir: PathBuf,
    /// Made-up tokens in place of `data_path`.
    #[serde(default)]
    pub mock: bool,
}

/// What a run takes from the checkpoint that it loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Takes {
    /// All: it goes on where the other stopped.
    #[default]
    All,
    /// Weights and progress; the optimizer, and the loss scale, start afresh (Megatron-LM's
    /// `--no-load-optim`).
    WithoutOptimizer,
    /// Weights alone: it is a run of its own, from its first step on (`--finetune`).
    Weights,
}

/// Whose learning rate, schedule and weight decay a resumed run has, where they differ from the
/// checkpoint's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulerOf {
    /// The run's, with a note for each that differs.
    #[default]
    RunNoted,
    /// The run's, as was asked for (Megatron-LM's `--override-opt_param-scheduler`).
    Run,
    /// The checkpoint's (`--use-checkpoint-opt_param-scheduler`).
    Checkpoint,
}

/// Which of a run's checkpoints stay once a newer one is complete; all, where nothing is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// Those of steps that are multiples of this stay.
    pub interval: Option<u64>,
    /// So many of the latest stay; of others, where `interval` alone is set, the latest.
    pub most_recent: Option<u64>,
}

impl Retention {
    /// Whether the checkpoint of step `iteration` stays beside `newer` newer ones. The newest
    /// always does.
    pub fn keeps(&self, iteration: u64, newer: u64) -> bool {
        let Self { interval, most_recent } = *self;
        let is_multiple =
            interval.is_some_and(|interval| interval > 0 && iteration.is_multiple_of(interval));
        let all = interval.is_none() && most_recent.is_none();
        all || is_multiple || newer < most_recent.unwrap_or(1).max(1)
    }
}

/// Where checkpoints go and come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointConfig {
    /// Folder to write checkpoints to.
    pub save: Option<PathBuf>,
    /// Save every so many steps; the last step is always saved if `save` is given.
    pub save_interval: Option<u64>,
    /// Checkpoints amid the run are written while training goes on, out of a copy of the state.
    #[serde(default)]
    pub async_save: bool,
    /// Which of those in `save` stay.
    #[serde(default)]
    pub retention: Retention,
    /// Folder to resume from, or that of one checkpoint in it; starts fresh where there is none.
    pub load: Option<PathBuf>,
    /// The iteration to resume from, rather than the latest in `load`.
    #[serde(default)]
    pub ckpt_step: Option<u64>,
    /// Whose schedule a resumed run has.
    #[serde(default)]
    pub scheduler: SchedulerOf,
    /// Where there is none, the run ends with an error instead.
    #[serde(default)]
    pub exit_on_missing_checkpoint: bool,
    /// What is taken from `load`; where that is not all, a checkpoint has to be there.
    #[serde(default)]
    pub takes: Takes,
    /// Hugging Face folder to take the architecture and, where `load` holds no checkpoint, the
    /// weights from.
    #[serde(default)]
    pub init_from_hf: Option<PathBuf>,
}

/// What a run reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoggingConfig {
    /// Log every so many steps.
    pub log_interval: u64,
    /// Evaluate every so many steps; `None`: only at the end if there is validation data.
    pub eval_interval: Option<u64>,
    /// Global batches per evaluation.
    pub eval_iters: u64,
    /// Beside log lines, the norm of all parameters (Megatron-LM's `--log-params-norm`).
    #[serde(default)]
    pub log_params_norm: bool,
    /// Beside log lines, how many elements of the gradient are zero (`--log-num-zeros-in-grad`).
    #[serde(default)]
    pub log_num_zeros_in_grad: bool,
    /// File that receives one JSON object a step.
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

/// What TensorBoard gets to show of a run, under Megatron-LM's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorboardConfig {
    /// Folder of the curves over steps.
    pub dir: PathBuf,
    /// Steps between values of a curve.
    pub log_interval: u64,
    /// Perplexity beside the loss of evaluations.
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
    /// Gets one trace file per rank.
    pub dir: PathBuf,
    /// The first recorded step, from 1.
    pub step_start: u64,
    /// The first step that is not recorded any more.
    pub step_end: u64,
    /// Empty: all.
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

/// No data: a program that uses the library brings samples of its own.
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

/// A line a step, and nothing else.
impl Default for LoggingConfig {
    fn default() -> Self {
        Self {
            log_interval: 1,
            eval_interval: None,
            eval_iters: 1,
            log_params_norm: false,
            log_num_zeros_in_grad: false,
            metrics: None,
            tensorboard: None,
            prompt: None,
            prompt_tokens: 1,
            profile: None,
        }
    }
}
