//! Micro-kernel of AVX-512: 14 × 32, 28 sums, two vectors of B and a broadcast element of A in 32 registers.

use std::arch::x86_64::*;

use candle_core::DType;
use half::{bf16, f16};

use super::Mat;
use super::kernel::{Ahead, Blocking, Kernel, Strip};
use super::lanes::{Lanes, first, transpose, transposed};
use crate::float::Elem;

pub(super) const MR: usize = 14;
pub(super) const NR: usize = 32;

pub struct Avx512;

/// Calls `$tile::<ROWS>` for `$rows` rows.
macro_rules! by_rows {
    ($rows:expr, $tile:ident $args:tt) => {
        match $rows {
            1 => $tile::<1> $args,
            2 => $tile::<2> $args,
            3 => $tile::<3> $args,
            4 => $tile::<4> $args,
            5 => $tile::<5> $args,
            6 => $tile::<6> $args,
            7 => $tile::<7> $args,
            8 => $tile::<8> $args,
            9 => $tile::<9> $args,
            10 => $tile::<10> $args,
            11 => $tile::<11> $args,
            12 => $tile::<12> $args,
            13 => $tile::<13> $args,
            _ => $tile::<14> $args,
        }
    };
}
pub(super) use by_rows;

impl<E: Lanes> Kernel<E> for Avx512 {
    type Packed = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    const KQ: usize = 1;
    const BLOCKING: Blocking = Blocking { kc: 384, mc: 252, nc: 512, whole: 0, alone: 4 << 20 };

    unsafe fn pack_a(a: Mat<*const E>, rows: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack::<E, MR>(a, rows, k, to) }
    }

    unsafe fn pack_b(b: Mat<*const E>, columns: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack::<E, NR>(b.t(), columns, k, to) }
    }

    // Rows that lie a multiple of 4 KiB apart fall into so few sets of the L1 cache that a strip does not stay there.
    fn reads_rows(Mat(_, row, column): Mat<*const E>) -> bool {
        E::DTYPE == DType::F32 && column == 1 && !(4 * row).is_multiple_of(4096)
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<E, f32>,
        panel: *const f32,
        from: (*const f32, usize),
        to: (*mut f32, usize),
        ahead: Ahead,
    ) {
        // SAFETY: the caller's promise; only f32 is read where it lies.
        unsafe {
            match strip {
                Strip::Packed(strip) => by_rows!(rows, packed_tile(k, strip, panel, from, to, ahead)),
                Strip::Rows(strip, row) => tile::<MR, _>(k, Rows(strip.cast(), row), panel, from, to, ahead),
            }
        }
    }

    fn leaves_other_rows(_: usize) -> bool {
        true
    }

    unsafe fn finish<C: Elem<Acc = f32>>(
        sums: *const f32,
        rows: usize,
        columns: usize,
        to: (*mut C, usize),
        scale: f32,
        add: bool,
    ) {
        // SAFETY: the caller's promise, and C is the type that its name says.
        unsafe {
            match C::DTYPE {
                DType::F32 => finish::<f32>(sums, rows, columns, (to.0.cast(), to.1), scale, add),
                DType::BF16 => finish::<bf16>(sums, rows, columns, (to.0.cast(), to.1), scale, add),
                _ => finish::<f16>(sums, rows, columns, (to.0.cast(), to.1), scale, add),
            }
        }
    }
}

#[inline(always)]
unsafe fn packed_tile<const ROWS: usize>(
    k: usize,
    strip: *const f32,
    panel: *const f32,
    from: (*const f32, usize),
    to: (*mut f32, usize),
    ahead: Ahead,
) {
    // SAFETY: the caller's promise.
    unsafe { tile::<ROWS, _>(k, Packed(strip), panel, from, to, ahead) }
}

/// What a strip is made of: packed, or rows in A.
trait Layout: Copy {
    /// Row `r` of the present column.
    fn row(self, r: usize) -> *const f32;
    fn next_column(self) -> Self;
}

#[derive(Clone, Copy)]
struct Packed(*const f32);

#[derive(Clone, Copy)]
struct Rows(*const f32, usize);

impl Layout for Packed {
    #[inline(always)]
    fn row(self, r: usize) -> *const f32 {
        self.0.wrapping_add(r)
    }

