//! Slices of CPU tensors: shared ones to read, and mutable ones through views of a shared storage.
//!
//! candle offers mutation only through `inplace_op1`: its closure receives the storage under the
//! storage's write lock. [`with_slice_mut`] wraps that, so that flat buffers can be lent out view
//! by view. To hold a read guard of a storage while lending the same storage mutably would
//! deadlock; callers never nest the two for one storage.

use std::cell::RefCell;
use std::marker::PhantomData;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Storage, Tensor, WithDType};
use half::{bf16, f16};

use crate::{Error, Result};

/// The range of `layout` in its storage, if it is contiguous.
fn range(layout: &Layout, op: &'static str) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => Err(Error::NotContiguous { op, what: "tensor" }),
    }
}

/// As [`range`], and the row stride. Accepts a contiguous tensor, or one with contiguous rows at
/// one stride over all leading dimensions. The range then includes the gaps between rows.
pub(crate) fn rows(
    layout: &Layout,
    op: &'static str,
    what: &'static str,
) -> Result<(std::ops::Range<usize>, usize)> {
    if let Some((start, end)) = layout.contiguous_offsets() {
        return Ok((start..end, layout.dims().last().copied().unwrap_or(1)));
    }
    if let ([leading @ .., width], [strides @ .., 1]) = (layout.dims(), layout.stride())
        && let Some(&apart) = strides.last()
        && apart >= *width
        && leading.iter().product::<usize>() > 0
        && (1..leading.len()).all(|i| strides[i - 1] == strides[i] * leading[i])
    {
        let (start, rows) = (layout.start_offset(), leading.iter().product::<usize>());
        return Ok((start..start + (rows - 1) * apart + width, apart));
    }
    Err(Error::NotContiguous { op, what })
}

/// Calls `f` with the elements of a contiguous CPU tensor (a view included).
///
/// # Errors
/// If `t` is not contiguous, not of dtype `T`, or not on the CPU.
pub fn with_slice<T: WithDType, R>(
    t: &Tensor,
    op: &'static str,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    #[cfg(feature = "emulated")]
    crate::tensor::emulation::touched(op);
    let (storage, layout) = t.storage_and_layout();
    let range = range(layout, op)?;
    match &*storage {
        Storage::Cpu(cpu) => f(&cpu.as_slice::<T>()?[range]),
        _ => Err(Error::Device { op, device: format!("{:?}", t.device().location()) }),
    }
}

struct Lend<T, F, R> {
    elem: PhantomData<T>,
    op: &'static str,
    /// Whether rows may be strided.
    apart: bool,
    f: RefCell<Option<F>>,
    out: RefCell<Option<Result<R>>>,
}

/// Element types of flat buffers and messages.
pub trait HostElem: WithDType {
    /// The storage's elements, if it holds this type.
    fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! host_elem {
    ($($t:ty => $variant:ident),*) => {$(
        impl HostElem for $t {
            fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(v) => Some(v),
                    _ => None,
                }
            }
        }
    )*};
}
host_elem!(u8 => U8, u32 => U32, i16 => I16, i64 => I64, bf16 => BF16, f16 => F16, f32 => F32, f64 => F64);

impl<T: HostElem, F: FnOnce(&mut [T], usize) -> Result<R>, R> InplaceOp1 for Lend<T, F, R> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let width = || layout.dims().last().copied().unwrap_or(1);
        let place = if self.apart {
            rows(layout, self.op, "tensor")
        } else {
            range(layout, self.op).map(|range| (range, width()))
        };
        let out = place.and_then(|(range, apart)| {
            let dtype = storage.dtype();
            let all = T::storage_mut(storage).ok_or(Error::DType { op: self.op, dtype })?;
            let slice = &mut all[range];
            match self.f.borrow_mut().take() {
                Some(f) => f(slice, apart),
                None => Err(Error::shape(self.op, "storage lent twice")),
            }
        });
        *self.out.borrow_mut() = Some(out);
        Ok(())
    }
}

/// Calls `f` with the mutable elements of a contiguous CPU tensor (a view included). Other tensors
/// that share the storage see the change. The storage stays write-locked while `f` runs.
///
/// # Errors
/// If `t` is not contiguous, not of dtype `T`, or not on the CPU; or those of `f`.
pub fn with_slice_mut<T: HostElem, R>(
    t: &Tensor,
    op: &'static str,
    f: impl FnOnce(&mut [T]) -> Result<R>,
) -> Result<R> {
    lend(t, op, false, |slice, _| f(slice))
}

