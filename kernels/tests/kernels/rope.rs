//! Rotary embedding, compared with candle's operations and with its own inverse.

use crate::common::{
    DTYPES, assert_close, assert_same_on_any_threads, cast, oracle, randn, values,
};
use candle_core::{D, DType, Device, Tensor};
use kernels::ops::attention::{HeadShape, RopeTable, rope_at, rope_inplace, rope_positions};

const SHAPE: HeadShape = HeadShape { groups: 2, heads_per_group: 3, head_dim: 10 };
const OFFSET: usize = 4;

fn table(dtype: DType) -> RopeTable {
    RopeTable::new(64, SHAPE.head_dim, 10_000.0, dtype, &Device::Cpu).unwrap()
}

/// x·cos + rotate_half(x)·sin on q and k, as in Hugging Face's Llama.
fn reference(qkv: &Tensor, table: &RopeTable) -> Tensor {
    let (s, b, width) = qkv.dims3().unwrap();
    let HeadShape { groups, heads_per_group: n, head_dim: d } = SHAPE;
    let packed = qkv.reshape((s, b, groups, n + 2, d)).unwrap();
    let turned = packed.narrow(3, 0, n + 1).unwrap();
    let (first, second) =
        (turned.narrow(4, 0, d / 2).unwrap(), turned.narrow(4, d / 2, d / 2).unwrap());
    let rotated = Tensor::cat(&[&second.neg().unwrap(), &first], D::Minus1).unwrap();
    let twice = |t: &Tensor| {
        let t = t.narrow(0, OFFSET, s).unwrap();
        Tensor::cat(&[&t, &t], 1).unwrap().reshape((s, 1, 1, 1, d)).unwrap()
    };
    let cos = turned.broadcast_mul(&twice(&table.cos)).unwrap();
    let turned = (cos + rotated.broadcast_mul(&twice(&table.sin)).unwrap()).unwrap();
    Tensor::cat(&[&turned, &packed.narrow(3, n + 1, 1).unwrap()], 3)
        .unwrap()
        .reshape((s, b, width))
        .unwrap()
}

#[test]
fn rotation_and_its_gradient_agree_with_autograd() {
    let dims = [17, 2, SHAPE.width()];
    let (qkv, dy) = (randn("qkv", &dims), randn("dy", &dims));
    let exact = table(DType::F64);
    let (y, grads) = oracle(&[&qkv], &dy, |t| reference(&t[0], &exact));
    for (dtype, tolerance) in DTYPES {
        let (qkv, dy) = (cast(&qkv, dtype).copy().unwrap(), cast(&dy, dtype).copy().unwrap());
        rope_inplace(&qkv, &table(dtype), SHAPE, OFFSET, false).unwrap();
        rope_inplace(&dy, &table(dtype), SHAPE, OFFSET, true).unwrap();
        assert_close("rotated", &qkv, &y, tolerance);
        assert_close("gradient", &dy, &grads[0], tolerance);
    }
}

#[test]
fn positions_may_be_given_row_by_row() {
    let (s, b) = (9, 2);
    let whole = randn("qkv", &[s, b, SHAPE.width()]);
    // Sample 0 starts again at row 4; sample 1 continues from 7.
    let positions: Vec<u32> =
        (0..s as u32).flat_map(|i| [if i < 4 { i } else { i - 4 }, 7 + i]).collect();
    let rows = |positions: &[u32]| {
        Tensor::from_slice(positions, (positions.len() / b, b), &Device::Cpu).unwrap()
    };
    let given = whole.copy().unwrap();
    rope_positions(&given, &table(DType::F64), SHAPE, &rows(&positions), false).unwrap();
    for (first, rows, offsets) in [(0, 4, [0, 7]), (4, 5, [0, 11])] {
        let part = whole.narrow(0, first, rows).unwrap().copy().unwrap();
        rope_at(&part, &table(DType::F64), SHAPE, &offsets, false).unwrap();
        assert_eq!(values(&given.narrow(0, first, rows).unwrap()), values(&part));
    }
    rope_positions(&given, &table(DType::F64), SHAPE, &rows(&positions), true).unwrap();
    assert_close("turned back", &given, &whole, 1e-14);
    let refused = |positions: &[u32]| {
        rope_positions(&whole, &table(DType::F64), SHAPE, &rows(positions), false)
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&positions[2..]).contains("positions has shape [8, 2]"));
    let mut beyond = positions.clone();
    beyond[17] = 64;
    assert!(refused(&beyond).contains("positions 0 to 64 exceed the table's 64"));
}

#[test]
fn frequencies_fall_geometrically_from_one() {
    let table = table(DType::F64);
    let want: Vec<f64> = (0..64)
        .flat_map(|p| {
            (0..5).map(move |i| (f64::from(p) * 10_000f64.powf(-2.0 * f64::from(i) / 10.0)).cos())
        })
        .collect();
    values(&table.cos).iter().zip(want).for_each(|(got, want)| assert!((got - want).abs() < 1e-12));
}

#[test]
fn f32_angles_are_rounded_as_hugging_face_does() {
    let table = RopeTable::new(5000, 128, 10_000.0, DType::F32, &Device::Cpu).unwrap();
    let frequency = 10_000f32.powf(-2.0 / 128.0);
    let want = (4999.0f32 * frequency).sin();
    let got = table.sin.get(4999).unwrap().get(1).unwrap().to_scalar::<f32>().unwrap();
    assert!((got - want).abs() < 1e-6, "{got} {want}");
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let qkv = cast(&randn("qkv", &[60, 9, SHAPE.width()]), DType::F32);
    let table = table(DType::F32);
    assert_same_on_any_threads(|| {
        let qkv = qkv.copy().unwrap();
        rope_inplace(&qkv, &table, SHAPE, OFFSET, false).unwrap();
        vec![qkv]
    });
}

#[test]
fn positions_beyond_the_table_are_an_error() {
    let message =
        rope_inplace(&randn("qkv", &[61, 1, SHAPE.width()]), &table(DType::F64), SHAPE, 4, false)
            .unwrap_err()
            .to_string();
    assert!(message.contains("positions 4 to 64 exceed the table's 64"), "{message}");
    assert!(
        RopeTable::new(4, 5, 1e4, DType::F32, &Device::Cpu)
            .unwrap_err()
            .to_string()
            .contains("odd")
    );
}
