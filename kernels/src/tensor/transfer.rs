//! Copies between a GPU and the host's memory beside what is computed: for those who move tensors
//! through the host.
//!
//! The host's side are tensors of locked memory, which the device copies from and to by itself;
//! they are kept and used again. Copies run on streams of their own and wait for the [`Mark`] that
//! was set when a tensor was handed over, not for what was queued since; what is queued after
//! [`put`] waits for its copy. The host waits in [`fetch`], for that copy alone.

use candle_core::{Device, Tensor};

use crate::Result;
#[cfg(gpu)]
use crate::tensor::gpu::transfer as imp;

/// A point in the order of what a GPU computes.
pub struct Mark(#[cfg(gpu)] pub(crate) imp::Mark, #[cfg(not(gpu))] std::convert::Infallible);

/// A tensor of the host's memory that a GPU copies from or to. Its memory is used again when it is
/// dropped.
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

/// A mark behind all that is queued so far on `device`; nothing for the CPU, whose tensors need no
/// copies.
///
/// # Errors
/// What the driver says.
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
/// If `t` is not contiguous or of no dtype that tensors of GPUs have, or what the driver says.
pub fn fetch(t: &Tensor, after: &Mark) -> Result<Staged> {
    #[cfg(gpu)]
    return imp::fetch(t, &after.0).map(Staged);
    #[cfg(not(gpu))]
    {
        let _ = t;
        match after.0 {}
    }
}

/// Room for as many elements of `t`'s dtype, which hold anything, to be filled and [`put`].
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

/// Copies into `t`, after the mark and before what is queued on its device from now on. Nobody
/// waits.
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
