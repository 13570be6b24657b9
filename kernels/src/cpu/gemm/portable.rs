//! Micro-kernel in plain Rust; the compiler vectorizes it for SSE2 or NEON.

use super::kernel::{Ahead, Blocking, InPlace, Interleaved, Kernel, Skinny, Strip, To, packed};
use super::layout::{Layout, Packed, of_six};
use super::unpacked::Unpacked;
use super::{Mat, pack};
use crate::tensor::element::Elem;

const MR: usize = 6;
/// Sums of two vectors per row with 16 registers, of four with 32: cores of aarch64 with four FMA
/// units keep sixteen sums in flight.
const NR: usize = if cfg!(target_arch = "aarch64") { 16 } else { 8 };

pub struct Portable;

/// `a·b + c`, rounded once if the compiler's target has such an instruction.
#[inline(always)]
pub(super) fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

impl<E: Elem<Acc = f32>> Kernel<E> for Portable {
    type Packed = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    const KQ: usize = 1;

    fn blocking() -> Blocking {
        Blocking {
            kc: 256,
            once: 256,
            mc: 120,
            nc: 256,
            nc_alone: 256,
            panels_alone: false,
            in_place: InPlace::AHEAD,
            whole: 0,
            alone: 1 << 20,
        }
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
        from: (*const f32, usize),
        to: To<E>,
        _: Ahead,
        _: Option<Interleaved<E, f32>>,
    ) {
        let (strip, panel, to) = (Packed::<MR>(packed(strip)), (panel, NR), to.sums());
        // SAFETY: the caller's promise.
        unsafe { of_six!(rows, tile, (Packed<MR>), (k, strip, panel, from, to)) }
    }

    fn leaves_other_rows(_: usize) -> bool {
        true
    }

    const THIN: Skinny = Skinny::ByPieces;

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

impl Unpacked for Portable {
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
        unsafe { of_six!(rows, tile, (Mat<*const f32>), (k, a, b, (from, c.1), c)) }
    }
}

/// `to [ROWS, NR] = strip · panel`, plus `from` unless that is null. Everything except the strip
/// comes with its row stride. A separate function: the compiler reliably vectorizes loops of known
/// lengths only outside other loops.
#[inline(never)]
unsafe fn tile<const ROWS: usize, L: Layout>(
    k: usize,
    mut strip: L,
    (mut panel, panel_row): (*const f32, usize),
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
) {
    let mut sums = [[0f32; NR]; ROWS];
    // SAFETY: the caller's promise.
    unsafe {
        if !from.is_null() {
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = *from.add(r * from_stride).cast::<[f32; NR]>();
            }
        }
        for _ in 0..k {
            let b = *panel.cast::<[f32; NR]>();
            for r in 0..ROWS {
                let a = *strip.row(r);
                for c in 0..NR {
                    sums[r][c] = multiply_add(a, b[c], sums[r][c]);
                }
            }
            (strip, panel) = (strip.next(), panel.wrapping_add(panel_row));
        }
        for (r, sums) in sums.iter().enumerate() {
            *to.add(r * to_stride).cast::<[f32; NR]>() = *sums;
        }
    }
}
