//! Micro-kernel for AVX2 and FMA: 6 × 16, twelve sums in sixteen registers.

use std::arch::x86_64::*;

use candle_core::DType;

use super::interleave::{Fetch, Idle, Work};
use super::kernel::{Ahead, Blocking, InPlace, Interleaved, Kernel, Skinny, Strip, To};
use super::layout::{Layout, Packed, Rows, of_six};
use super::unpacked::Unpacked;
use super::{Mat, pack};
use crate::tensor::allocator::{LINE, rows_crowd};
use crate::tensor::element::Elem;
use crate::tensor::simd::prefetch;

const MR: usize = 6;
const NR: usize = 16;

/// Elements of a vector.
const LANES: usize = 8;

pub struct Avx2;

impl<E: Elem<Acc = f32>> Kernel<E> for Avx2 {
    type Packed = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    const KQ: usize = 1;

    fn blocking() -> Blocking {
        Blocking {
            kc: 384,
            once: 384,
            mc: 192,
            nc: 512,
            nc_alone: 512,
            panels_alone: true,
            in_place: InPlace::AHEAD,
            whole: 0,
            alone: 2 << 20,
        }
    }

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
        to: To<E>,
        ahead: Ahead,
        interleaved: Option<Interleaved<E, f32>>,
    ) {
        let (panel, to) = ((panel, NR), to.sums());
        // SAFETY: the caller's promise; only f32 is read unpacked.
        unsafe {
            match strip {
                Strip::Rows(at, row) => {
                    let strip = Rows(at.cast(), 4 * row);
                    match interleaved {
                        Some(Interleaved::Fetch(next, rows)) => {
                            tile::<MR, Rows, _>(
                                k,
                                strip,
                                panel,
                                from,
                                to,
                                Asking(ahead, Fetch(next, rows)),
                            );
                        }
                        _ => tile::<MR, Rows, _>(k, strip, panel, from, to, Asking(ahead, Idle)),
                    }
                }
                Strip::Packed(at) => {
                    of_six!(
                        rows,
                        tile,
                        (Packed<MR>, _),
                        (k, Packed(at), panel, from, to, Asking(ahead, Idle))
                    )
                }
            }
        }
    }

    fn reads_rows(Mat(_, row, column): Mat<*const E>) -> bool {
        E::DTYPE == DType::F32 && column == 1 && !rows_crowd(4 * row)
    }

    const INTERLEAVES: bool = true;

    fn leaves_other_rows(_: usize) -> bool {
        true
    }

    const THIN: Skinny = Skinny::InPlace;

    unsafe fn pack_row(a: Mat<*const E>, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { vector_pack::<E, 1>(a, 1, k, to) }
    }

    unsafe fn skinny(
        rows: usize,
        columns: usize,
        k: usize,
        a: (*const f32, usize),
        (b, column): (*const E, usize),
        sums: *mut f32,
    ) {
        for c in (0..columns).step_by(LANES) {
            let b = (b.wrapping_add(c * column), column, columns - c);
            // SAFETY: the caller's promise.
            unsafe {
                let sums = sums.add(c);
                of_six!(rows, thin_rows, (E), (k, a, b, sums));
            }
        }
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
        unsafe { vector_finish(sums, rows, columns, to, scale, add) }
    }
}

impl Unpacked for Avx2 {
    const MR: usize = MR;
    const NR: usize = NR;

    unsafe fn multiply(
        rows: usize,
        k: usize,
        a: Mat<*const f32>,
        b: (*const f32, usize),
        c: (*mut f32, usize),
        add: bool,
    ) {
        let from = if add { c.0.cast_const() } else { std::ptr::null() };
        // SAFETY: the caller's promise.
        unsafe { of_six!(rows, tile, (Mat<*const f32>, _), (k, a, b, (from, c.1), c, Idle)) }
    }
}

/// Prefetches the data that is needed next, and does the interleaved work.
struct Asking<W>(Ahead, W);

impl<W: Work> Work for Asking<W> {
    #[inline(always)]
    unsafe fn share(&mut self) {
        let Self(Ahead { written, read, .. }, work) = self;
        read.lines().into_iter().for_each(prefetch);
        written.lines().into_iter().for_each(prefetch);
        // SAFETY: the caller's promise.
        unsafe { work.share() };
    }
}

/// `to [ROWS, NR] = strip · panel`, plus `from` unless that is null. Everything except the strip
/// comes with its row stride. Does a share of `work` for every row.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const ROWS: usize, L: Layout, W: Work>(
    k: usize,
    mut strip: L,
    (mut panel, panel_row): (*const f32, usize),
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
    mut work: W,
) {
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    let (shares, mut left) = (if W::IS_NOTHING { 1 } else { ROWS }, k);
    // SAFETY: the caller's promise.
    unsafe {
        if !from.is_null() {
            for r in 0..ROWS {
                let from = from.add(r * from_stride);
                sums[r] = [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))];
            }
        }
        for share in 0..shares {
            work.share();
            let now = if share + 1 < shares { k / shares } else { left };
            left -= now;
            for _ in 0..now {
                let b = [_mm256_loadu_ps(panel), _mm256_loadu_ps(panel.add(8))];
                for r in 0..ROWS {
                    let a = _mm256_broadcast_ss(&*strip.row(r));
                    sums[r] = [
                        _mm256_fmadd_ps(a, b[0], sums[r][0]),
                        _mm256_fmadd_ps(a, b[1], sums[r][1]),
                    ];
                }
                (strip, panel) = (strip.next(), panel.wrapping_add(panel_row));
            }
        }
        for r in 0..ROWS {
            let to = to.add(r * to_stride);
            _mm256_storeu_ps(to, sums[r][0]);
            _mm256_storeu_ps(to.add(8), sums[r][1]);
        }
    }
}

