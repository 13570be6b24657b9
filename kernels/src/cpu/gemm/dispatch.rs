//! Selects a micro-kernel by storage types and instruction set.

use candle_core::DType;
use half::{bf16, f16};

use super::kernel::Kernel;
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::{amx::Amx, amx_split::AmxSplit, avx2::Avx2, avx512::Avx512, avx512bf16::Avx512Bf16};
use crate::tensor::element::Elem;
use crate::tensor::simd::Isa;

/// Work that runs once the types are known.
pub trait WithKernel {
    /// # Safety
    /// `self` points to elements of the types that [`with_kernel`] was called for.
    unsafe fn run<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>>(self);
}

/// Runs `what` with the kernel of `isa` for operands of `E` and results of `C`, which is `E` or
/// f32.
///
/// # Safety
/// Those of `what`; and the machine must have the instruction set.
pub unsafe fn with_kernel<E: Elem, C: Elem, W: WithKernel>(isa: Isa, what: W) {
    // SAFETY: the caller's promise.
    unsafe {
        match (E::DTYPE, C::DTYPE) {
            (DType::F32, DType::F32) => of_parts::<f32, f32, W>(isa, what),
            (DType::F16, DType::F16) => of_parts::<f16, f16, W>(isa, what),
            (DType::F16, DType::F32) => of_parts::<f16, f32, W>(isa, what),
            (DType::BF16, DType::BF16) => of_bf16::<bf16, W>(isa, what),
            (DType::BF16, DType::F32) => of_bf16::<f32, W>(isa, what),
            (e, c) => unreachable!("no product of {e:?} gives {c:?}"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn through_f32<E: super::lanes::Lanes, C: Elem<Acc = f32>, W: WithKernel>(
    isa: Isa,
    what: W,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            Isa::Portable => what.run::<E, C, Portable>(),
            Isa::Avx2 => what.run::<E, C, Avx2>(),
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => what.run::<E, C, Avx512>(),
        }
    }
}

/// f32 and f16: directly, or as sums of bf16.
#[cfg(target_arch = "x86_64")]
unsafe fn of_parts<E: super::bf16_split::SplitBf16, C: Elem<Acc = f32>, W: WithKernel>(
    isa: Isa,
    what: W,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            Isa::Amx => what.run::<E, C, AmxSplit>(),
            _ => through_f32::<E, C, W>(isa, what),
        }
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn of_bf16<C: Elem<Acc = f32>, W: WithKernel>(isa: Isa, what: W) {
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            Isa::Avx512Bf16 => what.run::<bf16, C, Avx512Bf16>(),
            Isa::Amx => what.run::<bf16, C, Amx>(),
            _ => through_f32::<bf16, C, W>(isa, what),
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn through_f32<E: Elem<Acc = f32>, C: Elem<Acc = f32>, W: WithKernel>(_: Isa, what: W) {
    // SAFETY: the caller's promise.
    unsafe { what.run::<E, C, Portable>() }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn of_parts<E: Elem<Acc = f32>, C: Elem<Acc = f32>, W: WithKernel>(isa: Isa, what: W) {
    // SAFETY: the caller's promise.
    unsafe { through_f32::<E, C, W>(isa, what) }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn of_bf16<C: Elem<Acc = f32>, W: WithKernel>(isa: Isa, what: W) {
    // SAFETY: the caller's promise.
    unsafe { through_f32::<bf16, C, W>(isa, what) }
}
