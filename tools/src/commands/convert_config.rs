//! `megatron convert-config`: DeepSpeed's configuration as a run file.

use std::path::PathBuf;

use clap::Args;

use crate::cli;
use crate::error::Result;

/// Write DeepSpeed's configuration as sections of a run file
///
/// Prints them to standard output. Every line names the key that it comes from; keys without a
/// meaning here are comments. `pretrain --deepspeed-config FILE` reads the configuration as it is.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  megatron convert-config ds_config.json >> run.toml")]
pub struct ConvertConfigArgs {
    /// The configuration
    #[arg(value_name = "ds_config.json")]
    pub file: PathBuf,
}

/// Prints the sections.
///
/// # Errors
/// If the file cannot be read, or has keys that are unknown or refused.
pub fn run(args: &ConvertConfigArgs) -> Result<()> {
    crate::print_line(cli::convert(&args.file)?.trim_end());
    Ok(())
}
