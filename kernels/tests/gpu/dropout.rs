//! Dropout with bias and residual; masks equal the CPU's bit for bit.

use crate::support::{Input, check, runs};
use candle_core::{DType, Device, Tensor};
use kernels::ops::dropout::{
    Dropout, DropoutKey, Tokens, bias_dropout_add, dropout_backward, step_and_samples,
};

const KEY: DropoutKey = DropoutKey { seed: 5 << 40 | 77, step: (1 << 35) + 3, layer: 4, site: 9 };

fn dropout(samples: &[u64], p: f64) -> Dropout<'_> {
    Dropout {
        p,
        key: KEY,
        tokens: Tokens { samples, seq_offset: 2, seq_len: 1000, step_and_samples: None },
    }
}

#[test]
fn bias_mask_and_residual_in_all_combinations() {
    let samples = [3, 1 << 33, 8];
    for h in [1, 6, 21, 64, 264] {
        let shape = [5, 3, h];
        let inputs =
            [Input::data("x", &shape), Input::data("bias", &[h]), Input::data("residual", &shape)];
        for choice in 0..8 {
            check("bias_dropout_add", &inputs, |t| {
                let (bias, residual) =
                    ((choice & 1 > 0).then_some(&t[1]), (choice & 2 > 0).then_some(&t[2]));
                let dropout = (choice & 4 > 0).then(|| dropout(&samples, 0.3));
                Ok(vec![bias_dropout_add(&t[0], bias, residual, dropout.as_ref())?])
            });
        }
        check("dropout_backward", &inputs[..1], |t| {
            Ok(vec![dropout_backward(&t[0], &dropout(&samples, 0.6))?])
        });
        check("dropout of nothing", &inputs[..1], |t| {
            Ok(vec![dropout_backward(&t[0], &dropout(&samples, 0.0))?])
        });
    }
}

#[test]
fn without_a_mask_the_shape_is_free() {
    check("bias_dropout_add", &[Input::data("x", &[7, 16]), Input::data("bias", &[16])], |t| {
        Ok(vec![bias_dropout_add(&t[0], Some(&t[1]), None, None)?])
    });
    check("bias_dropout_add", &[Input::data("x", &[0, 3, 16])], |t| {
        Ok(vec![bias_dropout_add(&t[0], None, None, Some(&dropout(&[1, 2, 3], 0.5)))?])
    });
}

fn bits_of(t: &Tensor) -> Vec<u32> {
    let wide =
        t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    wide.to_vec1::<f32>().unwrap().iter().map(|v| v.to_bits()).collect()
}

/// The mask, as the bits of each element.
fn mask(device: &Device, dtype: DType, [s, h]: [usize; 2], samples: &[u64]) -> Vec<u32> {
    let ones = Tensor::ones((s, samples.len(), h), dtype, device).unwrap();
    bits_of(&dropout_backward(&ones, &dropout(samples, 0.25)).unwrap())
}

#[test]
fn step_and_samples_on_the_device_are_read_instead_of_the_hosts() {
    let (s, h, samples) = (3, 40, [7, 1 << 33, 0]);
    for dtype in [DType::F32, DType::BF16] {
        for h in [h, h - 1] {
            for (run, (there, here)) in runs(|device| {
                let both = step_and_samples(KEY.step, &samples, device).unwrap();
                let ones = Tensor::ones((s, samples.len(), h), dtype, device).unwrap();
                let mut other = dropout(&[1, 2, 3], 0.25);
                other.key.step += 1;
                other.tokens.step_and_samples = Some(&both);
                (
                    bits_of(&dropout_backward(&ones, &other).unwrap()),
                    mask(device, dtype, [s, h], &samples),
                )
            }) {
                assert_eq!(there, here, "{run} {dtype:?} {h}");
            }
        }
    }
    for (run, refused) in runs(|device| {
        let both = step_and_samples(1, &samples, device).unwrap();
        let ones = Tensor::ones((1, 2, 8), DType::F32, device).unwrap();
        let mut of_two = dropout(&[1, 2], 0.25);
        of_two.tokens.step_and_samples = Some(&both);
        dropout_backward(&ones, &of_two).unwrap_err().to_string()
    }) {
        assert!(
            refused.contains("step and samples") && refused.contains("[6]"),
            "{run}: {refused}"
        );
    }
}

#[test]
fn masks_are_those_of_the_cpu_bit_for_bit() {
    // More samples than one launch takes.
    let samples: Vec<u64> = (0..70).map(|i| i * i * 1_000_003 + (i << 34)).collect();
    for (size, dtype) in
        [([3, 40], DType::F32), ([2, 56], DType::BF16), ([2, 33], DType::F16), ([1, 7], DType::F32)]
    {
        let want = mask(&Device::Cpu, dtype, size, &samples);
        for (run, got) in runs(|device| mask(device, dtype, size, &samples)) {
            assert!(got == want, "{dtype:?} {size:?}: the mask of {run} differs");
        }
    }
}

#[test]
fn what_is_dropped_is_zero_even_where_it_was_not_finite() {
    for (run, (got, dropped)) in runs(|device| {
        let x = Tensor::full(f32::NAN, (4, 1, 64), device).unwrap();
        let y = dropout_backward(&x, &dropout(&[0], 0.5)).unwrap().to_device(&Device::Cpu).unwrap();
        (
            y.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            mask(device, DType::F32, [4, 64], &[0]),
        )
    }) {
        // The mask here is for p = 0.25: everything that it drops, p = 0.5 drops, too.
        for (y, mask) in got.iter().zip(&dropped) {
            assert!(if *mask == 0 { *y == 0.0 } else { y.is_nan() || *y == 0.0 }, "{run}");
        }
        assert!(got.iter().any(|y| y.is_nan()));
    }
}
