//! Commands that use a trained model: `megatron generate` and `megatron eval`.

pub mod continuation;
pub mod ends;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::{DType, Device};
use clap::Args;
use kernels::tensor::device::Choice;
use megatron::checkpoint;
use megatron::comm::{Backend, CommOptions, Group, RankInfo};
use megatron::config::{ModelConfig, ParallelConfig, Recompute, TokenizerOptions};
use megatron::data::{TOKENIZER_FILE, Tokenizer};
use megatron::train::{self, Inference};
use models::hf::HfModel;
use models::{Gpt, SavedGpt};

use crate::cli::flags::{ChosenTokenizer, TokenizerFlags};
use crate::error::{Error, Result};
use crate::ranks::Distributed;
use crate::ranks::{self, Joined};

/// What both commands load, and on which ranks.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// Folder that `pretrain --save` wrote, one iter_… folder in it, or a Hugging Face model
    #[arg(long, value_name = "CKPT|HF_DIR")]
    pub load: PathBuf,
    #[command(flatten)]
    pub tokenizer: TokenizerFlags,
    /// tp: ranks that share each layer
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tensor_model_parallel_size: u32,
    /// pp: stages of the pipeline
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub pipeline_model_parallel_size: u32,
    /// Compute in bf16 rather than fp32: half the memory
    #[arg(long, conflicts_with = "fp16")]
    pub bf16: bool,
    /// Compute in fp16 rather than fp32: half the memory
    #[arg(long)]
    pub fp16: bool,
    /// Device of every rank: a GPU if there is one (`auto`), `cpu`, the GPU of the rank's local
    /// number (`cuda`), or GPU N (`cuda:N`)
    #[arg(long, value_name = "auto|cpu|cuda|cuda:N", default_value = "auto")]
    pub device: Choice,
    /// Threads of every rank [default: RAYON_NUM_THREADS, or cores / ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// Weights that were found, but not loaded.
pub enum Weights {
    /// In an `iter_…` folder.
    Checkpoint,
    HuggingFace(Box<HfModel>),
}

/// A model that was found, but not loaded.
pub struct Found {
    pub path: PathBuf,
    pub weights: Weights,
    pub model: ModelConfig,
    pub parallel: ParallelConfig,
    pub dtype: DType,
    pub device: Device,
}

impl LoadArgs {
    /// Finds the checkpoint and checks that its model fits the requested layout.
    fn find(&self, cp: usize, dp: usize) -> Result<Found> {
        // A checkpoint in a Hugging Face folder takes priority over the model it started from.
        let (path, weights) =
            if self.load.join("config.json").exists() && !checkpoint::holds_any(&self.load)? {
                (self.load.clone(), Weights::HuggingFace(Box::new(HfModel::open(&self.load)?)))
            } else {
                (checkpoint::locate(&self.load, None)?, Weights::Checkpoint)
            };
        let model = match &weights {
            Weights::Checkpoint => SavedGpt::open(&path)?.run.model,
            Weights::HuggingFace(folder) => folder.model().clone(),
        };
        let (tp, pp) =
            (self.tensor_model_parallel_size as usize, self.pipeline_model_parallel_size as usize);
        for (what, value) in [
            ("query heads", model.num_attention_heads),
            ("query groups", model.num_query_groups),
            ("inner width of the MLP", model.ffn_hidden_size),
        ] {
            if !value.is_multiple_of(tp) {
                return Err(Error::usage(format!(
                    "--tensor-model-parallel-size {tp} does not divide the model's {value} {what}"
                )));
            }
        }
        if !model.num_query_groups.is_multiple_of(tp * cp) {
            return Err(Error::usage(format!(
                "--tensor-model-parallel-size {tp} · --context-parallel-size {cp} does not divide the model's {} query groups",
                model.num_query_groups
            )));
        }
        let parallel = ParallelConfig {
            tensor_model_parallel_size: tp,
            context_parallel_size: cp,
            pipeline_model_parallel_size: pp,
            data_parallel_size: dp,
            bucket_size: usize::MAX,
            ..Default::default()
        };
        ranks::check_number(&parallel)?;
        let dtype = match (self.bf16, self.fp16) {
            (true, _) => DType::BF16,
            (_, true) => DType::F16,
            _ => DType::F32,
        };
        Ok(Found { path, weights, model, parallel, dtype, device: Device::Cpu })
    }

    /// The requested tokenizer, or the one that the model was trained with.
    pub fn tokenizer(&self, found: &Found) -> Result<Option<Tokenizer>> {
        let (name, options) = self.tokenizer_name(found)?;
        Ok(match name {
            Some(name) => Some(Tokenizer::open_with(&name, &options, None, Path::new(""))?),
            None => None,
        })
    }

