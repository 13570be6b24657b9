//! `megatron import` and `megatron export`: between checkpoints and Hugging Face folders.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use models::hf::{self, ExportOptions};

use crate::cli::{ExportArgs, ImportArgs};
use crate::error::Result;

/// Runs `import` and returns the exit code to end with.
///
/// # Errors
/// If the model is not known or damaged, or the checkpoint cannot be written.
pub fn import(args: &ImportArgs) -> Result<u8> {
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {percent}% {eta}") {
        bar.set_style(style);
    }
    let done = hf::import(&args.from, &args.to, |elements, total| {
        bar.set_length(total);
        bar.set_position(elements);
    });
    bar.finish_and_clear();
    let done = done?;
    crate::print_line(&format!(
        "imported a {} model of {:.1} M parameters as {}",
        done.family,
        done.elements as f64 / 1e6,
        done.path.display()
    ));
    Ok(0)
}

/// Runs `export` and returns the exit code to end with.
///
/// # Errors
/// If the checkpoint is damaged or of no Hugging Face family, or the folder cannot be written.
pub fn export(args: &ExportArgs) -> Result<u8> {
    let options = ExportOptions { max_shard_size: args.max_shard_size, dtype: args.dtype };
    let done = hf::export(&args.from, &args.to, &options)?;
    let files = if done.files == 1 { "one file".to_string() } else { format!("{} files", done.files) };
    crate::print_line(&format!(
        "exported a {} model to {}: {:.1} MB of weights in {files}",
        done.family,
        args.to.display(),
        done.bytes as f64 / 1e6
    ));
    Ok(0)
}
