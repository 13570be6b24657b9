//! Micro-kernel for AMX: 32 × 32 sums in two by two tiles of 16 × 16, 32 elements of the inner
//! dimension per step.
//!
//! The compiler does not support tile registers yet, so this is assembly; tiles live within one
//! block of it. As with AVX-512 BF16, subnormal numbers count as 0 (Intel SDM, TDPBF16PS). Panels
//! of B are those of AVX-512 BF16.

use std::arch::asm;
use std::arch::x86_64::*;

use half::bf16;

use super::Mat;
use super::amx_tiles::{FETCHING, STEP, WIDTH, of_tiles};
use super::avx512bf16::{pack_pairs, pairs_of};
use super::kernel::{Ahead, Blocking, InPlace, Interleaved, Kernel, Next, Strip, To};
use super::lanes::{first, transpose};
use crate::tensor::element::Elem;
use crate::tensor::simd::prefetch;

const MR: usize = WIDTH;
const NR: usize = WIDTH;

pub struct Amx;

impl Kernel<bf16> for Amx {
    type Packed = bf16;
    of_tiles!();

    fn blocking() -> Blocking {
        Blocking {
            kc: 384,
            once: 384,
            mc: 256,
            nc: 512,
            nc_alone: 512,
            panels_alone: false,
            in_place: InPlace::AHEAD,
            whole: 5 << 18,
            alone: 16 << 20,
        }
    }

    unsafe fn pack_a(a: Mat<*const bf16>, rows: usize, k: usize, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { pack_rows(a, rows, k, to) }
    }

    unsafe fn pack_b(b: Mat<*const bf16>, columns: usize, k: usize, to: *mut bf16) {
        // SAFETY: the caller's promise; the pairs up to a whole step become zeros.
        unsafe {
            pack_pairs::<NR>(b.t(), columns, k, to);
            let pairs = k.div_ceil(2);
            to.add(2 * pairs * NR).write_bytes(0, (STEP - 2 * pairs) * NR);
        }
    }

    // Rows that do not begin with a cache line cost a second line each. Rows a multiple of 2 KiB
    // apart map to so few sets of the L1 cache that a strip does not stay there.
    fn reads_rows(Mat(at, row, column): Mat<*const bf16>) -> bool {
        column == 1
            && at.addr().is_multiple_of(64)
            && row.is_multiple_of(STEP)
            && !row.is_multiple_of(1024)
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<bf16, bf16>,
        panel: *const bf16,
        from: (*const f32, usize),
        to: To<bf16>,
        ahead: Ahead,
        _: Option<Interleaved<bf16, bf16>>,
    ) {
        let to = to.sums();
        if k == 0 {
            // SAFETY: the caller's promise.
            return unsafe { copy(rows, from, to) };
        }
        let strip = Tiles::of(strip);
        // SAFETY: the caller's promise.
        unsafe {
            if rows <= 16 {
                upper_half(k / STEP, strip, panel, from, to);
            } else {
                // The second line is 64 bytes away, or there is none.
                let next = ahead.written;
                match next.second {
                    0 => whole::<0>(k / STEP, strip, panel, from, to, next),
                    _ => whole::<64>(k / STEP, strip, panel, from, to, next),
                }
            }
        }
    }
}

pub(super) unsafe fn copy(
    rows: usize,
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
) {
    for r in 0..rows {
        // SAFETY: the caller's promise.
        unsafe {
            if from.is_null() {
                to.add(r * to_stride).write_bytes(0, NR);
            } else {
                std::ptr::copy(from.add(r * from_stride), to.add(r * to_stride), NR);
            }
        }
    }
}

/// Addresses of a strip's tiles: the upper and the lower sixteen rows of the first step, the stride
/// of rows and the stride of steps.
struct Tiles {
    upper: *const bf16,
    lower: *const bf16,
    row_bytes: usize,
    step_bytes: usize,
}

impl Tiles {
    fn of(strip: Strip<bf16, bf16>) -> Self {
        match strip {
            Strip::Packed(at) => Self {
                upper: at,
                lower: at.wrapping_add(16 * STEP),
                row_bytes: 2 * STEP,
                step_bytes: 2 * MR * STEP,
            },
            Strip::Rows(at, row) => Self {
                upper: at,
                lower: at.wrapping_add(16 * row),
                row_bytes: 2 * row,
                step_bytes: 2 * STEP,
            },
        }
    }
}

