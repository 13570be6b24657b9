//! AMX for wider types: f32 as sums of three bf16, f16 as sums of two ([`super::bf16_split`]).
//! Micro-kernel of 32 × 32 sums, two by two tiles, 32 elements of the inner dimension per step.
//!
//! Products of bf16 are exact in f32. Of the nine products of the parts of two f32, six are summed.
//! The omitted ones are at most 2⁻²⁴ of the whole, like the rounding of a product to f32, and have
//! either sign. TDPBF16PS adds up 32 products before it adds them to the previous sum. So sums are
//! rounded less often than by FMA of f32, and are closer to the exact ones (`tests`: sums of f32 by
//! AMX). After Henry, Tang and Heinecke 2019, *Leveraging the bfloat16 artificial intelligence
//! datatype for higher-precision computations*. For two f16 all four products are summed.
//!
//! Subnormal parts, and subnormal products of parts, count as 0 (Intel SDM, TDPBF16PS). So numbers
//! below 2⁻¹⁰³, and terms of sums below 2⁻¹⁰², may lose their last bits, with an error of at most
//! about 2⁻¹²⁶ each; subnormal numbers become 0. Infinities give NaN, and so do numbers of at least
//! 2¹²⁸ − 2¹¹⁹.

use std::arch::asm;

use half::bf16;

use super::Mat;
use super::amx::copy;
use super::amx_tiles::{FETCHING, STEP, of_tiles};
use super::bf16_split::{PART, SplitBf16, UNITS, pack_pairs, pack_rows};
use super::interleave::{Idle, Work};
use super::kernel::{Ahead, Blocking, InPlace, Interleaved, Kernel, Next, Pack, Strip, To, packed};
use crate::tensor::element::Elem;

pub struct AmxSplit;

impl<E: SplitBf16> Kernel<E> for AmxSplit {
    type Packed = E::Packed;
    of_tiles!();

    fn blocking() -> Blocking {
        Blocking {
            kc: 384,
            once: 384,
            mc: 256,
            nc: 384,
            nc_alone: 384,
            panels_alone: true,
            in_place: InPlace::AHEAD,
            whole: 0,
            alone: 8 << 20,
        }
    }

    unsafe fn pack_a(a: Mat<*const E>, rows: usize, k: usize, to: *mut E::Packed) {
        // SAFETY: the caller's promise.
        unsafe { pack_rows(a, rows, k, to.cast(), 0..UNITS, a.at(0, STEP).0) }
    }

    unsafe fn pack_b(b: Mat<*const E>, columns: usize, k: usize, to: *mut E::Packed) {
        // SAFETY: the caller's promise.
        unsafe { pack_pairs(b.t(), columns, k, to.cast(), 0..UNITS, b.at(STEP, 0).0) }
    }

    const INTERLEAVES: bool = true;

    fn can_overlap(Mat(_, row, column): Mat<*const E>) -> bool {
        row == 1 || column == 1
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<E, E::Packed>,
        panel: *const E::Packed,
        from: (*const f32, usize),
        to: To<E>,
        ahead: Ahead,
        interleaved: Option<Interleaved<E, E::Packed>>,
    ) {
        let (strip, panel, to) = (packed(strip).cast(), panel.cast(), to.sums());
        let steps = k / STEP;
        let is_whole = rows > 16 && steps > 0;
        // SAFETY: the caller's promise.
        unsafe {
            match interleaved {
                Some(Interleaved::Pack(pack)) if is_whole => {
                    let work = PackByShares::new(pack, steps);
                    return whole::<E, _>(steps, strip, panel, from, to, ahead.written, work);
                }
                Some(Interleaved::Pack(pack)) => PackByShares::new(pack, 1).share(),
                Some(Interleaved::Fetch(..)) | None => (),
            }
            if is_whole {
                whole::<E, _>(steps, strip, panel, from, to, ahead.written, Idle);
            } else if steps > 0 {
                upper_half::<E>(steps, strip, panel, from, to);
            } else {
                copy(rows, from, to);
            }
        }
    }
}