/// [`Kernel::skinny`] of up to eight columns. Prefetches the memory after them, line by line.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn thin_rows<const ROWS: usize, E: Elem<Acc = f32>>(
    k: usize,
    (a, a_row): (*const f32, usize),
    (b, column, columns): (*const E, usize, usize),
    to: *mut f32,
) {
    let mut following = b.wrapping_add(LANES * column).cast::<i8>();
    // SAFETY: the caller's promise; a prefetch is no access.
    unsafe {
        let mut sums: [__m256; ROWS] = std::array::from_fn(|r| _mm256_loadu_ps(to.add(r * NR)));
        for i in (0..k).step_by(LANES) {
            for _ in 0..LANES * LANES * size_of::<E>() / LINE {
                crate::tensor::simd::prefetch_l2(following);
                following = following.wrapping_add(LINE);
            }
            let mut a = a.add(i);
            let mut multiply = |b: __m256| {
                for r in 0..ROWS {
                    sums[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(&*a.add(r * a_row)), b, sums[r]);
                }
                a = a.add(1);
            };
            let lines = along(b.add(i), column, columns, k - i);
            if k - i >= LANES {
                lines.into_iter().for_each(&mut multiply);
            } else {
                lines.into_iter().take(k - i).for_each(&mut multiply);
            }
        }
        for r in 0..ROWS {
            _mm256_storeu_ps(to.add(r * NR), sums[r]);
        }
    }
}

/// Eight elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<E: Elem<Acc = f32>>(from: *const E) -> __m256 {
    // SAFETY: the caller's promise, and E is the type of its DTYPE.
    unsafe {
        match E::DTYPE {
            DType::F32 => _mm256_loadu_ps(from.cast()),
            DType::BF16 => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
            _ => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        }
    }
}

/// Eight elements along each of up to eight `lines` of memory, which lie `line` elements apart and
/// have `elements` elements left. Vector i of the result holds the i-th element of every line, and
/// 0 for missing lines and elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn along<E: Elem<Acc = f32>>(
    from: *const E,
    line: usize,
    lines: usize,
    elements: usize,
) -> [__m256; LANES] {
    let mut x = [_mm256_setzero_ps(); LANES];
    for (l, x) in x.iter_mut().enumerate().take(lines) {
        let from = from.wrapping_add(l * line);
        // SAFETY: the caller's promise.
        unsafe {
            *x = if elements >= LANES {
                load(from)
            } else {
                let mut left = [E::store(0.0); LANES];
                left[..elements].copy_from_slice(std::slice::from_raw_parts(from, elements));
                load(left.as_ptr())
            };
        }
    }
    // First pairs, then fours within halves of vectors, then the halves. (Loops: closures within
    // `from_fn` became calls, because that function lacks their instruction set.)
    let mut pairs = x;
    for i in (0..LANES).step_by(2) {
        (pairs[i], pairs[i + 1]) =
            (_mm256_unpacklo_ps(x[i], x[i + 1]), _mm256_unpackhi_ps(x[i], x[i + 1]));
    }
    let mut fours = pairs;
    for i in (0..LANES).step_by(4) {
        for half in 0..2 {
            let (low, high) = (pairs[i + half], pairs[i + half + 2]);
            fours[i + 2 * half] = _mm256_shuffle_ps::<0x44>(low, high);
            fours[i + 2 * half + 1] = _mm256_shuffle_ps::<0xee>(low, high);
        }
    }
    let mut lines = fours;
    for i in 0..4 {
        lines[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[4 + i]);
        lines[4 + i] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[4 + i]);
    }
    lines
}

/// As [`pack::pack`]; operands that are contiguous along the inner dimension are transposed in
/// registers.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn vector_pack<E: Elem<Acc = f32>, const R: usize>(
    m: Mat<*const E>,
    width: usize,
    k: usize,
    to: *mut f32,
) {
    let Mat(from, row, column) = m;
    // SAFETY: the caller's promise.
    unsafe {
        if column != 1 {
            return pack::pack::<E, R>(m, width, k, to);
        }
        for r in (0..R).step_by(LANES) {
            for i in (0..k).step_by(LANES) {
                let lines =
                    along(from.wrapping_add(r * row + i), row, width.saturating_sub(r), k - i);
                for (l, &line) in lines.iter().enumerate().take(k - i) {
                    let to = to.add((i + l) * R + r);
                    if R - r >= LANES {
                        _mm256_storeu_ps(to, line);
                    } else {
                        _mm256_maskstore_ps(to, first(R - r), line);
                    }
                }
            }
        }
    }
}

/// Mask of the lowest `n` ≤ 8 of eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn first(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
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
