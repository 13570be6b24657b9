//! Tensors on GPUs, for backends that move bytes of the CPU's memory: copied there before an operation, and its result back after it.
//!
//! This runs where the operation runs, on the group's thread, so it holds up neither the rank nor other groups. Copies are queued on the
//! tensor's stream: behind everything that was queued before the operation was issued, and before what is queued once it was waited for.

use candle_core::Tensor;
use kernels::device::{copy_from_host, same_elements, to_host};

use crate::Result;

/// Has `f` change the elements of `t` in a group of `size`. One rank alone changes nothing.
pub fn in_place(size: usize, t: &Tensor, f: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    if t.device().is_cpu() {
        return f(t);
    }
    if size == 1 {
        return Ok(());
    }
    let host = to_host(t)?;
    f(&host)?;
    Ok(copy_from_host(t, &host)?)
}

/// Has `f` read `input` and write all of `output` in a group of `size`. The two may share a storage. One rank alone has its input as result.
pub fn from_to(
    size: usize,
    input: &Tensor,
    output: &Tensor,
    f: impl FnOnce(&Tensor, &Tensor) -> Result<()>,
) -> Result<()> {
    if size == 1 && !input.device().is_cpu() && input.device().same_device(output.device()) {
        if !same_elements(input, output) {
            kernels::reduce::copy(output, input)?;
        }
        return Ok(());
    }
    between(Some(input), Some(output), |input, output| match (input, output) {
        (Some(input), Some(output)) => f(input, output),
        _ => Ok(()),
    })
}

/// Has `f` read `input`, if this rank has one, and write all of `output`, if this rank has one. The two may share a storage.
pub fn between(
    input: Option<&Tensor>,
    output: Option<&Tensor>,
    f: impl FnOnce(Option<&Tensor>, Option<&Tensor>) -> Result<()>,
) -> Result<()> {
    if input.into_iter().chain(output).all(|t| t.device().is_cpu()) {
        return f(input, output);
    }
    let on_host = input.map(to_host).transpose()?;
    // What it holds does not matter; the copy has its shape and dtype.
    let result = output.map(|t| Tensor::zeros(t.shape(), t.dtype(), &candle_core::Device::Cpu)).transpose()?;
    f(on_host.as_ref(), result.as_ref())?;
    match (output, &result) {
        (Some(output), Some(result)) if !output.device().is_cpu() => Ok(copy_from_host(output, result)?),
        (Some(output), Some(result)) => Ok(kernels::reduce::copy(output, result)?),
        _ => Ok(()),
    }
}
