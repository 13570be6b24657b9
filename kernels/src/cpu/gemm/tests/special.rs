//! Numbers that are not finite, subnormal, or of very different size; and no numbers at all.

use ::gemm::Parallelism;
use half::{bf16, f16};

use super::super::{Mat, Start, gemm_on};
use super::{available, numbers};
use crate::tensor::element::{Elem, Float};
use crate::tensor::simd::Isa;

/// `a [m, k] · b [k, n]` of contiguous operands on one thread.
fn product<E: Elem<Acc = f32>>(
    isa: Isa,
    (m, n, k): (usize, usize, usize),
    a: &[E],
    b: &[E],
) -> Vec<f32> {
    assert!(a.len() == m * k && b.len() == k * n);
    let mut c = vec![7f32; m * n];
    let (a, b, dst) = (Mat(a.as_ptr(), k, 1), Mat(b.as_ptr(), n, 1), Mat(c.as_mut_ptr(), n, 1));
    // SAFETY: the vectors have these shapes.
    unsafe {
        gemm_on::<E, f32>(isa, (m, n, k), dst, Start::Zero, None, a, b, 1.0, Parallelism::None)
    };
    c
}

#[test]
fn infinities_and_nans_stay_in_their_rows_and_columns() {
    fn check<E: Elem<Acc = f32>>() {
        let (m, n, k) = (35, 70, 45);
        for isa in available() {
            let (mut a, mut b) = (numbers::<E>(m * k, 1), numbers::<E>(k * n, 2));
            (a[3 * k + 44], a[34 * k]) = (E::store(f32::NAN), E::store(f32::INFINITY));
            b[44 * n + 69] = E::store(f32::NEG_INFINITY);
            for (i, v) in product(isa, (m, n, k), &a, &b).iter().enumerate() {
                match (i / n, i % n) {
                    (3, _) => assert!(v.is_nan(), "{:?} {isa:?} {i}", E::DTYPE),
                    (34, _) | (_, 69) => assert!(!v.is_finite(), "{:?} {isa:?} {i}", E::DTYPE),
                    _ => assert!(v.is_finite(), "{:?} {isa:?} {i}", E::DTYPE),
                }
            }
        }
    }
    check::<bf16>();
    check::<f32>();
    check::<f16>();
}

#[test]
fn subnormal_operands_count_or_are_zero() {
    for isa in available() {
        let one = |x: bf16| product(isa, (1, 1, 1), &[x], &[bf16::ONE])[0];
        let smallest = bf16::from_bits(1);
        assert_eq!(
            one(smallest),
            if isa >= Isa::Avx512Bf16 { 0.0 } else { smallest.to_f32() },
            "{isa:?}"
        );

        let one = |x: f32| product(isa, (1, 1, 1), &[x], &[1.0])[0];
        assert_eq!(one(f32::MIN_POSITIVE), f32::MIN_POSITIVE, "{isa:?}");
        // A number with all bits set: its parts are normal down to this size.
        let normal = f32::from_bits(2f32.powi(-103).to_bits() | 0x7f_ffff);
        assert_eq!(one(normal), normal, "{isa:?}");
        let (smallest, small) = (f32::from_bits(1), normal / 4.0);
        if isa == Isa::Amx {
            assert_eq!(one(smallest), 0.0);
            assert!(
                (one(small) - small).abs() <= f32::MIN_POSITIVE,
                "{:e} for {small:e}",
                one(small)
            );
            assert_ne!(one(small), small, "the note on small numbers is out of date");
        } else {
            assert_eq!((one(smallest), one(small)), (smallest, small), "{isa:?}");
        }

        // Every f16 is normal as f32, and as bf16.
        assert_eq!(
            product(isa, (1, 1, 1), &[f16::from_bits(1)], &[f16::ONE]),
            [2f32.powi(-24)],
            "{isa:?}"
        );
    }
}