    #[inline(always)]
    fn next_column(self) -> Self {
        Self(self.0.wrapping_add(MR))
    }
}

impl Layout for Rows {
    #[inline(always)]
    fn row(self, r: usize) -> *const f32 {
        self.0.wrapping_add(r * self.1)
    }

    #[inline(always)]
    fn next_column(self) -> Self {
        Self(self.0.wrapping_add(1), self.1)
    }
}

/// As [`Kernel::tile`]. Between shares of the inner dimension, as many as there are rows, it asks for a row of what comes next.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const ROWS: usize, L: Layout>(
    k: usize,
    mut strip: L,
    mut panel: *const f32,
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
    Ahead { mut read, mut written }: Ahead,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    let (share, mut left) = (k / ROWS, k);
    // SAFETY: the caller's promise; fetching ahead is no access.
    unsafe {
        if !from.is_null() {
            for r in 0..ROWS {
                let from = from.add(r * from_stride);
                sums[r] = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
            }
        }
        for r in 0..ROWS {
            read.lines().into_iter().for_each(|line| _mm_prefetch::<_MM_HINT_T0>(line));
            written.lines().into_iter().for_each(|line| _mm_prefetch::<_MM_HINT_ET0>(line));
            let now = if r + 1 < ROWS { share } else { left };
            left -= now;
            for _ in 0..now {
                let b = [_mm512_loadu_ps(panel), _mm512_loadu_ps(panel.add(16))];
                for r in 0..ROWS {
                    let a = _mm512_set1_ps(*strip.row(r));
                    sums[r] = [_mm512_fmadd_ps(a, b[0], sums[r][0]), _mm512_fmadd_ps(a, b[1], sums[r][1])];
                }
                (strip, panel) = (strip.next_column(), panel.add(NR));
            }
        }
        for r in 0..ROWS {
            let to = to.add(r * to_stride);
            _mm512_storeu_ps(to, sums[r][0]);
            _mm512_storeu_ps(to.add(16), sums[r][1]);
        }
    }
}

/// As [`super::pack::pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack<E: Lanes, const R: usize>(m: Mat<*const E>, width: usize, k: usize, to: *mut f32) {
    let Mat(from, row, column) = m;
    // SAFETY: the caller's promise.
    unsafe {
        if column == 1 {
            for r in (0..R).step_by(16) {
                for i in (0..k).step_by(16) {
                    let lines = if E::DTYPE == DType::F32 && k - i >= 16 {
                        transposed(from.wrapping_add(r * row + i).cast(), 4 * row, width.saturating_sub(r))
                    } else {
                        let mut lines = [_mm512_setzero_si512(); 16];
                        for (l, line) in lines.iter_mut().enumerate().take(width.saturating_sub(r)) {
                            *line = _mm512_castps_si512(E::load16(from.add((r + l) * row + i), first(k - i)));
                        }
                        transpose(lines)
                    };
                    for (l, &line) in lines.iter().enumerate().take(k - i) {
                        _mm512_mask_storeu_epi32(to.add((i + l) * R + r).cast(), first(R - r), line);
                    }
                }
            }
        } else if row == 1 {
            for i in 0..k {
                for r in (0..R).step_by(16) {
                    let line = E::load16(from.wrapping_add(i * column + r), first(width.saturating_sub(r)));
                    _mm512_mask_storeu_ps(to.add(i * R + r), first(R - r), line);
                }
            }
        } else {
            super::pack::pack::<E, R>(m, width, k, to);
        }
    }
}

/// As [`Kernel::finish`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn finish<C: Lanes>(
    sums: *const f32,
    rows: usize,
    columns: usize,
    (to, stride): (*mut C, usize),
    scale: f32,
    add: bool,
) {
    let scale = _mm512_set1_ps(scale);
    for r in 0..rows {
        for c in (0..columns).step_by(16) {
            let mask = first(columns - c);
            // SAFETY: the caller's promise; masked lanes are not touched.
            unsafe {
                let to = to.add(r * stride + c);
                let sum = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(mask, sums.add(r * NR + c)));
                let sum = if add { _mm512_add_ps(C::load16(to, mask), sum) } else { sum };
                C::store16(to, mask, sum);
            }
        }
    }
}