/// Prefetches eight lines, `$ahead` bytes after `b`, into L1: a strip stays there, panels come from
/// L2. A step has four of these prefetches, for all lines of the panel's step after the next; `b`
/// advances by a step after the first.
macro_rules! fetch {
    ($ahead:literal) => {
        concat!(
            fetch!($ahead, 0),
            fetch!($ahead, 64),
            fetch!($ahead, 128),
            fetch!($ahead, 192),
            fetch!($ahead, 256),
            fetch!($ahead, 320),
            fetch!($ahead, 384),
            fetch!($ahead, 448),
        )
    };
    ($ahead:literal, $line:literal) => {
        concat!("prefetcht0 [{b} + ", $ahead, " + ", $line, "]\n")
    };
}

/// Loads every operand of the next step as soon as the last product with its predecessor has
/// started.
unsafe fn whole<const SECOND: usize>(
    steps: usize,
    strip: Tiles,
    panel: *const bf16,
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
    next: Next,
) {
    // Values that are needed only once are passed in memory: there are not enough registers.
    let (fetching, rest) = ((steps - 1).min(FETCHING), (steps - 1).saturating_sub(FETCHING));
    let once = [from as usize, 4 * from_stride, to as usize, 4 * to_stride, rest];
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "mov {t}, [{once}]",
            "test {t}, {t}",
            "jz 2f",
            "mov {stride}, [{once} + 8]",
            "tileloadd tmm0, [{t} + {stride}]",
            "tileloadd tmm1, [{t} + {stride} + 64]",
            "shl {stride}, 4",
            "add {t}, {stride}",
            "shr {stride}, 4",
            "tileloadd tmm2, [{t} + {stride}]",
            "tileloadd tmm3, [{t} + {stride} + 64]",
            "2:",
            "tileloadd tmm4, [{upper} + {a_stride}]",
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tileloadd tmm7, [{b} + {b_stride} + 64]",
            "test {count}, {count}",
            "jz 4f",
            "3:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            fetch!(4096),
            "prefetcht1 [{next}]",
            "prefetcht1 [{next} + {second}]",
            "add {next}, {next_row}",
            "tileloadd tmm5, [{lower} + {a_stride}]",
            "add {upper}, {a_step}",
            "add {lower}, {a_step}",
            "add {b}, 2048",
            "tdpbf16ps tmm1, tmm4, tmm7",
            fetch!(2560),
            "prefetcht1 [{next}]",
            "prefetcht1 [{next} + {second}]",
            "add {next}, {next_row}",
            "tileloadd tmm4, [{upper} + {a_stride}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            fetch!(3072),
            "prefetcht1 [{next}]",
            "prefetcht1 [{next} + {second}]",
            "add {next}, {next_row}",
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tdpbf16ps tmm3, tmm5, tmm7",
            fetch!(3584),
            "prefetcht1 [{next}]",
            "prefetcht1 [{next} + {second}]",
            "add {next}, {next_row}",
            "tileloadd tmm7, [{b} + {b_stride} + 64]",
            "dec {count}",
            "jnz 3b",
            "mov {count}, [{once} + 32]",
            "test {count}, {count}",
            "jz 4f",
            "5:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            fetch!(4096),
            "tileloadd tmm5, [{lower} + {a_stride}]",
            "add {upper}, {a_step}",
            "add {lower}, {a_step}",
            "add {b}, 2048",
            "tdpbf16ps tmm1, tmm4, tmm7",
            fetch!(2560),
            "tileloadd tmm4, [{upper} + {a_stride}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            fetch!(3072),
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tdpbf16ps tmm3, tmm5, tmm7",
            fetch!(3584),
            "tileloadd tmm7, [{b} + {b_stride} + 64]",
            "dec {count}",
            "jnz 5b",
            "4:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{lower} + {a_stride}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "mov {t}, [{once} + 16]",
            "mov {stride}, [{once} + 24]",
            "tilestored [{t} + {stride}], tmm0",
            "tilestored [{t} + {stride} + 64], tmm1",
            "shl {stride}, 4",
            "add {t}, {stride}",
            "shr {stride}, 4",
            "tilestored [{t} + {stride}], tmm2",
            "tilestored [{t} + {stride} + 64], tmm3",
            upper = inout(reg) strip.upper => _,
            lower = inout(reg) strip.lower => _,
            b = inout(reg) panel => _,
            count = inout(reg) fetching => _,
            next = inout(reg) next.at => _,
            next_row = in(reg) next.row,
            second = const SECOND,
            once = in(reg) once.as_ptr(),
            t = out(reg) _,
            stride = out(reg) _,
            a_stride = in(reg) strip.row_bytes,
            a_step = in(reg) strip.step_bytes,
            b_stride = in(reg) 128usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

unsafe fn upper_half(
    steps: usize,
    strip: Tiles,
    panel: *const bf16,
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "test {from}, {from}",
            "jz 2f",
            "tileloadd tmm0, [{from} + {from_stride}]",
            "tileloadd tmm1, [{from} + {from_stride} + 64]",
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}]",
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tileloadd tmm7, [{b} + {b_stride} + 64]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a}, {a_step}",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{to} + {to_stride}], tmm0",
            "tilestored [{to} + {to_stride} + 64], tmm1",
            a = inout(reg) strip.upper => _,
            b = inout(reg) panel => _,
            steps = inout(reg) steps => _,
            from = in(reg) from,
            from_stride = in(reg) 4 * from_stride,
            to = in(reg) to,
            to_stride = in(reg) 4 * to_stride,
            a_stride = in(reg) strip.row_bytes,
            a_step = in(reg) strip.step_bytes,
            b_stride = in(reg) 128usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Packs `rows` ≤ 32 rows of `k` ≤ 32 columns of `a` as `[32][32]`, padded with zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack_rows(a: Mat<*const bf16>, rows: usize, k: usize, to: *mut bf16) {
    let Mat(from, row, column) = a;
    // SAFETY: the caller's promise.
    unsafe {
        if column == 1 {
            let mask = if k >= 32 { u32::MAX } else { (1 << k) - 1 };
            for r in 0..MR {
                let line = if r < rows {
                    _mm512_maskz_loadu_epi16(mask, from.add(r * row).cast())
                } else {
                    _mm512_setzero_si512()
                };
                _mm512_store_si512(to.add(r * STEP).cast(), line);
            }
        } else if row == 1 && rows == MR && k == STEP {
            // The next piece along the inner dimension is packed after this piece of the other
            // strips.
            for i in STEP..2 * STEP {
                prefetch(from.wrapping_add(i * column));
            }
            for r in (0..MR).step_by(8) {
                let lines = transposed_words(from.add(r).cast(), 2 * column);
                for (l, &line) in lines.iter().enumerate() {
                    _mm512_store_si512(to.add((r + l) * STEP).cast(), line);
                }
            }
        } else if row == 1 {
            for r in (0..MR).step_by(16) {
                let mask = first(rows.saturating_sub(r));
                let mut lines = [_mm512_setzero_si512(); 16];
                for (i, line) in lines.iter_mut().enumerate().take(k.div_ceil(2)) {
                    let even = from.wrapping_add(2 * i * column + r);
                    *line =
                        pairs_of(even, (2 * i + 1 < k).then(|| even.wrapping_add(column)), mask);
                }
                let lines = transpose(lines);
                for (l, &line) in lines.iter().enumerate() {
                    _mm512_store_si512(to.add((r + l) * STEP).cast(), line);
                }
            }
        } else {
            to.write_bytes(0, MR * STEP);
            for r in 0..rows {
                for i in 0..k {
                    *to.add(r * STEP + i) = *from.add(r * row + i * column);
                }
            }
        }
    }
}

