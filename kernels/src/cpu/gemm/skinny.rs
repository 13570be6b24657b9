//! Products of few rows, as in text generation token by token. Their time is the time to read B
//! from memory.
//!
//! If columns are contiguous in memory, as those of a linear layer's weight are, B is read in
//! place, once, in memory order. Nothing of B is written again, except pieces that stay in L1 for
//! kernels that need panels. Terms are summed in the same order as in any other product, so an
//! element has the same bits for any number of rows.

use std::ops::Range;

use super::buffer::{Buffer, with_shared_buffers, with_thread_buffers};
use super::driver::{First, Target, pack_strips};
use super::kernel::{Ahead, Kernel, Next, PIECE, Skinny, Strip, To};
use super::{Call, Mat, Start};
use crate::tensor::allocator::LINE;
use crate::tensor::element::Elem;
use crate::tensor::parallel;
use crate::tensor::simd::prefetch;

/// Most rows of a skinny product. Beyond about forty, packing pays.
const MOST_ROWS: usize = 32;
/// Rows that are computed at a time; further rows find B in L2. (More at a time, from pieces of
/// panels packed in L1, took up to 1.9 times as long.)
pub const ROWS: usize = 8;

/// Approximate bytes of B that a task reads.
const TASK_BYTES: usize = 128 << 10;
/// Bytes of B from which a second thread gains more than it costs.
const ALONE: usize = 256 << 10;
/// Most sums of a tile.
const SUMS: usize = 512;

/// Whether [`run`] computes the product.
pub fn fits<E: Elem<Acc = f32>, C, K: Kernel<E>>(call: &Call<'_, E, C>) -> bool {
    let most = match K::THIN {
        Skinny::AsOthers => 0,
        Skinny::InPlace => MOST_ROWS,
        Skinny::ByPieces => K::MR,
    };
    let (rows, ..) = call.shape;
    rows <= most && call.dst.2 == 1 && call.b.1 == 1 && !matches!(call.start, Start::Old)
}

/// # Safety
/// As [`super::workers::run`]; the product [`fits`].
pub unsafe fn run<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>>(call: Call<'_, E, C>) {
    let Call { shape: (m, n, k), dst, start, plus, a, b, scale, threads } = call;
    with_shared_buffers(|common| {
        // SAFETY: the caller's promise.
        let a = unsafe { rows_of::<E, K>(a, m, k, &mut common.panels) };
        let product = Product::<E, C, K> {
            a,
            m,
            k,
            b: (b.0, b.2),
            target: Target {
                dst,
                first: First::new(start, n, K::NR, &mut common.bias),
                plus,
                scale,
            },
        };
        let bytes = k * size_of::<E>();
        let columns = (TASK_BYTES / bytes.max(1))
            .next_multiple_of(K::NR)
            .clamp(K::NR, n.next_multiple_of(K::NR));
        // SAFETY: the caller's promise; tasks are disjoint.
        let task = |i: usize| unsafe { product.columns(i * columns..((i + 1) * columns).min(n)) };
        if threads == 1 || n * bytes < ALONE {
            (0..n.div_ceil(columns)).for_each(task);
        } else {
            parallel::for_each(n.div_ceil(columns), task);
        }
    });
}

/// The rows of A as [`Kernel::skinny`] reads them, and their stride: in place if they have that
/// layout already, otherwise in `memory`. For kernels that compute tiles, a strip.
///
/// # Safety
/// The rows can be read.
unsafe fn rows_of<E: Elem<Acc = f32>, K: Kernel<E>>(
    a: Mat<*const E>,
    m: usize,
    k: usize,
    memory: &mut Buffer,
) -> (*const K::Packed, usize) {
    let Mat(at, row, column) = a;
    if K::THIN == Skinny::InPlace
        && column == 1
        && k.is_multiple_of(K::KQ)
        && size_of::<E>() == size_of::<K::Packed>()
    {
        return (at.cast(), row);
    }
    let padded = k.next_multiple_of(K::KQ);
    if K::THIN == Skinny::ByPieces {
        let strip = memory.room::<K::Packed>(K::MR * padded);
        // SAFETY: the caller's promise, and there is room for a strip.
        unsafe { pack_strips::<E, K>(a, m, k, strip) };
        return (strip, 0);
    }
    let to = memory.room::<K::Packed>(m * padded);
    for r in 0..m {
        for i in (0..k).step_by(PIECE) {
            // SAFETY: the caller's promise, and there is room for all rows.
            unsafe { K::pack_row(a.at(r, i), PIECE.min(k - i), to.add(r * padded + i)) };
        }
    }
    (to, padded)
}

