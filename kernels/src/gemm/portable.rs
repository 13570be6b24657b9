//! Micro-kernel in plain Rust, which the compiler vectorizes for SSE2 or NEON.

use super::kernel::{Ahead, Blocking, Chore, Kernel, Strip, Thin, To, packed};
use super::{Mat, pack};
use crate::float::Elem;

const MR: usize = 6;
const NR: usize = 8;

pub struct Portable;

/// `a·b + c`, in one rounding where that is an instruction of the compiler's target.
#[inline(always)]
pub(super) fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

impl<E: Elem<Acc = f32>> Kernel<E> for Portable {
    type Packed = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    const KQ: usize = 1;

    fn blocking() -> Blocking {
        Blocking { kc: 256, once: 256, mc: 120, nc: 256, nc_alone: 256, panels_alone: false, whole: 0, alone: 1 << 20 }
    }

    unsafe fn pack_a(a: Mat<*const E>, rows: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack::pack::<E, MR>(a, rows, k, to) }
    }

    unsafe fn pack_b(b: Mat<*const E>, columns: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack::pack::<E, NR>(b.t(), columns, k, to) }
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<E, f32>,
        panel: *const f32,
        (from, from_stride): (*const f32, usize),
        to: To<E>,
        _: Ahead,
        _: Option<Chore<E, f32>>,
    ) {
        let (strip, (to, to_stride)) = (packed(strip), to.sums());
        let mut sums = [[0f32; NR]; MR];
        // SAFETY: the caller's promise.
        unsafe {
            if !from.is_null() {
                for r in 0..rows {
                    sums[r] = *from.add(r * from_stride).cast::<[f32; NR]>();
                }
            }
            for i in 0..k {
                let (a, b) = (*strip.add(i * MR).cast::<[f32; MR]>(), *panel.add(i * NR).cast::<[f32; NR]>());
                for r in 0..MR {
                    for c in 0..NR {
                        sums[r][c] = multiply_add(a[r], b[c], sums[r][c]);
                    }
                }
            }
            for r in 0..rows {
                *to.add(r * to_stride).cast::<[f32; NR]>() = sums[r];
            }
        }
    }

    fn leaves_other_rows(_: usize) -> bool {
        true
    }

    const THIN: Thin = Thin::ByPieces;

    unsafe fn finish<C: Elem<Acc = f32>>(
        sums: *const f32,
        rows: usize,
        columns: usize,
        to: (*mut C, usize),
        scale: f32,
        add: (*const C, usize),
    ) {
        // SAFETY: the caller's promise.
        unsafe { pack::finish::<C, NR>(sums, rows, columns, to, scale, add) }
    }
}
