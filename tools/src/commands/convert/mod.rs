//! `megatron import` and `megatron export`: convert Hugging Face folders and Megatron-LM
//! checkpoints to checkpoints, and checkpoints to Hugging Face folders.

mod args;

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use megatron::checkpoint::Found;
use models::hf::{self, ExportOptions};
use models::megatron_core::{self, Vocabulary};

pub use self::args::{ExportArgs, ImportArgs};
use crate::error::{Error, Result};

/// Runs `import` and returns the exit code to end with.
///
/// # Errors
/// If the model is unknown or damaged, or the checkpoint cannot be written.
pub fn import(args: &ImportArgs) -> Result<u8> {
    let bar =
        if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {percent}% {eta}") {
        bar.set_style(style);
    }
    let progress = |elements, total| {
        bar.set_length(total);
        bar.set_position(elements);
    };
    let hugging_face = args.from.join(hf::CONFIG).exists();
    let lines = match (hugging_face, args.vocab_size) {
        (true, None) => from_hugging_face(args, progress),
        (true, Some(_)) => Err(Error::usage(format!(
            "--vocab-size is for Megatron-LM checkpoints, but {} is a Hugging Face model with its \
             vocabulary size in {}; leave it out",
            args.from.display(),
            hf::CONFIG
        ))),
        (false, _) => match Found::at(&args.from) {
            Some(found @ (Found::Missing | Found::File | Found::Adapter | Found::DeepSpeed)) => {
                Err(Error::usage(format!("{} {}", args.from.display(), found.advice(&args.from))))
            }
            _ if megatron_core::is_megatron(&args.from) => from_megatron(args, progress),
            _ => Err(Error::usage(format!(
                "{} is neither a Hugging Face model ({}) nor a checkpoint of Megatron-LM \
                 (latest_checkpointed_iteration.txt, or .metadata in an iter_... folder): it has \
                 none of these files",
                args.from.display(),
                hf::CONFIG
            ))),
        },
    };
    bar.finish_and_clear();
    lines?.iter().for_each(|line| crate::print_line(line));
    Ok(0)
}

fn from_hugging_face(args: &ImportArgs, progress: impl FnMut(u64, u64)) -> Result<Vec<String>> {
    let done = hf::import(&args.from, &args.to, progress)?;
    let (family, millions, path) = (done.family, done.elements as f64 / 1e6, done.path.display());
    let imported = format!("imported a {family} model with {millions:.1} M parameters as {path}");
    Ok(done.note.clone().into_iter().chain([imported]).collect())
}

fn from_megatron(args: &ImportArgs, progress: impl FnMut(u64, u64)) -> Result<Vec<String>> {
    let done = megatron_core::import(
        &args.from,
        &args.to,
        args.vocab_size.map(|size| size as usize),
        progress,
    )?;
    let at = done.iteration.map_or(String::new(), |iteration| format!(" of iteration {iteration}"));
    let (millions, path) = (done.elements as f64 / 1e6, done.path.display());
    let vocabulary = match done.vocabulary {
        Vocabulary::Given(size) => format!("its vocabulary: {size} tokens (--vocab-size)"),
        Vocabulary::Recorded(size) => {
            format!(
                "its vocabulary: {size} tokens, as the checkpoint records; --vocab-size sets another number"
            )
        }
        Vocabulary::Padded(size) => format!(
            "its vocabulary: all {size} rows of the padded vocabulary, because the checkpoint does \
             not record the number of tokens; --vocab-size sets it"
        ),
    };
    let optimizer = match done.had_optimizer {
        true => {
            "its optimizer state was left out: training starts with a fresh optimizer, at step 0"
        }
        false => "training starts with a fresh optimizer, at step 0",
    };
    let imported =
        format!("imported a Megatron-LM model{at} with {millions:.1} M parameters as {path}");
    Ok(vec![imported, vocabulary, optimizer.into()])
}

/// Runs `export` and returns the exit code to end with.
///
/// # Errors
/// If the checkpoint is damaged or of no Hugging Face family, or the folder cannot be written.
pub fn export(args: &ExportArgs) -> Result<u8> {
    let options = ExportOptions { max_shard_size: args.max_shard_size, dtype: args.dtype };
    let done = hf::export(&args.from, &args.to, &options)?;
    let files =
        if done.files == 1 { "one file".to_string() } else { format!("{} files", done.files) };
    crate::print_line(&format!(
        "exported a {} model to {}: {:.1} MB of weights in {files}",
        done.family,
        args.to.display(),
        done.bytes as f64 / 1e6
    ));
    done.note.iter().for_each(|note| crate::print_line(&format!("note: {note}")));
    Ok(0)
}
