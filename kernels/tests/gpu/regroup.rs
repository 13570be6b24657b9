//! Reordering of rows.

use crate::support::{Input, check};
use kernels::ops::regroup::swap_leading;

/// Rows of less than a vector, of whole vectors, and of vectors with a remainder; fewer items than
/// a block processes, and more.
#[test]
fn leading_dimensions_are_swapped() {
    let shapes: [&[usize]; 9] = [
        &[3, 2, 5],
        &[2, 3, 4, 8],
        &[5, 7, 64],
        &[64, 4, 24],
        &[4, 64, 24],
        &[33, 3, 1],
        &[1, 4, 3],
        &[130, 2, 40],
        &[0, 3, 2],
    ];
    for shape in shapes {
        check("swap_leading", &[Input::data("x", shape)], |t| Ok(vec![swap_leading(&t[0])?]));
    }
}
