//! Reads tensors, checks shapes, and makes results.

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use candle_core::{DType, Layout, Shape, Storage, StorageRef, Tensor};

use crate::tensor::host::{HostElem, rows};
use crate::{Error, Result};

/// The elements of a contiguous CPU tensor under the read lock of its storage.
///
/// Hold only one per storage at a time, because a waiting writer would deadlock a second one. Copy
/// small operands with [`copied`].
pub struct View<'a, T> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    elem: PhantomData<T>,
}

impl<'a, T: HostElem> View<'a, T> {
    /// # Errors
    /// If `t`, named `what` in messages of `op`, is not contiguous, not of type `T`, or not on the
    /// CPU.
    pub fn new(t: &'a Tensor, op: &'static str, what: &'static str) -> Result<Self> {
        Self::of(t, op, |layout| {
            let (start, end) =
                layout.contiguous_offsets().ok_or(Error::NotContiguous { op, what })?;
            Ok((start..end, ()))
        })
        .map(|(view, ())| view)
    }

    /// As [`View::new`], but also accepts a tensor with strided rows: everything from the first to
    /// the last element, and the row stride.
    ///
    /// # Errors
    /// As [`View::new`], except that strided rows are allowed.
    pub fn rows(t: &'a Tensor, op: &'static str, what: &'static str) -> Result<(Self, usize)> {
        Self::of(t, op, |layout| rows(layout, op, what))
    }

    fn of<D>(
        t: &'a Tensor,
        op: &'static str,
        place: impl FnOnce(&Layout) -> Result<(Range<usize>, D)>,
    ) -> Result<(Self, D)> {
        if t.dtype() != T::DTYPE {
            return Err(Error::DType { op, dtype: t.dtype() });
        }
        if !t.device().is_cpu() {
            return Err(Error::Device { op, device: format!("{:?}", t.device().location()) });
        }
        #[cfg(feature = "emulated")]
        crate::tensor::emulation::touched(op);
        let (storage, layout) = t.storage_and_layout();
        let (range, distance) = place(layout)?;
        Ok((Self { storage, range, elem: PhantomData }, distance))
    }
}

impl<T: HostElem> Deref for View<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let elements = match &*self.storage {
            Storage::Cpu(cpu) => cpu.as_slice::<T>().ok(),
            _ => None,
        };
        &elements.expect("device and dtype were checked when the view was made")[self.range.clone()]
    }
}

/// A copy of the elements of `t`.
pub fn copied<T: HostElem>(t: &Tensor, op: &'static str, what: &'static str) -> Result<Vec<T>> {
    Ok(View::new(t, op, what)?.to_vec())
}

/// Whether two tensors lie in one storage, so that lending both would deadlock.
pub fn same_storage(a: &Tensor, b: &Tensor) -> bool {
    let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0).addr();
    address(a) == address(b)
}

/// Refuses a `result` (called `what` in the message) that shares the storage of an operand: locking
/// it would deadlock with reading the operand.
pub fn expect_apart(
    op: &'static str,
    what: &str,
    result: &Tensor,
    operands: &[&Tensor],
) -> Result<()> {
    if operands.iter().any(|operand| same_storage(result, operand)) {
        return Err(Error::shape(op, format!("{what} shares its storage with an operand")));
    }
    Ok(())
}

/// A tensor of `data` on the device of `like`.
pub fn tensor<T: HostElem>(data: Vec<T>, shape: impl Into<Shape>, like: &Tensor) -> Result<Tensor> {
    Ok(Tensor::from_vec(data, shape.into(), like.device())?)
}

/// Rows and width of `t` with its leading dimensions flattened.
pub fn rows_of(t: &Tensor, op: &'static str) -> Result<(usize, usize)> {
    match t.dims() {
        [] | [.., 0] => Err(Error::shape(
            op,
            format!("shape {:?} where a last dimension of at least 1 is needed", t.dims()),
        )),
        [leading @ .., width] => Ok((leading.iter().product(), *width)),
    }
}

/// The shape of `t` with the last dimension replaced.
pub fn with_last(t: &Tensor, width: usize) -> Vec<usize> {
    let mut dims = t.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    dims
}

/// # Errors
/// If `t` does not have exactly the shape `want`.
pub fn expect_shape(op: &'static str, what: &str, t: &Tensor, want: &[usize]) -> Result<()> {
    if t.dims() == want {
        return Ok(());
    }
    Err(Error::shape(op, format!("{what} has shape {:?} where {want:?} is needed", t.dims())))
}

/// # Errors
/// If `t` does not have `want` elements.
pub fn expect_elements(op: &'static str, what: &str, t: &Tensor, want: usize) -> Result<()> {
    if t.elem_count() == want {
        return Ok(());
    }
    Err(Error::shape(
        op,
        format!("{what} has shape {:?} where {want} elements are needed", t.dims()),
    ))
}

/// # Errors
/// If the dtype of `t` is not `dtype`.
pub fn expect_dtype(op: &'static str, t: &Tensor, dtype: DType) -> Result<()> {
    if t.dtype() == dtype { Ok(()) } else { Err(Error::DType { op, dtype: t.dtype() }) }
}
