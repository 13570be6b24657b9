//! The error type of this crate. Messages say what went wrong, where, and what to do.

use std::path::{Path, PathBuf};

/// The reason why a run, or a part of it, cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid or contradictory settings; the message names each value and its source.
    #[error("{0}")]
    Config(String),
    /// A collective or a message between ranks failed, but no rank was lost.
    #[error("{0}")]
    Comm(String),
    /// A peer died or left while this rank needed it.
    #[error("rank {rank} {how}; it was needed by {operation}")]
    PeerLost {
        /// Rank in the world.
        rank: usize,
        /// What happened to it, as a verb phrase.
        how: String,
        /// The operation of this rank.
        operation: String,
    },
    /// A peer did not arrive at an operation in time.
    #[error(
        "{operation} waited {seconds:.0} s for rank {missing:?}: check the output of these ranks; \
         they may hang or run different code"
    )]
    Timeout {
        /// The operation of this rank.
        operation: String,
        /// Ranks that did not arrive.
        missing: Vec<usize>,
        /// How long this rank waited.
        seconds: f64,
    },
    /// A device's memory is exhausted; the message says what uses it, and what helps.
    #[error("{0}")]
    OutOfMemory(String),
    /// Training diverged: the values are not finite.
    #[error("{0}")]
    Diverged(String),
    /// Data that cannot be used: missing, empty, truncated, or not fitting the tokenizer or model.
    #[error("{}: {message}", path.display())]
    Data {
        /// The file or folder at fault.
        path: PathBuf,
        /// What is wrong with it, and what helps.
        message: String,
    },
    /// A checkpoint that cannot be written, read, or used here.
    #[error("checkpoint {}: {message}", path.display())]
    Checkpoint {
        /// The file or folder at fault.
        path: PathBuf,
        /// What is wrong with it, and what helps.
        message: String,
    },
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The refused action, as a verb: "open".
        action: &'static str,
        /// The path of the action.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A kernel refused its input.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// An error from candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An invalid or contradictory setting.
    pub fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    /// A failed operation between ranks.
    pub fn comm(message: impl Into<String>) -> Self {
        Self::Comm(message.into())
    }

    /// Unusable data at `path`.
    pub fn data(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::Data { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// An unusable checkpoint at `path`.
    pub fn checkpoint(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// A failed file operation; `action` completes "cannot … PATH", e.g. `"create"`.
    pub fn io(action: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { action, path: path.as_ref().to_path_buf(), source }
    }
}
