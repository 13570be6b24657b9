//! `[data]`, `[checkpoint]`, `[logging]`: what is read and written.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use megatron::config::DataloaderType;

use super::{TokenizerFlags, choice};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Data: text and tokens, [data]")]
pub struct DataFlags {
    /// Text files, folders of text, or prefixes of indexed datasets (PREFIX.bin, PREFIX.idx; of
    /// JSON lines, `preprocess` makes one); `0.7 A 0.3 B` blends by weights
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data_path: Vec<String>,
    /// Train on made-up tokens instead, alike on every machine; --vocab-size or --tokenizer says of
    /// how many there are
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub mock_data: bool,
    /// Weights of the training, validation and test data. Whole documents are dealt, of text files
    /// whole paragraphs: a dataset of one document all goes to one of the three
    #[arg(long, value_name = "T,V,T", default_value = "969,30,1")]
    pub split: String,
    #[command(flatten)]
    pub tokenizer: TokenizerFlags,
    /// Order in which samples are read: as they lie; `shuffled` anew every epoch; `single`,
    /// Megatron's GPTDataset sample by sample; or `cyclic`, those samples reshuffled every epoch as
    /// Megatron does with --no-data-sharding
    #[arg(long, value_name = "TYPE", default_value = "shuffled",
          value_parser = choice::<DataloaderType>(&["sequential", "shuffled", "single", "cyclic"]))]
    pub dataloader_type: DataloaderType,
    /// Leave out the loss at tokens that end documents
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub eod_mask_loss: bool,
    /// Count positions from 0 again behind tokens that end documents
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub reset_position_ids: bool,
    /// Keep attention within documents
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub reset_attention_mask: bool,
    /// Where trained tokenizers and tokenized text are kept [default: ~/.cache/megatron, or as
    /// XDG_CACHE_HOME says]
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
    /// Write checkpoints amid the run while training goes on, out of a copy of the state in the
    /// host's memory
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub async_save: bool,
    /// Keep the checkpoints of steps that are multiples of N; others are removed once a newer one
    /// is complete
    #[arg(long, value_name = "N")]
    pub save_retain_interval: Option<u64>,
    /// Keep the N latest checkpoints, and those of --save-retain-interval; others are removed once
    /// a newer one is complete. -1 keeps all
    #[arg(long, value_name = "N", default_value_t = -1)]
    pub most_recent_k: i64,
    /// Folder to resume from, or one iter_… folder in it; the run starts fresh where there is no
    /// checkpoint. Without a run file, what is not given is as the checkpoint says
    #[arg(long, value_name = "DIR")]
    pub load: Option<PathBuf>,
    /// Resume from the checkpoint of step N in --load, rather than from the latest. A run that
    /// saves into the same folder replaces later ones
    #[arg(long, value_name = "N")]
    pub ckpt_step: Option<u64>,
    /// Take what neither flags nor the run file say from the checkpoint in --load: architecture,
    /// data, batch, optimizer and all; the layout, unless some of it is given. The run goes on
    /// saving into the folder of --load, unless --save is given
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub use_checkpoint_args: bool,
    /// End with an error, rather than start fresh, where --load holds no checkpoint
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub exit_on_missing_checkpoint: bool,
    /// Take from --load the weights alone: a run of its own, from its first step on, that saves
    /// elsewhere
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub finetune: bool,
    /// Take from --load weights and progress, but not the optimizer's state, nor the loss scale
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub no_load_optim: bool,
    /// Times that the ranks on this machine are started again after one failed, from the last
    /// checkpoint; needs --load with the folder of --save. Under a launcher that is the launcher's
    /// to say
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_restarts: u32,
    /// Hugging Face folder to start from: the architecture comes from its config.json, the weights
    /// from its files, and the tokenizer from its tokenizer.json, unless another is given;
    /// --seq-length is to be given
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
    /// cyclic an evaluation goes on where the last one ended, as in Megatron-LM; else each has the
    /// same samples
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub eval_iters: u64,
    /// Tell the norm of all parameters beside each log line, after its step
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_params_norm: bool,
    /// Tell how many elements of the gradient are zero beside each log line
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_num_zeros_in_grad: bool,
    /// File that receives one JSON object a step. A run that starts anew moves an earlier run's
    /// aside, to FILE.1, FILE.2, …
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Folder that receives event files for TensorBoard, with the curves that Megatron-LM draws;
    /// those over consumed samples are in DIR/vs-samples
    #[arg(long, value_name = "DIR")]
    pub tensorboard_dir: Option<PathBuf>,
    /// Steps between values of TensorBoard's curves [default: 1]
    #[arg(long, value_name = "N")]
    pub tensorboard_log_interval: Option<u64>,
    /// Show TensorBoard the perplexity of evaluations, too
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_validation_ppl_to_tensorboard: bool,
    /// Show TensorBoard the seconds and TFLOP/s per rank of a step, every --log-interval steps, too
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_timers_to_tensorboard: bool,
    /// Show TensorBoard the largest memory of a rank, too
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub log_memory_to_tensorboard: bool,
    /// Text to continue when training ends
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Tokens of the continuation
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub prompt_tokens: usize,
    /// Record a few steps: a trace of every rank for Perfetto or chrome://tracing, and a table of
    /// where the time went
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub profile: bool,
    /// First step that is recorded [default: 10, or the last but one of a shorter run]
    #[arg(long, value_name = "N")]
    pub profile_step_start: Option<u64>,
    /// First step that is not recorded any more [default: two steps on]
    #[arg(long, value_name = "N")]
    pub profile_step_end: Option<u64>,
    /// Ranks that are recorded [default: all]
    #[arg(long, value_name = "RANK", num_args = 1..)]
    pub profile_ranks: Vec<usize>,
    /// Folder of the traces
    #[arg(long, value_name = "DIR", default_value = "profile")]
    pub profile_dir: PathBuf,
}
