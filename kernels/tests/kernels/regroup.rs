//! Reordering of rows.

use crate::common::{assert_same_on_any_threads, bits, cast, randn};
use candle_core::{DType, Device, Tensor};
use kernels::ops::regroup::swap_leading;

#[test]
fn leading_dimensions_are_swapped_bit_for_bit() {
    let shapes: [&[usize]; 9] = [
        &[3, 2, 5],
        &[2, 3, 4, 5],
        &[1, 4, 3],
        &[4, 1, 3],
        &[7, 5],
        &[0, 3, 2],
        &[3, 4, 0],
        &[300, 3, 77],
        &[2, 300, 130],
    ];
    for shape in shapes {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let x = cast(&randn("x", shape), dtype);
            let want = x.transpose(0, 1).unwrap().contiguous().unwrap();
            let got = swap_leading(&x).unwrap();
            assert_eq!((got.dims(), bits(&got)), (want.dims(), bits(&want)), "{shape:?} {dtype:?}");
            assert_eq!(
                bits(&swap_leading(&got).unwrap()),
                bits(&x),
                "{shape:?} {dtype:?} and back"
            );
        }
    }
}

#[test]
fn a_view_is_read_where_it_lies() {
    let around = cast(&randn("around", &[10, 3, 4]), DType::F32);
    let view = around.narrow(0, 2, 5).unwrap();
    let want = view.transpose(0, 1).unwrap().contiguous().unwrap();
    assert_eq!(bits(&swap_leading(&view).unwrap()), bits(&want));
    assert!(
        swap_leading(&around.narrow(1, 0, 2).unwrap()).is_err(),
        "rows that lie apart are no flat range"
    );
    assert!(
        swap_leading(&Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap()).is_err(),
        "one dimension has no other"
    );
}

#[test]
fn swapped_rows_do_not_depend_on_the_number_of_threads() {
    let x = cast(&randn("x", &[130, 4, 96]), DType::F32);
    assert_same_on_any_threads(|| vec![swap_leading(&x).unwrap()]);
}
