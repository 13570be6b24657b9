//! The error of every kernel.

use crate::tensor::device_memory::Memory;

fn state(memory: &Option<Memory>) -> String {
    memory.map_or_else(|| "the device says no more".into(), |memory| memory.to_string())
}

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
    /// There is no GPU to compute on.
    #[error("no GPU: {message}")]
    NoGpu { message: String },
    /// A GPU kernel could not be launched, or failed.
    #[error("GPU kernel {kernel}: {message}")]
    Gpu { kernel: String, message: String },
    /// The device has no memory left for a result.
    #[error(
        "{op}: no memory on the GPU for {bytes} bytes (a tensor {shape:?} of {dtype:?}): {}",
        state(memory)
    )]
    OutOfMemory {
        op: &'static str,
        bytes: usize,
        shape: Vec<usize>,
        dtype: candle_core::DType,
        /// Memory of the device, if the driver reports it.
        memory: Option<Memory>,
    },
    /// An error of candle.
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

    /// Whether a device had too little memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Candle(error) => names_out_of_memory(error),
            Self::Gpu { message, .. } => message.contains(OUT_OF_MEMORY),
            _ => false,
        }
    }

    /// An error of a GPU kernel.
    #[cfg(gpu)]
    pub(crate) fn gpu(kernel: &str, message: impl Into<String>) -> Self {
        Self::Gpu { kernel: kernel.into(), message: message.into() }
    }
}

/// CUDA's name for it.
const OUT_OF_MEMORY: &str = "OUT_OF_MEMORY";

/// Whether an error of candle says that a device had too little memory.
pub fn names_out_of_memory(error: &candle_core::Error) -> bool {
    format!("{error:?}").contains(OUT_OF_MEMORY)
}