/// Loads a part of a strip's upper or lower rows into tile 4 or 5, or of a panel's left or right
/// columns into tile 6 or 7. The first part of the next step follows the last part.
macro_rules! load {
    (upper $part:literal) => {
        concat!("tileloadd tmm4, [{a} + {a_row} + 2048*", $part, "]\n")
    };
    (lower $part:literal) => {
        concat!("tileloadd tmm5, [{a} + {a_row} + 1024 + 2048*", $part, "]\n")
    };
    (left $part:literal) => {
        concat!("tileloadd tmm6, [{b} + {b_row} + 2048*", $part, "]\n")
    };
    (right $part:literal) => {
        concat!("tileloadd tmm7, [{b} + {b_row} + 64 + 2048*", $part, "]\n")
    };
    (both $a:literal, $b:literal) => {
        concat!(load!(upper $a), load!(left $b), load!(lower $a), load!(right $b))
    };
}

/// Multiplies a part of the rows, in tiles 4 and 5, by a part of the columns, in 6 and 7. Loads the
/// parts that are needed next as soon as the last products with their predecessors have started.
macro_rules! four {
    (rows $a:literal) => {
        four!(load!(upper $a), "", load!(lower $a), "")
    };
    (columns $b:literal) => {
        four!("", load!(left $b), "", load!(right $b))
    };
    (both $a:literal, $b:literal) => {
        four!(load!(upper $a), load!(left $b), load!(lower $a), load!(right $b))
    };
    (last) => {
        four!("", "", "", "")
    };
    ($upper:expr, $left:expr, $lower:expr, $right:expr) => {
        concat!(
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $upper,
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $left,
            "tdpbf16ps tmm3, tmm5, tmm7\n",
            $lower,
            $right,
        )
    };
}

/// The six products of three parts: first low · high, then middle · high, middle · middle, high ·
/// middle, high · low, high · high.
macro_rules! six {
    ($($last:tt)*) => {
        concat!(four!(rows 1), four!(columns 1), four!(rows 0), four!(columns 2), four!(columns 0), four!($($last)*))
    };
}

/// The four products of two parts: first low · low, then low · high, high · high, high · low.
macro_rules! all_of_two {
    ($($last:tt)*) => {
        concat!(four!(columns 0), four!(rows 0), four!(columns 1), four!($($last)*))
    };
}

/// Assembly that reads a strip at `$a` and a panel at `$b`.
macro_rules! from_memory {
    ($text:expr, $a:expr, $b:expr) => {
        asm!($text, a = in(reg) $a, b = in(reg) $b, a_row = in(reg) 64usize, b_row = in(reg) 128usize, options(nostack, readonly))
    };
}

/// As [`Kernel::tile`] for more than sixteen rows and at least one step; does a share of `work`
/// after each step. Tiles keep their values from one block of assembly to the next, because the
/// compiler does not use them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn whole<E: SplitBf16, W: Work>(
    steps: usize,
    mut strip: *const bf16,
    mut panel: *const bf16,
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
    mut next: Next,
    mut work: W,
) {
    // SAFETY: the caller's promise; a prefetch is no access.
    unsafe {
        if from.is_null() {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem)
            );
        } else {
            asm!(
                "tileloadd tmm0, [{upper} + {row}]",
                "tileloadd tmm1, [{upper} + {row} + 64]",
                "tileloadd tmm2, [{lower} + {row}]",
                "tileloadd tmm3, [{lower} + {row} + 64]",
                upper = in(reg) from,
                lower = in(reg) from.wrapping_add(16 * from_stride),
                row = in(reg) 4 * from_stride,
                options(nostack, readonly),
            );
        }
        match E::PARTS {
            2 => from_memory!(load!(both 1, 1), strip, panel),
            _ => from_memory!(load!(both 2, 0), strip, panel),
        }
        for step in 1..steps {
            match E::PARTS {
                2 => from_memory!(all_of_two!(both 3, 3), strip, panel),
                _ => from_memory!(six!(both 5, 3), strip, panel),
            }
            (strip, panel) =
                (strip.wrapping_add(E::PARTS * PART), panel.wrapping_add(E::PARTS * PART));
            if step <= FETCHING {
                for _ in 0..4 {
                    next.lines().into_iter().for_each(crate::tensor::simd::prefetch_l2);
                }
            }
            work.share();
        }
        match E::PARTS {
            2 => from_memory!(all_of_two!(last), strip, panel),
            _ => from_memory!(six!(last), strip, panel),
        }
        work.share();
        asm!(
            "tilestored [{upper} + {row}], tmm0",
            "tilestored [{upper} + {row} + 64], tmm1",
            "tilestored [{lower} + {row}], tmm2",
            "tilestored [{lower} + {row} + 64], tmm3",
            upper = in(reg) to,
            lower = in(reg) to.wrapping_add(16 * to_stride),
            row = in(reg) 4 * to_stride,
            options(nostack),
        );
    }
}

