//! `megatron completions` and `megatron man`: completion scripts and man pages for the command
//! line.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

use super::command;
use crate::error::{Error, Result};

/// Print a shell's completion script for the program's commands and flags
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  source <(megatron completions bash)
  megatron completions zsh > ~/.zfunc/_megatron
  megatron completions fish > ~/.config/fish/completions/megatron.fish")]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: Shell,
}

/// Write a man page for each command
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:
  megatron man ~/.local/share/man/man1 && man megatron-pretrain")]
pub struct ManArgs {
    /// Folder for the pages; created if missing
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Prints completions, and returns the exit code.
pub fn completions(args: &CompletionsArgs) -> u8 {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "megatron", &mut text);
    crate::print_line(String::from_utf8_lossy(&text).trim_end());
    0
}

/// Writes man pages, and returns the exit code.
///
/// # Errors
/// If the folder cannot be written to.
pub fn man(args: &ManArgs) -> Result<u8> {
    let dir = &args.dir;
    let io = |source| Error::Io { action: format!("write man pages to {}", dir.display()), source };
    std::fs::create_dir_all(dir).map_err(io)?;
    clap_mangen::generate_to(command().disable_help_subcommand(true), dir).map_err(io)?;
    crate::print_line(&format!("man pages are in {}", dir.display()));
    Ok(0)
}
