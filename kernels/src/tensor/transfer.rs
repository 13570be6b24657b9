//! Copies between a GPU and host memory that overlap with computation: for modules that move
//! tensors through the host.
//!
//! On the host side, tensors lie in pinned memory, which the device reads and writes directly.
//! Pinned memory is kept and reused. Copies run on streams of their own. They wait for the [`Mark`]
//! that was set when a tensor was handed over, not for work queued since. Work queued after [`put`]
//! waits for its copy. The host waits only in [`fetch`], for that copy alone.

use candle_core::{Device, Tensor};

use crate::Result;
#[cfg(gpu)]
use crate::tensor::gpu::transfer as imp;

/// A point in the order of a GPU's operations.
pub struct Mark(#[cfg(gpu)] pub(crate) imp::Mark, #[cfg(not(gpu))] std::convert::Infallible);

/// A tensor in host memory that a GPU copies from or to. Its memory is reused after it is dropped.
pub struct Staged(#[cfg(gpu)] pub(crate) imp::Staged, #[cfg(not(gpu))] std::convert::Infallible);

impl Staged {
    /// The elements, on the CPU.
    pub fn tensor(&self) -> &Tensor {
        #[cfg(gpu)]
        return self.0.tensor();
        #[cfg(not(gpu))]
        match self.0 {}
    }
}

/// A mark after everything queued so far on `device`; none for the CPU, which needs no copies.
///
/// # Errors
/// Those of the driver.
pub fn mark(device: &Device) -> Result<Option<Mark>> {
    #[cfg(gpu)]
    if crate::tensor::gpu::computes(device) {
        return imp::mark(device).map(|mark| Some(Mark(mark)));
    }
    let _ = device;
    Ok(None)
}

/// The elements of `t`, contiguous and on a GPU, as they are at the mark. Waits for the copy.
///
/// # Errors
/// If `t` is not contiguous or has a dtype that GPU tensors cannot have, or those of the driver.
pub fn fetch(t: &Tensor, after: &Mark) -> Result<Staged> {
    #[cfg(gpu)]
    return imp::fetch(t, &after.0).map(Staged);
    #[cfg(not(gpu))]
    {
        let _ = t;
        match after.0 {}
    }
}

/// Room for as many elements as `t` has, of its dtype, to be filled and [`put`]. The contents are
/// arbitrary.
///
/// # Errors
/// As [`fetch`].
pub fn room(t: &Tensor, _of: &Mark) -> Result<Staged> {
    #[cfg(gpu)]
    return imp::room(t).map(Staged);
    #[cfg(not(gpu))]
    {
        let _ = t;
        match _of.0 {}
    }
}

/// Copies into `t`, after the mark and before work that is queued on its device from now on. Does
/// not wait.
///
/// # Errors
/// As [`fetch`].
pub fn put(from: Staged, t: &Tensor, after: &Mark) -> Result<()> {
    #[cfg(gpu)]
    return imp::put(from.0, t, &after.0);
    #[cfg(not(gpu))]
    {
        let _ = (t, after);
        match from.0 {}
    }
}
