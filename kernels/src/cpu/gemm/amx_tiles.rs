//! The tile registers of AMX: setting them up and releasing them; and code that the micro-kernels
//! with tiles share.

use std::arch::asm;

/// Rows and columns of a micro-kernel's sums, two by two tiles.
pub const WIDTH: usize = 32;
/// Inner dimension of a step.
pub const STEP: usize = 32;
/// Steps that prefetch four rows each of the next tile to write.
pub const FETCHING: usize = WIDTH / 4;

/// The part of [`super::kernel::Kernel`] that does not depend on the element type.
macro_rules! of_tiles {
    () => {
        const MR: usize = $crate::cpu::gemm::amx_tiles::WIDTH;
        const NR: usize = $crate::cpu::gemm::amx_tiles::WIDTH;
        const KQ: usize = $crate::cpu::gemm::amx_tiles::STEP;

        fn leaves_other_rows(rows: usize) -> bool {
            rows == 16 || rows == $crate::cpu::gemm::amx_tiles::WIDTH
        }

        unsafe fn finish<C: Elem<Acc = f32>>(
            sums: *const f32,
            rows: usize,
            columns: usize,
            to: (*mut C, usize),
            scale: f32,
            add: (*const C, usize),
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                $crate::cpu::gemm::avx512bf16::finish_tile(sums, rows, columns, to, scale, add)
            }
        }

        unsafe fn enter() {
            // SAFETY: AMX is detected only with the operating system's permission.
            unsafe { $crate::cpu::gemm::amx_tiles::configure() }
        }

        unsafe fn leave() {
            // SAFETY: the caller's promise; no tile is in use.
            unsafe { $crate::cpu::gemm::amx_tiles::release() }
        }
    };
}
pub(super) use of_tiles;

/// Operand of LDTILECFG: palette 1, all eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config([u8; 64]);

const CONFIG: Config = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Config(bytes)
};

/// Sets up the thread's tiles.
///
/// # Safety
/// The machine has AMX, and the operating system gave its permission.
pub unsafe fn configure() {
    // SAFETY: the configuration is valid.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, preserves_flags)) }
}

/// Returns the tiles to their initial state, which makes context switches cheap again.
///
/// # Safety
/// The machine has AMX.
pub unsafe fn release() {
    // SAFETY: the tiles' contents are not used any more.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
}
