//! The micro-kernel that AVX-512 and AVX-512 BF16 share: 14 × 32, with 28 sums, two vectors of B
//! and a broadcast word of A in 32 registers.
//!
//! A word is the factor of one lane of B: an f32, or a pair of bf16 along the inner dimension.

use std::arch::x86_64::*;

use super::lanes::Lanes;
pub use super::layout::{Layout, Packed, Rows};

pub const MR: usize = 14;
pub const NR: usize = 32;

/// Calls `$tile::<ROWS, $e, $word>` for `$rows` rows.
macro_rules! by_rows {
    ($rows:expr, $e:ty, $word:ty, $tile:ident $args:tt) => {
        match $rows {
            1 => $tile::<1, $e, $word> $args,
            2 => $tile::<2, $e, $word> $args,
            3 => $tile::<3, $e, $word> $args,
            4 => $tile::<4, $e, $word> $args,
            5 => $tile::<5, $e, $word> $args,
            6 => $tile::<6, $e, $word> $args,
            7 => $tile::<7, $e, $word> $args,
            8 => $tile::<8, $e, $word> $args,
            9 => $tile::<9, $e, $word> $args,
            10 => $tile::<10, $e, $word> $args,
            11 => $tile::<11, $e, $word> $args,
            12 => $tile::<12, $e, $word> $args,
            13 => $tile::<13, $e, $word> $args,
            _ => $tile::<14, $e, $word> $args,
        }
    };
}
pub(super) use by_rows;

/// [`super::kernel::Kernel::tile`] for any kind of strip and interleaved work. `$word` makes words
/// of `$e`.
macro_rules! any_tile {
    ($rows:expr, $strip:expr, $interleaved:expr, $e:ty, $word:ty, ($words:expr, $panel:expr, $from:expr, $to:expr, $ahead:expr)) => {{
        let (words, panel, from, to, ahead) = ($words, $panel, $from, $to, $ahead);
        match ($strip, $interleaved) {
            (Strip::Rows(strip, row), Some(Interleaved::Fetch(next, rows))) => {
                let strip = Rows(strip.cast(), row * size_of::<$e>());
                tile::<MR, $e, $word, _, _>(words, strip, panel, from, to, ahead, Fetch(next, rows));
            }
            (Strip::Rows(strip, row), _) => {
                let strip = Rows(strip.cast(), row * size_of::<$e>());
                tile::<MR, $e, $word, _, _>(words, strip, panel, from, to, ahead, Idle);
            }
            (Strip::Packed(strip), Some(Interleaved::Pack(pack))) if $rows == MR => {
                let strip = Packed::<MR>(strip.cast());
                if PackBySteps::<$e, $word, NR>::fits(&pack, words) {
                    if pack.is_panel {
                        let work = PackBySteps::<$e, $word, NR>::new(pack);
                        tile::<MR, $e, $word, _, _>(words, strip, panel, from, to, ahead, work);
                    } else {
                        let work = PackBySteps::<$e, $word, MR>::new(pack);
                        tile::<MR, $e, $word, _, _>(words, strip, panel, from, to, ahead, work);
                    }
                } else if pack.is_panel {
                    let work = PackByShares::<$e, $word, NR>::new(pack, MR);
                    tile::<MR, $e, $word, _, _>(words, strip, panel, from, to, ahead, work);
                } else {
                    let work = PackByShares::<$e, $word, MR>::new(pack, MR);
                    tile::<MR, $e, $word, _, _>(words, strip, panel, from, to, ahead, work);
                }
            }
            (Strip::Packed(strip), interleaved) => {
                if let Some(Interleaved::Pack(pack)) = interleaved {
                    if pack.is_panel {
                        at_once(PackByShares::<$e, $word, NR>::new(pack, 1));
                    } else {
                        at_once(PackByShares::<$e, $word, MR>::new(pack, 1));
                    }
                }
                by_rows!($rows, $e, $word, packed_tile(words, strip.cast(), panel, from, to, ahead));
            }
        }
    }};
}
pub(super) use any_tile;

/// Makes sixteen words from rows of memory of `E`.
pub trait Word<E> {
    /// Rows of memory per word.
    const ROWS: usize;