    /// Its name and options, as in training.
    pub fn tokenizer_name(&self, found: &Found) -> Result<(Option<String>, TokenizerOptions)> {
        let ChosenTokenizer { name, options, note } = self.tokenizer.choose(None)?;
        if let Some(note) = note {
            // Standard error may be closed.
            let _ = writeln!(std::io::stderr(), "{note}");
        }
        if name.is_some() {
            return Ok((name, options));
        }
        let (name, trained) = trained_with(found)?;
        let no_special_tokens = options.no_special_tokens || trained.no_special_tokens;
        let split_special_tokens = options.split_special_tokens || trained.split_special_tokens;
        Ok((name, TokenizerOptions { merge_file: None, no_special_tokens, split_special_tokens }))
    }
}

fn trained_with(found: &Found) -> Result<(Option<String>, TokenizerOptions)> {
    match found.weights {
        Weights::Checkpoint => tokenizer_of(&found.path),
        Weights::HuggingFace(_) => {
            Ok((tokenizer_in([found.path.clone()]), TokenizerOptions::default()))
        }
    }
}

/// The tokenizer that a checkpoint's model was trained with, as far as known: one without a file if
/// the run records so, otherwise the file beside the checkpoint. Also its options.
///
/// # Errors
/// If the checkpoint cannot be read.
pub fn tokenizer_of(path: &Path) -> Result<(Option<String>, TokenizerOptions)> {
    // A run with the byte tokenizer, which has no file, may have another tokenizer's files beside
    // it: sidecar files of a Hugging Face model.
    let manifest = checkpoint::Manifest::read(path)?;
    let data = |key: &str| manifest.state.pointer(&format!("/config/data/{key}"));
    let said = data("tokenizer_options").and_then(|said| serde_json::from_value(said.clone()).ok());
    let options = said.unwrap_or_default();
    let name = data("tokenizer").and_then(|name| name.as_str());
    if let Some(name) = name.filter(|name| *name == "byte" || name.starts_with("null:")) {
        return Ok((Some(name.into()), options));
    }
    Ok((tokenizer_in([checkpoint::checkpoints_folder(path)?, path.to_path_buf()]), options))
}

/// The `tokenizer.json` in the first of the folders that has one.
fn tokenizer_in(folders: impl IntoIterator<Item = PathBuf>) -> Option<String> {
    let file =
        folders.into_iter().map(|folder| folder.join(TOKENIZER_FILE)).find(|file| file.exists());
    file.map(|file| file.display().to_string())
}

impl Found {
    /// The folder with further files of the model.
    pub fn folder(&self) -> Result<PathBuf> {
        match self.weights {
            Weights::Checkpoint => Ok(checkpoint::checkpoints_folder(&self.path)?),
            Weights::HuggingFace(_) => Ok(self.path.clone()),
        }
    }
}

/// Runs `body` on every rank of the layout: starts the ranks, or joins as one of them.
pub fn on_ranks(
    args: &LoadArgs,
    cp: usize,
    dp: usize,
    body: impl FnOnce(Found, Group) -> Result<()>,
) -> Result<u8> {
    let mut found = args.find(cp, dp)?;
    let world_size = found.parallel.world_size();
    let timeout = CommOptions::default().timeout;
    let distributed = Distributed {
        device: args.device,
        backend: Backend::Auto,
        overlap: None,
        timeout,
        rendezvous: None,
        max_restarts: 0,
    };
    let place = match ranks::place()? {
        Some(place) if place.world_size == world_size => place,
        Some(place) => {
            return Err(Error::usage(format!(
                "{} = {} (environment) ranks were started, but tp · cp · pp · dp = {world_size}; \
                 start that many ranks or change the layout",
                place.variables.world_size, place.world_size
            )));
        }
        None if world_size == 1 => RankInfo::alone(),
        None => {
            ranks::check_device(args.device)?;
            return ranks::start(
                world_size,
                &distributed,
                Some(Duration::from_secs(5)),
                None,
                vec![],
            );
        }
    };
    let communicators = train::most_communicators(&found.parallel)?;
    let threads = args.threads.map(|n| n as usize);
    let Joined { world, device, .. } = ranks::join(&place, &distributed, threads, communicators)?;
    found.device = device.clone();
    body(found, world.clone()).map_err(|error| ranks::failed(error, &world, &device))?;
    Ok(0)
}

/// Loads this rank's share of the weights, for sequences of at most `seq_length` tokens, because
/// the model may claim any length.
pub fn load(found: &Found, world: Group, seq_length: usize) -> Result<Inference> {
    let config = ModelConfig { seq_length, ..found.model.clone() };
    if let (0, Weights::HuggingFace(folder)) = (world.rank(), &found.weights) {
        folder.config.note().iter().for_each(|note| crate::fault::tell(note));
    }
    let (dtype, device) = (found.dtype, found.device.clone());
    let tp = found.parallel.tensor_model_parallel_size;
    let model = Gpt::new(&config, tp, false, Recompute::None, dtype, &device)?;
    let inference = Inference::new(&config, &model, &found.parallel, world, dtype, &device)?;
    match &found.weights {
        Weights::Checkpoint => inference.load(&found.path)?,
        Weights::HuggingFace(folder) => folder.load_into(&inference.stage.params)?,
    }
    Ok(inference)
}
