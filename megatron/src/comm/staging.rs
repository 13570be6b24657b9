//! Tensors on GPUs, for backends that move bytes of the CPU's memory: copied there before an
//! operation, and its result back after it.
//!
//! A tensor is taken over when its operation is issued ([`issued`]): the copy to the host is behind
//! what was queued before, and goes on while later work is computed. The rest runs where the
//! operation does, on the group's thread, so it holds up neither the rank nor other groups; what is
//! queued once the operation was waited for is behind the copy back. The host's side is locked
//! memory that is used again ([`kernels::tensor::transfer`]).

use candle_core::{Device, Tensor};
use kernels::tensor::device::same_elements;
use kernels::tensor::transfer::{Mark, fetch, mark, put, room};

use crate::Result;

/// A tensor as it was when an operation on it was issued.
pub struct Issued {
    tensor: Tensor,
    /// That point in its GPU's work, if it is on one.
    at: Option<Mark>,
}

/// Takes over a tensor for an operation.
pub fn issued(t: &Tensor) -> Result<Issued> {
    Ok(Issued { tensor: t.clone(), at: mark(t.device())? })
}

/// Has `f` read the elements of `t`.
pub fn read(t: &Issued, f: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    match &t.at {
        None => f(&t.tensor),
        Some(at) => f(fetch(&t.tensor, at)?.tensor()),
    }
}

/// Has `f` change the elements of `t` in a group of `size`. One rank alone changes nothing.
pub fn in_place(size: usize, t: &Issued, f: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    let Some(at) = &t.at else { return f(&t.tensor) };
    if size == 1 {
        return Ok(());
    }
    let host = fetch(&t.tensor, at)?;
    f(host.tensor())?;
    Ok(put(host, &t.tensor, at)?)
}

/// Has `f` read `input` and write all of `output` in a group of `size`. The two may share a
/// storage. One rank alone has its input as result.
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

/// Has `f` read `input`, if this rank has one, and write all of `output`, if this rank has one. The
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
            // A storage of its own, since the operation may not write what it reads.
            None => {
                let result =
                    Tensor::zeros(output.tensor.shape(), output.tensor.dtype(), &Device::Cpu)?;
                f(from, Some(&result))?;
                Ok(kernels::ops::reduce::copy(&output.tensor, &result)?)
            }
        },
    }
}