/// Register i of the result holds the 16 bits at byte 2·i of each of 32 rows, which lie `row` bytes
/// apart. As in [`super::lanes::transposed`], the loads already put quarters of registers into
/// place.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transposed_words(from: *const u8, row: usize) -> [__m512i; 8] {
    let mut x = [_mm512_setzero_si512(); 8];
    for (t, x) in x.iter_mut().enumerate() {
        for lane in 0..4 {
            // SAFETY: the caller's promise.
            let eight = unsafe { _mm_loadu_si128(from.add((8 * lane + t) * row).cast()) };
            *x = _mm512_mask_broadcast_i32x4(*x, 0xf << (4 * lane), eight);
        }
    }
    // Within quarters: words of two rows, then of four, then of eight.
    let twos: [_; 4] = std::array::from_fn(|i| {
        [
            _mm512_unpacklo_epi16(x[2 * i], x[2 * i + 1]),
            _mm512_unpackhi_epi16(x[2 * i], x[2 * i + 1]),
        ]
    });
    let mut out = x;
    for half in 0..2 {
        let [a, b, c, d] = twos.map(|two| two[half]);
        let low = [_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)];
        let high = [_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)];
        out[4 * half] = _mm512_unpacklo_epi64(low[0], low[1]);
        out[4 * half + 1] = _mm512_unpackhi_epi64(low[0], low[1]);
        out[4 * half + 2] = _mm512_unpacklo_epi64(high[0], high[1]);
        out[4 * half + 3] = _mm512_unpackhi_epi64(high[0], high[1]);
    }
    out
}
