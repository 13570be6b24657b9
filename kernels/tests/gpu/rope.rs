//! Rotary position embedding.

use crate::support::{Input, check};
use candle_core::{DType, Device, Tensor};
use kernels::Result;
use kernels::ops::attention::{HeadShape, RopeTable, rope_at, rope_inplace, rope_positions};

const SHAPES: [HeadShape; 5] = [
    HeadShape { groups: 2, heads_per_group: 3, head_dim: 64 },
    HeadShape { groups: 1, heads_per_group: 4, head_dim: 128 },
    HeadShape { groups: 3, heads_per_group: 1, head_dim: 16 },
    HeadShape { groups: 2, heads_per_group: 2, head_dim: 10 },
    HeadShape { groups: 1, heads_per_group: 1, head_dim: 2 },
];

#[test]
fn rows_turn_by_their_positions_and_back() {
    for shape in SHAPES {
        for (s, b, offset) in [(5, 2, 3), (1, 1, 0), (7, 3, 0)] {
            for inverse in [false, true] {
                check("rope", &[Input::data("qkv", &[s, b, shape.width()])], |t| {
                    let table =
                        RopeTable::new(16, shape.head_dim, 1e4, t[0].dtype(), t[0].device())?;
                    rope_inplace(&t[0], &table, shape, offset, inverse)?;
                    Ok(vec![t[0].clone()])
                });
            }
        }
    }
}

#[test]
fn positions_may_differ_by_sample_and_by_row() {
    let (s, b) = (6, 3);
    for shape in SHAPES {
        let qkv = [Input::data("qkv", &[s, b, shape.width()])];
        check("rope at offsets", &qkv, |t| {
            let table = RopeTable::new(16, shape.head_dim, 1e4, t[0].dtype(), t[0].device())?;
            rope_at(&t[0], &table, shape, &[4, 0, 9], false)?;
            Ok(vec![t[0].clone()])
        });
        check("rope at positions", &qkv, |t| {
            let table = RopeTable::new(16, shape.head_dim, 1e4, t[0].dtype(), t[0].device())?;
            let positions: Vec<u32> = (0..(s * b) as u32).map(|row| row * 7 % 16).collect();
            let positions = Tensor::from_vec(positions, (s, b), t[0].device())?;
            rope_positions(&t[0], &table, shape, &positions, true)?;
            Ok(vec![t[0].clone()])
        });
    }
}

#[test]
fn no_rows_are_no_work() {
    let shape = SHAPES[0];
    check("rope", &[Input::data("qkv", &[0, 2, shape.width()])], |t| {
        let table = RopeTable::new(4, shape.head_dim, 1e4, t[0].dtype(), t[0].device())?;
        rope_inplace(&t[0], &table, shape, 0, false)?;
        Ok(vec![t[0].clone()])
    });
}

#[test]
fn a_position_beyond_the_table_is_its_last() {
    let shape = SHAPES[0];
    let turned = |device: &Device, positions: [u32; 2]| -> Result<Vec<f32>> {
        let qkv = Tensor::ones((2, 1, shape.width()), DType::F32, device)?;
        let table = RopeTable::new(8, shape.head_dim, 1e4, DType::F32, device)?;
        rope_positions(
            &qkv,
            &table,
            shape,
            &Tensor::new(&positions, device)?.reshape((2, 1))?,
            false,
        )?;
        Ok(qkv.flatten_all()?.to_vec1()?)
    };
    for (run, (beyond, last)) in crate::support::runs(|device| {
        (turned(device, [3, 1 << 31]).unwrap(), turned(device, [3, 7]).unwrap())
    }) {
        assert_eq!(beyond, last, "{run}");
    }
}