/// A product of few rows.
struct Product<E, C, K: Kernel<E>>
where
    E: Elem<Acc = f32>,
{
    /// See [`rows_of`].
    a: (*const K::Packed, usize),
    m: usize,
    k: usize,
    /// B, and the stride of its columns.
    b: (*const E, usize),
    target: Target<C>,
}

// SAFETY: tasks write disjoint columns of dst, and only read the other memory that this points to.
unsafe impl<E: Elem<Acc = f32>, C, K: Kernel<E>> Sync for Product<E, C, K> {}

impl<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>> Product<E, C, K> {
    /// # Safety
    /// As [`run`]; no other task has these columns.
    unsafe fn columns(&self, all: Range<usize>) {
        let &Target { dst: Mat(dst, row, _), first, plus, scale } = &self.target;
        let mut sums = [0f32; SUMS];
        let sums = &mut sums[..K::MR * K::NR];
        for c in all.clone().step_by(K::NR) {
            let columns = K::NR.min(all.end - c);
            for r in (0..self.m).step_by(ROWS.min(K::MR)) {
                let rows = ROWS.min(K::MR).min(self.m - r);
                for sums in sums.chunks_exact_mut(K::NR).take(rows) {
                    match first {
                        // SAFETY: the bias is padded with zeros to a multiple of NR.
                        First::Bias(bias) => sums.copy_from_slice(unsafe {
                            std::slice::from_raw_parts(bias.add(c), K::NR)
                        }),
                        First::Zero | First::Old => sums.fill(0.0),
                    }
                }
                // SAFETY: the caller's promise.
                unsafe {
                    let (a, a_row) = self.a;
                    let (a, b) =
                        ((a.add(r * a_row), a_row), (self.b.0.add(c * self.b.1), self.b.1));
                    match K::THIN {
                        Skinny::ByPieces => {
                            by_pieces::<E, K>(rows, columns, self.k, a.0, b, sums.as_mut_ptr())
                        }
                        _ => K::skinny(rows, columns, self.k, a, b, sums.as_mut_ptr()),
                    }
                    let add = plus.map_or((std::ptr::null(), 0), |(at, stride)| {
                        (at.add(r * stride + c), stride)
                    });
                    K::finish(
                        sums.as_ptr(),
                        rows,
                        columns,
                        (dst.add(r * row + c), row),
                        scale,
                        add,
                    );
                }
            }
        }
    }
}

/// As [`Kernel::skinny`], for a packed strip, and for columns that are packed into pieces of a
/// panel in L1.
///
/// # Safety
/// As there; sums have MR rows.
unsafe fn by_pieces<E: Elem<Acc = f32>, K: Kernel<E>>(
    rows: usize,
    columns: usize,
    k: usize,
    strip: *const K::Packed,
    (b, column): (*const E, usize),
    sums: *mut f32,
) {
    let nothing = Next::nothing(sums.cast());
    let nothing = Ahead { written: nothing, added: nothing, read: nothing };
    let mut following = b.wrapping_add(K::NR * column);
    with_thread_buffers(|own| {
        let panel = own.panels.room::<K::Packed>(K::NR * PIECE);
        for i in (0..k).step_by(PIECE) {
            // Prefetch the memory after these columns, in memory order.
            for _ in 0..K::NR * PIECE * size_of::<E>() / LINE {
                prefetch(following);
                following = following.wrapping_add(LINE / size_of::<E>());
            }
            let (k, strip) = (PIECE.min(k - i), Strip::Packed(strip.wrapping_add(i * K::MR)));
            // SAFETY: the caller's promise; the panel has room for a piece.
            unsafe {
                K::pack_b(Mat(b.add(i), 1, column), columns, k, panel);
                let k = k.next_multiple_of(K::KQ);
                K::tile(rows, k, strip, panel, (sums, K::NR), To::Sums(sums, K::NR), nothing, None);
            }
        }
    });
}
