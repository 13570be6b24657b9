//! The error of the command line: the last message to the user, and the exit code.

use std::path::PathBuf;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Flags or settings that cannot be used.
    #[error("{0}")]
    Usage(String),
    /// A run file that cannot be used.
    #[error("{}:{line}: {message}", path.display())]
    RunFile { path: PathBuf, line: usize, message: String },
    /// A failed file operation; `action` completes "cannot …".
    #[error("cannot {action}: {source}")]
    Io { action: String, source: std::io::Error },
    /// Processes that could not be started or supervised.
    #[error("{0}")]
    Launch(String),
    /// The run itself failed.
    #[error(transparent)]
    Run(#[from] megatron::Error),
}

/// Result of a command.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Flags or settings that cannot be used.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    /// The process's exit code: 2 for what the user typed, as clap does, 1 for everything else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::RunFile { .. } | Self::Run(megatron::Error::Config(_)) => 2,
            Self::Io { .. } | Self::Launch(_) | Self::Run(_) => 1,
        }
    }

    /// Whether another try from the last checkpoint would fail again: steps are bitwise
    /// reproducible.
    pub fn comes_again(&self) -> bool {
        matches!(self, Self::Run(megatron::Error::Diverged(_)))
    }

    /// Whether this rank failed only because another one did. The supervisor then looks further for
    /// the cause.
    pub fn blames_a_peer(&self) -> bool {
        matches!(
            self,
            Self::Run(megatron::Error::PeerLost { .. } | megatron::Error::Timeout { .. })
        )
    }
}