    /// Words of the row at `from` and, if `ROWS` is 2, the row `row` elements after it; 0 where
    /// `mask` does not select.
    ///
    /// # Safety
    /// The machine has the kernel's instruction set; the elements that `mask` selects can be read.
    unsafe fn words(from: *const E, row: usize, mask: u16) -> __m512i;

    /// Words along up to sixteen `lines` of memory, which lie `line` elements apart and have
    /// `elements` elements left. Register i of the result holds the i-th word of every line, and 0
    /// for missing lines and elements.
    ///
    /// # Safety
    /// As [`Word::words`], for those elements.
    unsafe fn along(from: *const E, line: usize, lines: usize, elements: usize) -> [__m512i; 16];

    /// `sum + a · b`, as tiles multiply and add words.
    ///
    /// # Safety
    /// The machine has the kernel's instruction set.
    unsafe fn multiply(sum: __m512, a: __m512, b: __m512) -> __m512;

    /// Writes thirty-two elements, rounded.
    ///
    /// # Safety
    /// The machine has the kernel's instruction set; the elements can be written.
    #[inline(always)]
    unsafe fn store(to: *mut E, [low, high]: [__m512; 2])
    where
        E: Lanes,
    {
        // SAFETY: the caller's promise.
        unsafe {
            E::store16(to, u16::MAX, low);
            E::store16(to.add(16), u16::MAX, high);
        }
    }
}

