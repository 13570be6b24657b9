//! Addresses of tensors' elements, and allocation of results.

use candle_core::{DType, Shape, Tensor};

use super::backend::Gpu;
use crate::{Error, Result};

/// An address in device memory.
///
/// It stays valid for all kernels that are launched while its tensor lives, whenever they run:
/// memory is freed in the stream's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePointer(pub(super) u64);

impl DevicePointer {
    /// An address from the driver. Its memory must outlive the kernels that will use it.
    pub fn new(address: u64) -> Self {
        Self(address)
    }

    /// The address `bytes` after this one.
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }

    /// The number that driver calls take.
    pub fn address(self) -> u64 {
        self.0
    }
}

/// Suffix of kernel names for a dtype.
///
/// # Errors
/// If there are no GPU kernels for it.
pub fn suffix(dtype: DType, op: &'static str) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        dtype => Err(Error::DType { op, dtype }),
    }
}

impl Gpu {
    /// The elements of `t`, a contiguous tensor or view, for reading.
    ///
    /// # Errors
    /// If `t`, named `what` in messages of `op`, is not contiguous, not of `dtype`, or not on this
    /// device.
    pub fn input(
        &self,
        t: &Tensor,
        dtype: DType,
        op: &'static str,
        what: &'static str,
    ) -> Result<DevicePointer> {
        self.elements(t, dtype, op, what, false)
    }

    /// As [`Gpu::input`], for writing. Other tensors that share the storage see the change.
    ///
    /// # Errors
    /// As [`Gpu::input`].
    pub fn inplace(
        &self,
        t: &Tensor,
        dtype: DType,
        op: &'static str,
        what: &'static str,
    ) -> Result<DevicePointer> {
        self.elements(t, dtype, op, what, true)
    }

    fn elements(
        &self,
        t: &Tensor,
        dtype: DType,
        op: &'static str,
        what: &'static str,
        write: bool,
    ) -> Result<DevicePointer> {
        if t.dtype() != dtype {
            return Err(Error::DType { op, dtype: t.dtype() });
        }
        if !t.is_contiguous() {
            return Err(Error::NotContiguous { op, what });
        }
        let start = t.layout().start_offset() * dtype.size_in_bytes();
        Ok(self.storage(t, op, write)?.offset(start))
    }

    /// A result and the address of its elements. Kernels must write all of them.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn output(
        &self,
        shape: impl Into<Shape>,
        dtype: DType,
        op: &'static str,
    ) -> Result<(Tensor, DevicePointer)> {
        let tensor = self.allocate(shape.into(), dtype, op)?;
        let pointer = self.storage(&tensor, op, true)?;
        Ok((tensor, pointer))
    }
}
