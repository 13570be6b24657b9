//! Grids over flat buffers, and zeroing: `cuda/flat.cu`.

use super::launch::blocks;
use super::{DevicePointer, Gpu, THREADS};
use crate::Result;

/// The file of kernels on flat buffers.
pub const FILE: &str = "flat";

/// Vectors of 16 bytes that each thread of `cuda/flat.cu` processes.
const UNROLL: usize = 4;

/// A grid over `n` elements. A thread processes `vector` of them at a time.
pub fn grid(op: &'static str, n: usize, vector: usize) -> Result<[u32; 3]> {
    Ok([blocks(op, n, THREADS as usize * UNROLL * vector)?, 1, 1])
}

impl Gpu {
    /// Sets `n` elements of `size` bytes to zero.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn zero(&self, to: DevicePointer, n: usize, size: usize, op: &'static str) -> Result<()> {
        self.launch(FILE, &format!("zero_{size}"), grid(op, n, 16 / size)?, THREADS, 0, |args| {
            args.ptr(to).count(n);
        })
    }
}
