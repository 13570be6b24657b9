//! `[data]`, `[checkpoint]`, `[logging]`: the input and output of a run.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use megatron::config::{DataloaderType, TimingLogOption};

use super::{TokenizerFlags, choice};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Data: text and tokens, [data]")]
pub struct DataFlags {
    /// Text files, folders of text, or prefixes of indexed datasets (PREFIX.bin, PREFIX.idx;
    /// `preprocess` makes one from JSON lines); `0.7 A 0.3 B` blends by weight
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data_path: Vec<String>,
    /// Train on made-up tokens instead, the same on every machine; --vocab-size or --tokenizer sets
    /// the size of the vocabulary
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub mock_data: bool,
    /// Weights of the training, validation and test data. Documents (in text files, paragraphs) are
    /// not cut: a dataset with one document goes entirely to one of the three
    #[arg(long, value_name = "T,V,T", default_value = "969,30,1")]
    pub split: String,
    #[command(flatten)]
    pub tokenizer: TokenizerFlags,
    /// Order of samples: `sequential`, as stored; `shuffled` again every epoch; `single`, as
    /// Megatron's GPTDataset; or `cyclic`, those samples reshuffled every epoch, as Megatron does
    /// with --no-data-sharding
    #[arg(long, value_name = "TYPE", default_value = "shuffled",
          value_parser = choice::<DataloaderType>(&["sequential", "shuffled", "single", "cyclic"]))]
    pub dataloader_type: DataloaderType,
    /// Exclude end-of-document tokens from the loss
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub eod_mask_loss: bool,
    /// Restart positions at 0 after each end-of-document token
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub reset_position_ids: bool,
    /// Restrict attention to the token's own document
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub reset_attention_mask: bool,
    /// Folder for trained tokenizers and tokenized text [default: ~/.cache/megatron, or
    /// XDG_CACHE_HOME/megatron if that is set]
    #[arg(long, value_name = "DIR", alias = "data-cache-path")]
    pub cache_dir: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Checkpoints, [checkpoint]")]
pub struct CheckpointFlags {
    /// Folder to write checkpoints to
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Steps between checkpoints [default: only at the end]
    #[arg(long, value_name = "N", alias = "persistent-save-interval")]
    pub save_interval: Option<u64>,
    /// Write the checkpoints of --save-interval in the background while training continues, from a
    /// copy of the state in host memory
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub async_save: bool,
    /// Keep checkpoints of steps that are multiples of N; remove others once a newer one is
    /// complete
    #[arg(long, value_name = "N")]
    pub save_retain_interval: Option<u64>,
    /// Keep the N latest checkpoints and those of --save-retain-interval; remove others once a
    /// newer one is complete. -1 keeps all
    #[arg(long, value_name = "N", default_value_t = -1)]
    pub most_recent_k: i64,
    /// Folder to resume from, or one iter_… folder in it; without a checkpoint there, the run
    /// starts from the beginning. Without a run file, settings that are not given come from the
    /// checkpoint
    #[arg(long, value_name = "DIR")]
    pub load: Option<PathBuf>,
    /// Resume from the checkpoint of step N in --load instead of the latest. A run that saves into
    /// the same folder replaces later checkpoints
    #[arg(long, value_name = "N")]
    pub ckpt_step: Option<u64>,
    /// Take all settings that neither flags nor the run file give from the checkpoint in --load;
    /// the layout only if no part of it is given. The run keeps saving into the folder of --load,
    /// unless --save is given
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub use_checkpoint_args: bool,
    /// Fail if --load holds no checkpoint, instead of starting from the beginning
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub exit_on_missing_checkpoint: bool,
    /// Take only the weights from --load: a new run that starts at step 1 and saves elsewhere
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub finetune: bool,
    /// Take weights and progress from --load, but not the optimizer state or the loss scale
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub no_load_optim: bool,
    /// How often to restart the ranks on this machine from the last checkpoint after one fails;
    /// needs --load with the folder of --save. Under a launcher, use the launcher's own flag
    /// instead
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_restarts: u32,
    /// Hugging Face folder to start from: it gives the architecture (config.json), the weights, and
    /// the tokenizer (tokenizer.json) unless another is given; --seq-length is required
    #[arg(long, value_name = "HF_DIR")]
    pub init_from_hf: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Reports and evaluation, [logging]")]
pub struct LoggingFlags {
    /// Steps between log lines
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub log_interval: u64,
    /// Steps between evaluations on the validation data [default: only at the end]
    #[arg(long, value_name = "N")]
    pub eval_interval: Option<u64>,
    /// Global batches per evaluation; 0 turns evaluation off. With --dataloader-type single and
    /// cyclic, an evaluation continues where the last one ended, as in Megatron-LM; otherwise each
    /// uses the same samples
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub eval_iters: u64,
    /// Add the norm of all parameters after the step to each log line
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_params_norm: bool,
    /// Add the number of zero elements in the gradient to each log line
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_num_zeros_in_grad: bool,
    /// Timers after each log line: 0, none; 1, the mean step's forward, backward, reduction of
    /// gradients (and gathers of weights), optimizer, waiting and the rest; 2, also details
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub timing_log_level: u64,
    /// How timers summarize the ranks
    #[arg(long, value_name = "RANKS", default_value = "minmax",
          value_parser = choice::<TimingLogOption>(&["minmax", "max", "all"]))]
    pub timing_log_option: TimingLogOption,
    /// DeepSpeed's name of --timing-log-level 1
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub wall_clock_breakdown: bool,
    /// File that receives one JSON object per step. A new run first renames an earlier run's file
    /// to FILE.1, FILE.2, …
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Folder that receives event files for TensorBoard, with Megatron-LM's curves; those over
    /// consumed samples are in DIR/vs-samples
    #[arg(long, value_name = "DIR")]
    pub tensorboard_dir: Option<PathBuf>,
    /// Steps between points of TensorBoard's curves [default: 1]
    #[arg(long, value_name = "N")]
    pub tensorboard_log_interval: Option<u64>,
    /// Also write the perplexity of evaluations to TensorBoard
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_validation_ppl_to_tensorboard: bool,
    /// Also write the seconds and TFLOP/s per rank of a step, and timers, to TensorBoard, every
    /// --log-interval steps
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_timers_to_tensorboard: bool,
    /// Also write the largest memory use of a rank to TensorBoard
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_memory_to_tensorboard: bool,
    /// Text to continue when training ends
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Tokens of the continuation
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub prompt_tokens: usize,
    /// Record a few steps: a trace of every rank for Perfetto or chrome://tracing, and a table of
    /// where time is spent
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub profile: bool,
    /// First step to record [default: 10, or the second-to-last of a shorter run]
    #[arg(long, value_name = "N")]
    pub profile_step_start: Option<u64>,
    /// Step at which recording ends; it is not recorded [default: two steps after the first]
    #[arg(long, value_name = "N")]
    pub profile_step_end: Option<u64>,
    /// Ranks to record [default: all]
    #[arg(long, value_name = "RANK", num_args = 1..)]
    pub profile_ranks: Vec<usize>,
    /// Folder of the traces
    #[arg(long, value_name = "DIR", default_value = "profile")]
    pub profile_dir: PathBuf,
}