/// Defines `tile` and `packed_tile`: [`super::kernel::Kernel::tile`] of `words` words, which `M`
/// multiplies, adds and rounds. The inner dimension is divided into as many shares as there are
/// rows. Between shares, the tile prefetches a row of the data needed next and does a share of
/// `work`; after each word it does a step of `work`.
macro_rules! tiles {
    ($features:literal) => {
        #[inline(always)]
        unsafe fn packed_tile<const ROWS: usize, E: Lanes, M: Word<E>>(
            words: usize,
            strip: *const f32,
            panel: *const f32,
            from: (*const f32, usize),
            to: To<E>,
            ahead: Ahead,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                tile::<ROWS, E, M, _, _>(words, Packed::<MR>(strip), panel, from, to, ahead, Idle)
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn at_once<W: Work>(mut work: W) {
            // SAFETY: the caller's promise.
            unsafe { work.share() }
        }

        #[target_feature(enable = $features)]
        unsafe fn tile<const ROWS: usize, E: Lanes, M: Word<E>, L: Layout, W: Work>(
            words: usize,
            mut strip: L,
            mut panel: *const f32,
            (from, from_stride): (*const f32, usize),
            to: To<E>,
            Ahead { mut read, mut added, mut written }: Ahead,
            mut work: W,
        ) {
            let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
            let (share, mut left) = (words / ROWS, words);
            // SAFETY: the caller's promise; a prefetch is no access.
            unsafe {
                if !from.is_null() {
                    for r in 0..ROWS {
                        let from = from.add(r * from_stride);
                        sums[r] = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
                    }
                }
                for r in 0..ROWS {
                    read.lines().into_iter().for_each(crate::tensor::simd::prefetch);
                    added.lines().into_iter().for_each(crate::tensor::simd::prefetch);
                    written.lines().into_iter().for_each(|line| _mm_prefetch::<_MM_HINT_ET0>(line));
                    // Lines prefetched two tiles ago have left L1 since, and stores wait for each
                    // other.
                    if 2 * r >= ROWS {
                        [2 * r - ROWS, 2 * r + 1 - ROWS]
                            .into_iter()
                            .for_each(|near| to.ask_for_row(near, NR));
                    }
                    work.share();
                    let now = if r + 1 < ROWS { share } else { left };
                    left -= now;
                    for _ in 0..now {
                        let b = [_mm512_loadu_ps(panel), _mm512_loadu_ps(panel.add(16))];
                        for r in 0..ROWS {
                            // Rows of pairs may be unaligned.
                            let a = _mm512_set1_ps(strip.row(r).read_unaligned());
                            sums[r] = [
                                M::multiply(sums[r][0], a, b[0]),
                                M::multiply(sums[r][1], a, b[1]),
                            ];
                        }
                        (strip, panel) = (strip.next(), panel.add(NR));
                        work.step();
                    }
                }
                match to {
                    To::Sums(to, stride) => {
                        for r in 0..ROWS {
                            let to = to.add(r * stride);
                            _mm512_storeu_ps(to, sums[r][0]);
                            _mm512_storeu_ps(to.add(16), sums[r][1]);
                        }
                    }
                    To::Rounded { to, stride, add, add_stride } => {
                        // Goes through memory: the compiler does not unroll a loop around long
                        // roundings, and would otherwise keep the sums in memory all the time.
                        let mut rows = [[0.0f32; NR]; ROWS];
                        for r in 0..ROWS {
                            _mm512_storeu_ps(rows[r].as_mut_ptr(), sums[r][0]);
                            _mm512_storeu_ps(rows[r].as_mut_ptr().add(16), sums[r][1]);
                        }
                        for (r, row) in rows.iter().enumerate() {
                            let mut row = [
                                _mm512_loadu_ps(row.as_ptr()),
                                _mm512_loadu_ps(row.as_ptr().add(16)),
                            ];
                            if !add.is_null() {
                                let add = add.add(r * add_stride);
                                row[0] = _mm512_add_ps(E::load16(add, u16::MAX), row[0]);
                                row[1] = _mm512_add_ps(E::load16(add.add(16), u16::MAX), row[1]);
                            }
                            M::store(to.add(r * stride), row);
                        }
                    }
                }
            }
        }
    };
}
pub(super) use tiles;

/// Defines `skinny`: [`super::kernel::Kernel::skinny`] of columns from which `W` makes words. Sums
/// of sixteen columns, sixteen words of these columns and a broadcast word of A are in registers.
macro_rules! skinny {
    ($features:literal) => {
        #[inline(always)]
        unsafe fn skinny<E, W: Word<E>>(
            rows: usize,
            columns: usize,
            k: usize,
            a: Rows,
            (b, column): (*const E, usize),
            sums: *mut f32,
        ) {
            for c in (0..columns).step_by(16) {
                let b = (b.wrapping_add(c * column), column, columns - c);
                // SAFETY: the caller's promise.
                unsafe {
                    let sums = sums.add(c);
                    match rows {
                        1 => thin_rows::<1, E, W>(k, a, b, sums),
                        2 => thin_rows::<2, E, W>(k, a, b, sums),
                        3 => thin_rows::<3, E, W>(k, a, b, sums),
                        4 => thin_rows::<4, E, W>(k, a, b, sums),
                        5 => thin_rows::<5, E, W>(k, a, b, sums),
                        6 => thin_rows::<6, E, W>(k, a, b, sums),
                        7 => thin_rows::<7, E, W>(k, a, b, sums),
                        _ => thin_rows::<8, E, W>(k, a, b, sums),
                    }
                }
            }
        }

        /// Up to sixteen columns. Prefetches the memory after them, line by line.
        #[target_feature(enable = $features)]
        unsafe fn thin_rows<const ROWS: usize, E, W: Word<E>>(
            k: usize,
            mut a: Rows,
            (mut b, column, columns): (*const E, usize, usize),
            to: *mut f32,
        ) {
            let step = 16 * W::ROWS;
            let mut following = b.wrapping_add(16 * column).cast::<i8>();
            // SAFETY: the caller's promise; a prefetch is no access.
            unsafe {
                let mut sums: [__m512; ROWS] =
                    std::array::from_fn(|r| _mm512_loadu_ps(to.add(r * NR)));
                for i in (0..k).step_by(step) {
                    for _ in 0..16 * step * size_of::<E>() / LINE {
                        crate::tensor::simd::prefetch_l2(following);
                        following = following.wrapping_add(LINE);
                    }
                    let words = W::along(b, column, columns, k - i);
                    let mut multiply = |word: __m512i| {
                        for r in 0..ROWS {
                            let a = _mm512_set1_ps(a.row(r).read_unaligned());
                            sums[r] = W::multiply(sums[r], a, _mm512_castsi512_ps(word));
                        }
                        a = a.next();
                    };
                    if k - i >= step {
                        words.into_iter().for_each(&mut multiply);
                    } else {
                        words.into_iter().take((k - i).div_ceil(W::ROWS)).for_each(&mut multiply);
                    }
                    b = b.wrapping_add(step);
                }
                for r in 0..ROWS {
                    _mm512_storeu_ps(to.add(r * NR), sums[r]);
                }
            }
        }
    };
}
pub(super) use skinny;