/// As [`with_slice_mut`], but also accepts a tensor with strided rows. `f` gets everything from the
/// first to the last element, and the row stride.
///
/// # Errors
/// As [`with_slice_mut`], except that strided rows are allowed.
pub(crate) fn with_rows_mut<T: HostElem, R>(
    t: &Tensor,
    op: &'static str,
    f: impl FnOnce(&mut [T], usize) -> Result<R>,
) -> Result<R> {
    lend(t, op, true, f)
}

fn lend<T: HostElem, R>(
    t: &Tensor,
    op: &'static str,
    apart: bool,
    f: impl FnOnce(&mut [T], usize) -> Result<R>,
) -> Result<R> {
    #[cfg(feature = "emulated")]
    crate::tensor::emulation::touched(op);
    if t.elem_count() == 0 {
        // candle refuses to lend a layout in which it sees all elements at one address.
        return with_slice::<T, _>(t, op, |_| Ok(()))
            .and_then(|()| f(&mut [], t.dims().last().copied().unwrap_or(1)));
    }
    let lend = Lend {
        elem: PhantomData::<T>,
        op,
        apart,
        f: RefCell::new(Some(f)),
        out: RefCell::new(None),
    };
    t.inplace_op1(&lend)?;
    lend.out.into_inner().unwrap_or_else(|| Err(Error::shape(op, "storage was not lent")))
}

/// Dispatches on the dtypes of flat buffers and messages.
macro_rules! by_dtype {
    ($t:expr, $op:expr, $T:ident => $body:expr) => {
        match $t.dtype() {
            DType::U8 => {
                type $T = u8;
                $body
            }
            DType::U32 => {
                type $T = u32;
                $body
            }
            DType::I16 => {
                type $T = i16;
                $body
            }
            DType::I64 => {
                type $T = i64;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F64 => {
                type $T = f64;
                $body
            }
            dtype => Err(Error::DType { op: $op, dtype }),
        }
    };
}

/// Calls `f` with the bytes (native endian) of a contiguous CPU tensor.
///
/// # Errors
/// As [`with_slice`].
pub fn with_bytes<R>(
    t: &Tensor,
    op: &'static str,
    f: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    by_dtype!(t, op, T => with_slice::<T, R>(t, op, |s| {
        // SAFETY: every HostElem is a plain number without padding; any byte of it may be read.
        f(unsafe { std::slice::from_raw_parts(s.as_ptr().cast::<u8>(), std::mem::size_of_val(s)) })
    }))
}

/// Calls `f` with the mutable bytes (native endian) of a contiguous CPU tensor.
///
/// # Errors
/// As [`with_slice_mut`].
pub fn with_bytes_mut<R>(
    t: &Tensor,
    op: &'static str,
    f: impl FnOnce(&mut [u8]) -> Result<R>,
) -> Result<R> {
    by_dtype!(t, op, T => with_slice_mut::<T, R>(t, op, |s| {
        // SAFETY: every HostElem is a plain number: any bit pattern is a valid value.
        f(unsafe { std::slice::from_raw_parts_mut(s.as_mut_ptr().cast::<u8>(), std::mem::size_of_val(s)) })
    }))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn only_rows_may_lie_apart_and_only_where_asked_for() {
        let all = Tensor::arange(0f32, 12., &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let left = all.narrow(1, 0, 2).unwrap();
        let refused = with_slice_mut::<f32, ()>(&left, "test", |_| panic!("lent")).unwrap_err();
        assert!(matches!(refused, Error::NotContiguous { op: "test", .. }), "{refused}");
        // From the first to the last element, with the gaps between the rows.
        let lent =
            with_rows_mut::<f32, _>(&left, "test", |all, apart| Ok((all.to_vec(), apart))).unwrap();
        assert_eq!(lent, ((0..10).map(|i| i as f32).collect(), 4));
        assert!(
            with_rows_mut::<f32, ()>(&left.t().unwrap(), "test", |_, _| panic!("lent")).is_err()
        );
        with_slice_mut::<f32, _>(&all.get(1).unwrap(), "test", |row| {
            row.fill(0.);
            Ok(())
        })
        .unwrap();
        assert_eq!(all.sum_all().unwrap().to_scalar::<f32>().unwrap(), 66. - 22.);
    }
}