/// As [`whole`], for sixteen rows, in the same order, so that an element has the same bits: parts
/// of the rows in tiles 2 to 4, a part of the columns in 6 and 7.
unsafe fn upper_half<E: SplitBf16>(
    steps: usize,
    mut strip: *const bf16,
    mut panel: *const bf16,
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
) {
    macro_rules! columns {
        ($b:literal, $($tile:literal),+) => {
            concat!(
                load!(left $b), load!(right $b),
                $("tdpbf16ps tmm0, tmm", $tile, ", tmm6\n", "tdpbf16ps tmm1, tmm", $tile, ", tmm7\n"),+
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        if from.is_null() {
            asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
        } else {
            asm!(
                "tileloadd tmm0, [{from} + {row}]",
                "tileloadd tmm1, [{from} + {row} + 64]",
                from = in(reg) from,
                row = in(reg) 4 * from_stride,
                options(nostack, readonly),
            );
        }
        for _ in 0..steps {
            match E::PARTS {
                2 => from_memory!(
                    concat!(
                        "tileloadd tmm2, [{a} + {a_row}]\n",
                        "tileloadd tmm3, [{a} + {a_row} + 2048]\n",
                        columns!(1, 3),
                        columns!(0, 3, 2),
                        columns!(1, 2),
                    ),
                    strip,
                    panel
                ),
                _ => from_memory!(
                    concat!(
                        "tileloadd tmm2, [{a} + {a_row}]\n",
                        "tileloadd tmm3, [{a} + {a_row} + 2048]\n",
                        "tileloadd tmm4, [{a} + {a_row} + 4096]\n",
                        columns!(0, 4, 3),
                        columns!(1, 3, 2),
                        columns!(2, 2),
                        columns!(0, 2),
                    ),
                    strip,
                    panel
                ),
            }
            (strip, panel) =
                (strip.wrapping_add(E::PARTS * PART), panel.wrapping_add(E::PARTS * PART));
        }
        asm!(
            "tilestored [{to} + {row}], tmm0",
            "tilestored [{to} + {row} + 64], tmm1",
            to = in(reg) to,
            row = in(reg) 4 * to_stride,
            options(nostack),
        );
    }
}

/// A part of a strip or a panel, packed in shares: some units of its pieces at a time.
struct PackByShares<E> {
    from: Mat<*const E>,
    width: usize,
    following: *const E,
    to: *mut bf16,
    is_panel: bool,
    unit: usize,
    units: usize,
    share: usize,
}

impl<E: SplitBf16> PackByShares<E> {
    fn new(pack: Pack<E, E::Packed>, shares: usize) -> Self {
        let Pack { from, width, k, following, to, is_panel } = pack;
        let units = k / STEP * UNITS;
        Self {
            from,
            width,
            following,
            to: to.cast(),
            is_panel,
            unit: 0,
            units,
            share: units.div_ceil(shares),
        }
    }
}

impl<E: SplitBf16> Work for PackByShares<E> {
    #[inline(always)]
    unsafe fn share(&mut self) {
        let end = (self.unit + self.share).min(self.units);
        while self.unit < end {
            let (piece, unit) = (self.unit / UNITS, self.unit % UNITS);
            let units = unit..UNITS.min(unit + end - self.unit);
            let is_last = (piece + 1) * UNITS == self.units;
            self.unit += units.len();
            let (from, to) =
                (self.from.at(0, piece * STEP), self.to.wrapping_add(piece * E::PARTS * PART));
            let next = if is_last { self.following } else { from.at(0, STEP).0 };
            // SAFETY: the caller's promise.
            unsafe {
                match self.is_panel {
                    true => pack_pairs(from, self.width, STEP, to, units, next),
                    false => pack_rows(from, self.width, STEP, to, units, next),
                }
            }
        }
    }
}
