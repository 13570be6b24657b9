//! Panels of f32 from any storage type, in plain Rust.

use super::Mat;
use super::kernel::PIECE;
use crate::tensor::element::Elem;

/// Packs `width` ≤ R rows of `k` ≤ [`PIECE`] columns of `m` as `[k][R]`, with zeros from `width`
/// on.
///
/// # Safety
/// `m` can be read, `to` has R · k elements.
#[inline(always)]
pub unsafe fn pack<E: Elem<Acc = f32>, const R: usize>(
    m: Mat<*const E>,
    width: usize,
    k: usize,
    to: *mut f32,
) {
    let Mat(from, row, column) = m;
    // SAFETY: the caller's promise, for all of this function.
    unsafe {
        if width < R {
            to.write_bytes(0, R * k);
        }
        if column == 1 {
            let mut values = [0f32; PIECE];
            for r in 0..width {
                let line = std::slice::from_raw_parts(from.add(r * row), k);
                values.iter_mut().zip(line).for_each(|(value, &e)| *value = e.load());
                for i in 0..k {
                    *to.add(i * R + r) = values[i];
                }
            }
        } else if row == 1 {
            for i in 0..k {
                let line = std::slice::from_raw_parts(from.add(i * column), width);
                let to = std::slice::from_raw_parts_mut(to.add(i * R), width);
                to.iter_mut().zip(line).for_each(|(to, &e)| *to = e.load());
            }
        } else {
            for i in 0..k {
                for r in 0..width {
                    *to.add(i * R + r) = (*from.add(r * row + i * column)).load();
                }
            }
        }
    }
}

/// [`super::kernel::Kernel::finish`] in plain Rust.
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn finish<C: Elem<Acc = f32>, const NR: usize>(
    sums: *const f32,
    rows: usize,
    columns: usize,
    (to, stride): (*mut C, usize),
    scale: f32,
    add: (*const C, usize),
) {
    for r in 0..rows {
        // SAFETY: the caller's promise.
        unsafe {
            let sums = std::slice::from_raw_parts(sums.add(r * NR), columns)
                .iter()
                .map(|&sum| scale * sum);
            let (row, add_row) = (to.add(r * stride), add.0.wrapping_add(r * add.1));
            let row = std::slice::from_raw_parts_mut(row, columns);
            if add.0.is_null() {
                row.iter_mut().zip(sums).for_each(|(to, sum)| *to = C::store(sum));
            } else if std::ptr::eq(add_row, row.as_ptr()) {
                row.iter_mut().zip(sums).for_each(|(to, sum)| *to = C::store(to.load() + sum));
            } else {
                let add = std::slice::from_raw_parts(add_row, columns);
                row.iter_mut()
                    .zip(sums)
                    .zip(add)
                    .for_each(|((to, sum), add)| *to = C::store(add.load() + sum));
            }
        }
    }
}
