//! `megatron eval`: loss and perplexity over a whole split.

use std::path::PathBuf;

use candle_core::DType;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use megatron::checkpoint::Manifest;
use megatron::comm::Group;
use megatron::config::{DataConfig, DataloaderType};
use megatron::data::{self, GlobalBatch, Loader};
use megatron::train::EvalMetrics;

use crate::error::{Error, Result};
use crate::fault::tell;
use crate::inference::{Found, LoadArgs, Weights, load, on_ranks};
use crate::report::count;

/// Compute loss and perplexity of a trained model over a whole split
///
/// Every sample of the split is read once, in order. Context does not carry over: the first token
/// of a sample has nothing before it.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:
  megatron eval --load checkpoints/quickstart --data-path docs --split 0,0,100 --part test")]
pub struct EvalArgs {
    #[command(flatten)]
    pub load: LoadArgs,
    /// Text files, folders of text, or indexed-dataset prefixes [default: the checkpoint's training
    /// data]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data_path: Vec<String>,
    /// Weights of train, valid and test; documents (in text files, paragraphs) are not cut
    #[arg(long, value_name = "A,B,C", default_value = "100,0,0")]
    pub split: String,
    /// Which part of the split to evaluate
    #[arg(long, value_name = "PART", default_value = "train", value_parser = ["train", "valid", "test"])]
    pub part: String,
    /// Tokens per sample [default: the model's]
    #[arg(long, value_name = "N")]
    pub seq_length: Option<usize>,
    /// Samples per forward pass of one replica
    #[arg(long, value_name = "B", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub micro_batch_size: u64,
    /// dp: replicas that share the samples
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub data_parallel_size: u32,
    /// cp: ranks that share each sample
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub context_parallel_size: u32,
    /// Where tokenized text is cached [default: the user's cache folder]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
}

/// Runs the command and returns the exit code to end with.
///
/// # Errors
/// If the checkpoint or the data cannot be used.
pub fn run(args: &EvalArgs) -> Result<u8> {
    let (cp, dp) = (args.context_parallel_size as usize, args.data_parallel_size as usize);
    on_ranks(&args.load, cp, dp, |found, world| evaluate(args, &found, world))
}

fn evaluate(args: &EvalArgs, found: &Found, world: Group) -> Result<()> {
    let model = &found.model;
    let seq_length = args.seq_length.unwrap_or(model.seq_length);
    if seq_length == 0 || seq_length > model.max_position_embeddings {
        return Err(Error::usage(format!(
            "--seq-length {seq_length} must be between 1 and the model's {} positions",
            model.max_position_embeddings
        )));
    }
    let cp = found.parallel.context_parallel_size;
    if !seq_length.is_multiple_of(cp) {
        return Err(Error::usage(format!(
            "--context-parallel-size {cp} does not divide the {seq_length} tokens of a sample; give another --seq-length"
        )));
    }
    let data_path = match &args.data_path[..] {
        [] => recorded_data(found)?,
        given => given.to_vec(),
    };
    if world.rank() == 0 && args.data_path.is_empty() {
        tell(&format!(
            "note: --data-path is not given, so the training data are used: {}",
            data_path.join(" ")
        ));
    }
    let (tokenizer, tokenizer_options) = args.load.tokenizer_name(found)?;
    let config = DataConfig {
        data_path,
        split: args.split.clone(),
        tokenizer,
        tokenizer_options,
        dataloader_type: DataloaderType::Sequential,
        eod_mask_loss: false,
        reset_position_ids: false,
        reset_attention_mask: false,
        cache_dir: args.cache_dir.clone().unwrap_or_else(crate::cli::default_cache),
        mock: false,
    };
    let (source, notes) = data::open_part(&config, seq_length, model.vocab_size, &args.part)?;
    let lead = world.rank() == 0;
    notes.into_iter().filter(|_| lead).for_each(|note| tell(&note));
    let inference = load(found, world, seq_length)?;
    let samples = source.num_samples();
    let loader =
        Loader::new(source, GlobalBatch::new(1, 1, 0, 1)?, model.vocab_size, found.device.clone())
            .with_part_of_sequences(inference.groups.cp.rank(), cp);
    let bar = if lead { ProgressBar::new(samples) } else { ProgressBar::hidden() };
    bar.set_style(
        ProgressStyle::with_template("{wide_bar:.cyan/blue} {pos}/{len} samples, {eta} left")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let (loss, tokens) =
        inference.evaluate(&loader, samples, args.micro_batch_size, &mut |done| {
            bar.set_position(done)
        })?;
    bar.finish_and_clear();
    if lead {
        let result = EvalMetrics { iteration: 0, split: args.part.clone(), lm_loss: loss };
        crate::print_line(&format!(
            "{} {}: {} of {seq_length} tokens, {} | loss {loss:.6} | perplexity {:.4}",
            found.path.display(),
            args.part,
            count(samples, "sample"),
            count(tokens as u64, "token"),
            result.perplexity()
        ));
    }
    if !loss.is_finite() {
        return Err(megatron::Error::Diverged(format!(
            "the loss is {loss}: weights in {} hold NaN or infinity, or values overflow{}; evaluate an earlier checkpoint",
            found.path.display(),
            if found.dtype == DType::F16 { " fp16 (try --bf16)" } else { "" }
        ))
        .into());
    }
    Ok(())
}

/// The data path that a checkpoint's run had.
fn recorded_data(found: &Found) -> Result<Vec<String>> {
    let recorded = match found.weights {
        Weights::Checkpoint => {
            Manifest::read(&found.path)?.state.pointer("/config/data/data_path").cloned()
        }
        Weights::HuggingFace(_) => None,
    };
    let recorded = recorded.and_then(|paths| serde_json::from_value(paths).ok());
    recorded.filter(|paths: &Vec<String>| !paths.is_empty()).ok_or_else(|| {
        Error::usage(format!(
            "no data: {} does not record a data path; give --data-path text files, folders of \
             text, or prefixes of indexed datasets",
            found.path.display()
        ))
    })
}
