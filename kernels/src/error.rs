//! The error of every kernel.

/// Why a kernel refused its input.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Shapes of the operands contradict each other or the operation.
    #[error("{op}: {message}")]
    Shape { op: &'static str, message: String },
    /// The operation has no implementation for this dtype.
    #[error("{op} does not support dtype {dtype:?}")]
    DType { op: &'static str, dtype: candle_core::DType },
    /// The operation needs a contiguous operand.
    #[error("{op} needs a contiguous {what}; call .contiguous() first")]
    NotContiguous { op: &'static str, what: &'static str },
    /// The operation has no implementation on this device.
    #[error("{op} is not implemented on {device}")]
    Device { op: &'static str, device: String },
    /// An error of candle's.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Result of a kernel.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A shape error of operation `op`.
    pub fn shape(op: &'static str, message: impl Into<String>) -> Self {
        Self::Shape { op, message: message.into() }
    }
}
