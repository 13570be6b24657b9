//! How a micro-kernel addresses its rows of A.

use super::Mat;

/// The layout of rows: packed words, or rows in A. A word is the factor of one column of B.
pub trait Layout: Copy {
    /// Address of row `r` at the current word.
    fn row(self, r: usize) -> *const f32;
    /// The layout advanced to the next word.
    fn next(self) -> Self;
}

/// Words of MR rows side by side.
#[derive(Clone, Copy)]
pub struct Packed<const MR: usize>(pub *const f32);

/// Unpacked rows of A, and their stride in bytes.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Rows(pub *const f32, pub usize);

impl<const MR: usize> Layout for Packed<MR> {
    #[inline(always)]
    fn row(self, r: usize) -> *const f32 {
        self.0.wrapping_add(r)
    }

    #[inline(always)]
    fn next(self) -> Self {
        Self(self.0.wrapping_add(MR))
    }
}

#[cfg(target_arch = "x86_64")]
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

/// Rows of any matrix.
impl Layout for Mat<*const f32> {
    #[inline(always)]
    fn row(self, r: usize) -> *const f32 {
        self.0.wrapping_add(r * self.1)
    }

    #[inline(always)]
    fn next(self) -> Self {
        self.at(0, 1)
    }
}

/// Calls `$tile::<ROWS, $types>` for `$rows` rows, at most six.
macro_rules! of_six {
    ($rows:expr, $tile:ident, ($($types:ty),+), $args:tt) => {
        match $rows {
            1 => $tile::<1, $($types),+> $args,
            2 => $tile::<2, $($types),+> $args,
            3 => $tile::<3, $($types),+> $args,
            4 => $tile::<4, $($types),+> $args,
            5 => $tile::<5, $($types),+> $args,
            _ => $tile::<6, $($types),+> $args,
        }
    };
}
pub(super) use of_six;