/// The outputs of GELU include the smallest numbers next to ordinary ones.
#[test]
fn tiny_operands_do_not_reach_their_neighbours() {
    let (m, n, k) = (34, 45, 70);
    let mixed = |seed: u64, len: usize| -> Vec<f32> {
        let scale = |i: usize| 2f32.powi(-(((i * 7 + i / 5) % 40) as i32 + 60)) * 2f32.powi(-60);
        numbers::<f32>(len, seed)
            .iter()
            .enumerate()
            .map(|(i, &x)| if i % 3 == 0 { x } else { x * scale(i) })
            .collect()
    };
    let (a, b) = (mixed(1, m * k), mixed(2, k * n));
    let exact = |r: usize, c: usize| -> f64 {
        (0..k).map(|i| f64::from(a[r * k + i]) * f64::from(b[i * n + c])).sum()
    };
    let transposed = |values: &[f32], rows: usize, columns: usize| -> Vec<f32> {
        (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
    };
    let (a_turned, b_turned) = (transposed(&a, m, k), transposed(&b, k, n));
    for isa in available() {
        for lie in 0..4 {
            let left =
                if lie & 1 == 0 { Mat(a.as_ptr(), k, 1) } else { Mat(a_turned.as_ptr(), 1, m) };
            let right =
                if lie & 2 == 0 { Mat(b.as_ptr(), n, 1) } else { Mat(b_turned.as_ptr(), 1, k) };
            let mut c = vec![7f32; m * n];
            let to = Mat(c.as_mut_ptr(), n, 1);
            // SAFETY: the vectors have these shapes.
            unsafe {
                gemm_on::<f32, f32>(
                    isa,
                    (m, n, k),
                    to,
                    Start::Zero,
                    None,
                    left,
                    right,
                    1.0,
                    Parallelism::None,
                );
            }
            for (i, &got) in c.iter().enumerate() {
                let want = exact(i / n, i % n);
                assert!(
                    (f64::from(got) - want).abs() < 1e-4,
                    "{isa:?}, {lie}: {got:e} for {want:e}"
                );
            }
        }
    }
}

/// Errors relative to the sum of the terms' magnitudes: the root mean square, and the largest.
fn errors(isa: Isa, (m, n, k): (usize, usize, usize), a: &[f32], b: &[f32]) -> (f64, f64) {
    let (mut squares, mut most) = (0f64, 0f64);
    for (i, &got) in product(isa, (m, n, k), a, b).iter().enumerate() {
        let term = |j: usize| f64::from(a[i / n * k + j]) * f64::from(b[j * n + i % n]);
        let (exact, all) =
            (0..k).map(term).fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
        let error = (f64::from(got) - exact).abs() / all;
        (squares, most) = (squares + error * error, most.max(error));
    }
    ((squares / (m * n) as f64).sqrt(), most)
}

/// Numbers with magnitudes spread over `2^-spread .. 2^spread`.
fn spread(n: usize, seed: u64, spread: f32) -> Vec<f32> {
    let exponents = numbers::<f32>(n, seed + 100);
    numbers::<f32>(n, seed).iter().zip(exponents).map(|(x, e)| x * (e * spread).exp2()).collect()
}

#[test]
fn sums_of_f32_by_amx_are_as_close_to_the_exact_ones_as_those_by_fma() {
    if Isa::supported() < Isa::Amx {
        return;
    }
    let unit = 2f64.powi(-24);
    for (m, n, k) in [(33, 65, 1), (40, 40, 33), (64, 64, 2048), (33, 32, 9000)] {
        for sizes in [0.0, 4.0, 30.0] {
            let (a, b) = (spread(m * k, 1, sizes), spread(k * n, 2, sizes));
            let (fma, amx) =
                (errors(Isa::Avx512, (m, n, k), &a, &b), errors(Isa::Amx, (m, n, k), &a, &b));
            let what = format!(
                "k {k}, sizes 2^±{sizes}: FMA {:.3?} AMX {:.3?} ulp",
                (fma.0 / unit, fma.1 / unit),
                (amx.0 / unit, amx.1 / unit)
            );
            println!("{what}");
            // FMA rounds a single product once; the sum of its parts is rounded several times.
            let allowed =
                if k == 1 { (2.0 * unit, 4.0 * unit) } else { (1.1 * fma.0, 1.5 * fma.1) };
            assert!(amx.0 <= allowed.0 && amx.1 <= allowed.1, "{what}");
        }
    }
}

#[test]
fn a_product_without_rows_or_columns_is_nothing() {
    for (isa, (m, n, k)) in available()
        .flat_map(|isa| [(0, 3, 2), (3, 0, 2), (2, 0, 0), (0, 0, 5)].map(|shape| (isa, shape)))
    {
        let (some, mut c) = ([1f32; 16], [5f32; 16]);
        // Rows of memory, and columns.
        for b in [Mat(some.as_ptr(), n, 1), Mat(some.as_ptr(), 1, k)] {
            let (a, dst) = (Mat(some.as_ptr(), k, 1), Mat(c.as_mut_ptr(), n, 1));
            // SAFETY: nothing is read or written.
            unsafe {
                gemm_on::<f32, f32>(
                    isa,
                    (m, n, k),
                    dst,
                    Start::Zero,
                    None,
                    a,
                    b,
                    1.0,
                    Parallelism::None,
                )
            };
        }
        assert_eq!(c, [5.0; 16], "{isa:?}");
    }
}

#[test]
fn an_empty_inner_dimension_gives_the_start() {
    fn check<E: Elem<Acc = f32>>() {
        let (nothing, bias) = ([E::store(f32::of(0.0)); 1], [1f32, 2.0, 3.0].map(E::store));
        for isa in available() {
            for (start, want) in [
                (Start::Zero, [0.0; 3]),
                (Start::Old, [5.0; 3]),
                (Start::Bias(&bias), [1.0, 2.0, 3.0]),
            ] {
                let mut c = [5f32; 6];
                let none = Mat(nothing.as_ptr(), 0, 1);
                // SAFETY: there is nothing to read.
                unsafe {
                    let dst = Mat(c.as_mut_ptr(), 3, 1);
                    gemm_on::<E, f32>(
                        isa,
                        (2, 3, 0),
                        dst,
                        start,
                        None,
                        none,
                        none,
                        1.0,
                        Parallelism::None,
                    );
                }
                assert_eq!(c, [want, want].concat()[..], "{:?} {isa:?}", E::DTYPE);
            }
        }
    }
    check::<bf16>();
    check::<f32>();
    check::<f16>();
}
