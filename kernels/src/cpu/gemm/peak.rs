//! Peak throughput of the instructions in matrix products: loops that only touch registers.
//!
//! No matrix product is faster on a core. A kernel's share of this peak says how much of the
//! machine it uses.

use candle_core::DType;

use crate::tensor::simd::Isa;

/// The multiply-add instructions of a dtype's kernels on an instruction set. f16, and bf16 without
/// dedicated instructions, are computed in f32; f32 and f16 on AMX in products of bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    isa: Isa,
    /// Instruction multiplications per multiplication of the dtype.
    each: usize,
}

impl Instruction {
    /// The instruction for products of `dtype` under `isa`; none for f64, which has no kernel of
    /// ours.
    pub fn of(dtype: DType, isa: Isa) -> Option<Self> {
        match (dtype, isa) {
            (DType::BF16, _) => Some(Self { isa, each: 1 }),
            (DType::F32, Isa::Amx) => Some(Self { isa, each: 6 }),
            (DType::F16, Isa::Amx) => Some(Self { isa, each: 4 }),
            (DType::F32 | DType::F16, _) => Some(Self { isa: isa.min(Isa::Avx512), each: 1 }),
            _ => None,
        }
    }

    /// Every instruction of this machine, with its operand type.
    pub fn all() -> impl Iterator<Item = (DType, Self)> {
        let own = |isa: Isa| if isa > Isa::Avx512 { DType::BF16 } else { DType::F32 };
        let each = Isa::ALL.into_iter().map(move |isa| (own(isa), Self { isa, each: 1 }));
        let of_parts = [DType::F32, DType::F16]
            .into_iter()
            .filter_map(|dtype| Some((dtype, Self::of(dtype, Isa::Amx)?)));
        each.chain(of_parts).filter(|(_, instruction)| instruction.isa <= Isa::supported())
    }

    /// The instruction set, and the number of its products per multiplication if that is not 1.
    pub fn name(self) -> String {
        match self.each {
            1 => self.isa.name().to_string(),
            each => format!("{}, {each} products of bf16 for one", self.isa.name()),
        }
    }

    /// Runs `rounds` rounds, some ten nanoseconds each, and returns the floating-point operations.
    ///
    /// # Panics
    /// If the machine does not have the instruction.
    pub fn run(self, rounds: usize) -> f64 {
        assert!(self.isa <= Isa::supported(), "this machine has no {}", self.isa.name());
        let rounds = rounds.max(1);
        // SAFETY: the machine has the instructions.
        #[cfg(target_arch = "x86_64")]
        let flops = unsafe {
            match self.isa {
                Isa::Portable => portable(rounds),
                Isa::Avx2 => x86::avx2(rounds),
                Isa::Avx512 => x86::avx512(rounds),
                Isa::Avx512Bf16 => x86::avx512bf16(rounds),
                Isa::Amx => x86::amx(rounds),
            }
        };
        #[cfg(not(target_arch = "x86_64"))]
        let flops = portable(rounds);
        flops as f64 * rounds as f64 / self.each as f64
    }
}

/// The portable kernel's loop, with operands that stay in registers.
fn portable(rounds: usize) -> usize {
    const SUMS: usize = 8;
    let mut sums = [[0f32; 8]; SUMS];
    let (a, b) = std::hint::black_box(([1.0f32; 8], [0.5f32; 8]));
    for _ in 0..rounds {
        for sum in &mut sums {
            for lane in 0..8 {
                sum[lane] = super::portable::multiply_add(a[lane], b[lane], sum[lane]);
            }
        }
    }
    std::hint::black_box(sums);
    2 * 8 * SUMS
}

/// Each function returns the operations of one round: twelve independent sums, more than the
/// pipeline holds at a time.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    use super::super::amx::Amx;
    use super::super::kernel::Kernel;

    macro_rules! twelve_sums {
        ($rounds:expr, $instruction:literal, $register:literal) => {
            asm!(
                "vzeroall",
                "2:",
                concat!($instruction, " ", $register, "0, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "1, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "2, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "3, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "4, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "5, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "6, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "7, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "8, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "9, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "10, ", $register, "12, ", $register, "13"),
                concat!($instruction, " ", $register, "11, ", $register, "12, ", $register, "13"),
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) $rounds => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack),
            )
        };
    }

    pub unsafe fn avx2(rounds: usize) -> usize {
        // SAFETY: the machine has the instruction.
        unsafe { twelve_sums!(rounds, "vfmadd231ps", "ymm") };
        12 * 8 * 2
    }

    pub unsafe fn avx512(rounds: usize) -> usize {
        // SAFETY: the machine has the instruction.
        unsafe { twelve_sums!(rounds, "vfmadd231ps", "zmm") };
        12 * 16 * 2
    }

    pub unsafe fn avx512bf16(rounds: usize) -> usize {
        // SAFETY: the machine has the instruction.
        unsafe { twelve_sums!(rounds, "vdpbf16ps", "zmm") };
        12 * 16 * 2 * 2
    }

    /// Two by two tiles, as in the kernel, without loads.
    pub unsafe fn amx(rounds: usize) -> usize {
        // SAFETY: the machine has the instructions; the tiles are configured first.
        unsafe {
            Amx::enter();
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
            Amx::leave();
        }
        4 * 16 * 16 * 32 * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_of_the_machine_runs_and_more_rounds_are_more_operations() {
        for (dtype, instruction) in Instruction::all() {
            let (once, thrice) = (instruction.run(1), instruction.run(3));
            assert!(once > 0.0 && (thrice / once - 3.0).abs() < 1e-9, "{instruction:?}");
            assert_eq!(Instruction::of(dtype, instruction.isa), Some(instruction));
        }
    }

    #[test]
    fn what_has_no_instructions_of_its_own_is_computed_in_f32_or_in_parts() {
        let of = |dtype, isa| Instruction::of(dtype, isa).map(|i| (i.isa, i.each));
        assert_eq!(of(DType::F16, Isa::Avx512Bf16), Some((Isa::Avx512, 1)));
        assert_eq!(of(DType::F32, Isa::Avx2), Some((Isa::Avx2, 1)));
        assert_eq!(of(DType::BF16, Isa::Avx2), Some((Isa::Avx2, 1)));
        assert_eq!(of(DType::F32, Isa::Amx), Some((Isa::Amx, 6)));
        assert_eq!(of(DType::F16, Isa::Amx), Some((Isa::Amx, 4)));
        assert_eq!(Instruction::of(DType::F64, Isa::Amx), None);
    }
}
