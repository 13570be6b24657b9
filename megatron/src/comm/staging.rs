//! Staging of GPU tensors for backends that move bytes in CPU memory: a tensor is copied to the
//! host before an operation, and the result back after it.
//!
//! A tensor is taken when its operation is issued ([`issued`]). The copy to the host waits for the
//! work queued before, and overlaps with later work. The rest runs with the operation on the
//! group's thread, so it delays neither the rank nor other groups. Work that is queued after
//! waiting for the operation comes after the copy back. The host buffer is reusable page-locked
//! memory ([`kernels::tensor::transfer`]).

use candle_core::{Device, Tensor};
use kernels::tensor::device::same_elements;
use kernels::tensor::transfer::{Mark, fetch, mark, put, room};

use crate::Result;

/// A tensor in its state at the time when an operation on it was issued.
pub struct Issued {
    tensor: Tensor,
    /// That time in its GPU's work, if it is on a GPU.
    at: Option<Mark>,
}

/// Takes a tensor for an operation.
pub fn issued(t: &Tensor) -> Result<Issued> {
    Ok(Issued { tensor: t.clone(), at: mark(t.device())? })
}

/// Calls `f` with the elements of `t` on the host, for reading.
pub fn read(t: &Issued, f: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    match &t.at {
        None => f(&t.tensor),
        Some(at) => f(fetch(&t.tensor, at)?.tensor()),
    }
}

/// Calls `f` with the elements of `t` on the host, to change them, in a group of `size`. A single
/// rank changes nothing.
pub fn in_place(size: usize, t: &Issued, f: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    let Some(at) = &t.at else { return f(&t.tensor) };
    if size == 1 {
        return Ok(());
    }
    let host = fetch(&t.tensor, at)?;
    f(host.tensor())?;
    Ok(put(host, &t.tensor, at)?)
}

/// Calls `f` to read `input` and write all of `output`, in a group of `size`. The two may share a
/// storage. For a single rank the result is the input.
pub fn from_to(
    size: usize,
    input: &Issued,
    output: &Issued,
    f: impl FnOnce(&Tensor, &Tensor) -> Result<()>,
) -> Result<()> {
    let (from, to) = (&input.tensor, &output.tensor);
    if size == 1 && input.at.is_some() && from.device().same_device(to.device()) {
        if !same_elements(from, to) {
            kernels::ops::reduce::copy(to, from)?;
        }
        return Ok(());
    }
    between(Some(input), Some(output), |input, output| match (input, output) {
        (Some(input), Some(output)) => f(input, output),
        _ => Ok(()),
    })
}

/// Calls `f` to read `input` and write all of `output`; each is `None` if this rank has none. The
/// two may share a storage.
pub fn between(
    input: Option<&Issued>,
    output: Option<&Issued>,
    f: impl FnOnce(Option<&Tensor>, Option<&Tensor>) -> Result<()>,
) -> Result<()> {
    if input.into_iter().chain(output).all(|t| t.at.is_none()) {
        return f(input.map(|t| &t.tensor), output.map(|t| &t.tensor));
    }
    let staged = |t: &Issued| t.at.as_ref().map(|at| fetch(&t.tensor, at)).transpose();
    let copy = input.map(staged).transpose()?.flatten();
    let from = copy.as_ref().map(|copy| copy.tensor()).or(input.map(|t| &t.tensor));
    match output {
        None => f(from, None),
        Some(output) => match &output.at {
            Some(at) => {
                let result = room(&output.tensor, at)?;
                f(from, Some(result.tensor()))?;
                Ok(put(result, &output.tensor, at)?)
            }
            // A separate storage, because the operation must not write what it reads.
            None => {
                let result =
                    Tensor::zeros(output.tensor.shape(), output.tensor.dtype(), &Device::Cpu)?;
                f(from, Some(&result))?;
                Ok(kernels::ops::reduce::copy(&output.tensor, &result)?)
            }
        },
    }
}
