//! One portable source for every vector width.
//!
//! Kernels are plain Rust that LLVM vectorizes. [`vectorize`] compiles its closure once per
//! instruction set and picks one at run time. All paths give the same bits, and so do the vector
//! body and the remainder of a loop. This holds for three reasons: the compiler never contracts a
//! product and a sum into a fused operation; fused operations are written as `mul_add`; sums run
//! over fixed lanes.

use std::sync::OnceLock;

use crate::tensor::allocator::LINE;

/// The environment variable that lowers the instruction set.
const VARIABLE: &str = "MEGATRON_SIMD";

/// Instruction sets that kernels are written for; each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Features that the compiler's target always has: SSE2, or NEON on aarch64.
    Portable,
    /// AVX2, FMA and F16C (x86-64-v3).
    Avx2,
    /// AVX-512 F, BW, DQ and VL (x86-64-v4).
    Avx512,
    /// AVX-512 BF16: products of pairs of bf16.
    Avx512Bf16,
    /// AMX tiles of bf16, with the operating system's permission.
    Amx,
}

impl Isa {
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The name in `MEGATRON_SIMD`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }

    /// The largest set that this machine has and benefits from.
    pub fn supported() -> Isa {
        static SUPPORTED: OnceLock<Isa> = OnceLock::new();
        *SUPPORTED.get_or_init(machine)
    }

    /// The set that kernels use: the one that `MEGATRON_SIMD` names (for tests and diagnosis), else
    /// the largest. Read once. A value that [`Isa::requested`] refuses is ignored.
    pub fn detected() -> Isa {
        static DETECTED: OnceLock<Isa> = OnceLock::new();
        *DETECTED.get_or_init(|| Isa::requested().ok().flatten().unwrap_or_else(Isa::supported))
    }

    /// The set that `MEGATRON_SIMD` asks for.
    ///
    /// # Errors
    /// A message for the user if it names no instruction set, or one that this machine does not
    /// have.
    pub fn requested() -> std::result::Result<Option<Isa>, String> {
        let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        Isa::parse(&value.to_string_lossy(), Isa::supported()).map(Some)
    }

    fn parse(value: &str, supported: Isa) -> std::result::Result<Isa, String> {
        let names = |last: Isa| {
            Isa::ALL.iter().filter(|&&i| i <= last).map(|i| i.name()).collect::<Vec<_>>().join(", ")
        };
        match Isa::ALL.into_iter().find(|isa| isa.name() == value) {
            None => Err(format!(
                "{VARIABLE}={value} names no instruction set; there are {}",
                names(Isa::Amx)
            )),
            Some(isa) if isa > supported => Err(format!(
                "{VARIABLE}={value} is more than kernels can use on this machine: {}",
                names(supported)
            )),
            Some(isa) => Ok(isa),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn machine() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if !avx2 {
        Isa::Portable
    } else if !avx512 {
        Isa::Avx2
    } else if is_x86_feature_detected!("avx512bf16") && amx_permitted() {
        Isa::Amx
    } else if is_x86_feature_detected!("avx512bf16") && !is_intel() {
        Isa::Avx512Bf16
    } else {
        Isa::Avx512
    }
}

/// Whether the processor is made by Intel. VDPBF16PS on Intel multiplies no faster than FMA of f32
/// (on Sapphire and Emerald Rapids half as fast); on AMD it is twice as fast.
#[cfg(target_arch = "x86_64")]
pub fn is_intel() -> bool {
    // Asked once, because in a virtual machine CPUID traps to the hypervisor.
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx]
            == [*b"Genu", *b"ineI", *b"ntel"].map(u32::from_le_bytes)
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn machine() -> Isa {
    Isa::Portable
}

/// Whether the processor has AMX tiles of bf16, and Linux lets this process use their registers.
/// Asks Linux for the permission, for all threads (Linux, Documentation/arch/x86/xstate.rst).
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_permitted() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    let wanted = AMX_BF16 | AMX_TILE;
    if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & wanted != wanted {
        return false;
    }
    // SAFETY: this asks the kernel for a permission; an older kernel answers with an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_permitted() -> bool {
    false
}

/// Independent partial sums of a reduction: one AVX-512 register of f32.
pub const LANES: usize = 16;

/// Prefetch distance of loops over memory, in bytes.
pub const AHEAD: usize = 2048;

/// Prefetches the cache line at `address`, which may be any address. Does nothing on machines
/// without such an instruction.
#[inline(always)]
pub fn prefetch<T>(address: *const T) {
    ask::<true, T>(address);
}

/// As [`prefetch`], into L2 only: more of these lines can be in flight.
#[inline(always)]
pub fn prefetch_l2<T>(address: *const T) {
    ask::<false, T>(address);
}

#[inline(always)]
fn ask<const INTO_L1: bool, T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is no access, and every x86-64 has the instruction.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        if INTO_L1 {
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T1>(address.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches as many bytes as `part` has, [`AHEAD`] bytes after `part`. Does nothing for more than
/// a page: that would fill the load queues, and hardware prefetchers recognize such long runs.
#[inline(always)]
pub fn prefetch_ahead<T>(part: &[T]) {
    const PAGE: usize = 4096;
    let first = part.as_ptr().wrapping_byte_add(AHEAD);
    if size_of_val(part) <= PAGE {
        (0..size_of_val(part)).step_by(LINE).for_each(|at| prefetch(first.wrapping_byte_add(at)));
    }
}

/// Runs `f` compiled for the widest vectors of this machine.
///
/// Only functions that are inlined into `f` profit; pass `#[inline(always)] || …`.
#[inline]
pub fn vectorize<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        let isa = Isa::detected();
        if isa >= Isa::Avx512 {
            // SAFETY: the features were detected.
            return unsafe { with_avx512(f) };
        }
        if isa >= Isa::Avx2 {
            // SAFETY: the feature was detected.
            return unsafe { with_avx2(f) };
        }
    }
    f()
}

/// # Safety
/// The machine must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// # Safety
/// The machine must have the feature.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(test)]
mod tests {
    use super::Isa;

    #[test]
    fn an_instruction_set_is_chosen_by_its_name() {
        for isa in Isa::ALL {
            assert_eq!(Isa::parse(isa.name(), Isa::Amx), Ok(isa));
        }
    }

    #[test]
    fn an_instruction_set_that_is_unknown_or_missing_is_refused_with_those_there_are() {
        let unknown = Isa::parse("sse9", Isa::Avx2).unwrap_err();
        assert!(
            unknown.contains("MEGATRON_SIMD=sse9") && unknown.contains("portable, avx2, avx512"),
            "{unknown}"
        );
        let missing = Isa::parse("amx", Isa::Avx2).unwrap_err();
        assert!(
            missing.contains("MEGATRON_SIMD=amx") && missing.ends_with("machine: portable, avx2"),
            "{missing}"
        );
    }
}
