//! The micro-kernel that AVX-512 and AVX-512 BF16 share: 14 × 32, 28 sums, two vectors of B and a broadcast word of A in 32 registers.
//!
//! A word is what a lane of B is multiplied with: an f32, or a pair of bf16 along the inner dimension.

pub const MR: usize = 14;
pub const NR: usize = 32;

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

/// What a strip is made of: packed words, or rows in A.
pub trait Layout: Copy {
    /// Row `r` of the present word.
    fn row(self, r: usize) -> *const f32;
    /// At the words behind these.
    fn next(self) -> Self;
}

/// Words of MR rows side by side.
#[derive(Clone, Copy)]
pub struct Packed(pub *const f32);

/// Rows of A where they lie, and their distance in bytes.
#[derive(Clone, Copy)]
pub struct Rows(pub *const f32, pub usize);

impl Layout for Packed {
    #[inline(always)]
    fn row(self, r: usize) -> *const f32 {
        self.0.wrapping_add(r)
    }

    #[inline(always)]
    fn next(self) -> Self {
        Self(self.0.wrapping_add(MR))
    }
}

impl Layout for Rows {
    #[inline(always)]
    fn row(self, r: usize) -> *const f32 {
        self.0.wrapping_byte_add(r * self.1)
    }

    #[inline(always)]
    fn next(self) -> Self {
        Self(self.0.wrapping_add(1), self.1)
    }
}

/// Defines `tile` and `packed_tile`: [`super::kernel::Kernel::tile`] of `words` words, which `$add(sum, a, b)` multiplies and adds, each
/// given as a vector of f32. Between shares of the inner dimension, as many as there are rows, it asks for a row of what comes next.
macro_rules! tiles {
    ($features:literal, $add:expr) => {
        #[inline(always)]
        unsafe fn packed_tile<const ROWS: usize>(
            words: usize,
            strip: *const f32,
            panel: *const f32,
            from: (*const f32, usize),
            to: (*mut f32, usize),
            ahead: Ahead,
        ) {
            // SAFETY: the caller's promise.
            unsafe { tile::<ROWS, _>(words, Packed(strip), panel, from, to, ahead) }
        }

        #[target_feature(enable = $features)]
        unsafe fn tile<const ROWS: usize, L: Layout>(
            words: usize,
            mut strip: L,
            mut panel: *const f32,
            (from, from_stride): (*const f32, usize),
            (to, to_stride): (*mut f32, usize),
            Ahead { mut read, mut written }: Ahead,
        ) {
            let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
            let (share, mut left) = (words / ROWS, words);
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
                            // Rows of pairs may begin between words.
                            let a = _mm512_set1_ps(strip.row(r).read_unaligned());
                            sums[r] = [$add(sums[r][0], a, b[0]), $add(sums[r][1], a, b[1])];
                        }
                        (strip, panel) = (strip.next(), panel.add(NR));
                    }
                }
                for r in 0..ROWS {
                    let to = to.add(r * to_stride);
                    _mm512_storeu_ps(to, sums[r][0]);
                    _mm512_storeu_ps(to.add(16), sums[r][1]);
                }
            }
        }
    };
}
pub(super) use tiles;
