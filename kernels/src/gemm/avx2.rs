//! Micro-kernel of AVX2 and FMA: 6 × 16, twelve sums in sixteen registers.

use std::arch::x86_64::{_mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps};

use super::kernel::{Ahead, Blocking, Chore, Kernel, Strip, Thin, packed};
use super::{Mat, pack};
use crate::float::Elem;

const MR: usize = 6;
const NR: usize = 16;

pub struct Avx2;

impl<E: Elem<Acc = f32>> Kernel<E> for Avx2 {
    type Packed = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    const KQ: usize = 1;
    const BLOCKING: Blocking =
        Blocking { kc: 256, once: 256, mc: 192, nc: 512, nc_alone: 512, panels_alone: false, whole: 0, alone: 2 << 20 };

    unsafe fn pack_a(a: Mat<*const E>, rows: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { vector_pack::<E, MR>(a, rows, k, to) }
    }

    unsafe fn pack_b(b: Mat<*const E>, columns: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { vector_pack::<E, NR>(b.t(), columns, k, to) }
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<E, f32>,
        panel: *const f32,
        from: (*const f32, usize),
        to: (*mut f32, usize),
        _: Ahead,
        _: Option<Chore<E, f32>>,
    ) {
        let strip = packed(strip);
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                1 => tile::<1>(k, strip, panel, from, to),
                2 => tile::<2>(k, strip, panel, from, to),
                3 => tile::<3>(k, strip, panel, from, to),
                4 => tile::<4>(k, strip, panel, from, to),
                5 => tile::<5>(k, strip, panel, from, to),
                _ => tile::<MR>(k, strip, panel, from, to),
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
        unsafe { vector_finish(sums, rows, columns, to, scale, add) }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const ROWS: usize>(
    k: usize,
    mut strip: *const f32,
    mut panel: *const f32,
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
) {
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    // SAFETY: the caller's promise.
    unsafe {
        if !from.is_null() {
            for r in 0..ROWS {
                let from = from.add(r * from_stride);
                sums[r] = [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))];
            }
        }
        for _ in 0..k {
            let b = [_mm256_loadu_ps(panel), _mm256_loadu_ps(panel.add(8))];
            for r in 0..ROWS {
                let a = _mm256_broadcast_ss(&*strip.add(r));
                sums[r] = [_mm256_fmadd_ps(a, b[0], sums[r][0]), _mm256_fmadd_ps(a, b[1], sums[r][1])];
            }
            (strip, panel) = (strip.add(MR), panel.add(NR));
        }
        for r in 0..ROWS {
            let to = to.add(r * to_stride);
            _mm256_storeu_ps(to, sums[r][0]);
            _mm256_storeu_ps(to.add(8), sums[r][1]);
        }
    }
}

#[target_feature(enable = "avx2")]
unsafe fn vector_pack<E: Elem<Acc = f32>, const R: usize>(m: Mat<*const E>, width: usize, k: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { pack::pack::<E, R>(m, width, k, to) }
}

#[target_feature(enable = "avx2")]
unsafe fn vector_finish<C: Elem<Acc = f32>>(
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
