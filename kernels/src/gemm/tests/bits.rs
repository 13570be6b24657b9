//! The same bits however a product is cut.

use ::gemm::Parallelism;
use half::{bf16, f16};

use super::super::{Mat, Start, gemm_on, help};
use super::{Example, Lie, available, numbers};
use crate::float::Elem;

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    any_number_of_threads::<bf16>();
    any_number_of_threads::<f32>();
}

fn any_number_of_threads<E: Elem<Acc = f32>>() {
    let lies = [Lie::Rows, Lie::Columns, Lie::Rows];
    for isa in available() {
        for shape in [(300, 700, 1100), (1000, 130, 100), (64, 1500, 3000)] {
            let example = Example::<E, f32>::new(shape, (lies, "old", 1.0));
            let alone = example.by(isa, Parallelism::None);
            for threads in [2, 3, 7] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let together = pool.install(|| example.by(isa, Parallelism::Rayon(threads)));
                assert!(
                    alone.iter().zip(&together).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{:?} {isa:?} {shape:?}",
                    E::DTYPE
                );
            }
        }
    }
}

/// Products of one block and of several, whose tasks pack panels alone or share them, keep sums of tasks or of all, read A or pack it.
#[test]
fn rows_given_to_threads_that_wait_have_the_same_bits() {
    given_rows::<bf16>();
    given_rows::<f32>();
}

fn given_rows<E: Elem<Acc = f32>>() {
    let (rows, columns) = (Lie::Rows, Lie::Columns);
    for isa in available() {
        for (shape, lies) in [
            ((1536, 130, 384), [rows, columns, rows]),
            ((1536, 130, 1536), [rows, columns, rows]),
            ((1536, 130, 1536), [columns, rows, rows]),
            ((1536, 130, 1300), [columns, rows, rows]),
            ((300, 1536, 1300), [columns, rows, rows]),
            ((1536, 3000, 1100), [rows, columns, rows]),
            ((700, 3000, 2500), [rows, rows, rows]),
            ((1000, 260, 777), [columns, columns, columns]),
        ] {
            let example = Example::<E, f32>::new(shape, (lies, "old", 1.0));
            let whole = example.by(isa, Parallelism::None);
            for waiting in [1, 2, 5] {
                help::GIVEN.set(0);
                help::SEEMING.set(waiting);
                let halved = example.by(isa, Parallelism::None);
                help::SEEMING.set(0);
                assert!(help::GIVEN.get() > 0, "{isa:?} {shape:?} {lies:?}: nothing was given of {:?}", E::DTYPE);
                let same = whole.iter().zip(&halved).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa:?} {shape:?} {lies:?}, {waiting} waiting, {:?}", E::DTYPE);
            }
        }
    }
}

#[test]
fn an_element_is_the_same_however_rows_and_columns_are_cut() {
    an_element_is_the_same::<bf16>();
    an_element_is_the_same::<f32>();
    an_element_is_the_same::<f16>();
}

fn an_element_is_the_same<E: Elem<Acc = f32>>() {
    // With 1216, and rows that begin with a cache line, AMX reads A where it lies.
    let (m, n) = (67, 150);
    for (isa, k) in available().flat_map(|isa| [(isa, 1200), (isa, 1216)]) {
        let (a, b) = (numbers::<E>(m * k, 1), numbers::<E>(k * n, 2));
        let part = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
            let mut c = vec![0f32; rows.len() * columns.len()];
            let at = (Mat(a[rows.start * k..].as_ptr(), k, 1), Mat(b[columns.start..].as_ptr(), n, 1));
            let dst = Mat(c.as_mut_ptr(), columns.len(), 1);
            let shape = (rows.len(), columns.len(), k);
            // SAFETY: the part lies in the whole.
            unsafe { gemm_on::<E, f32>(isa, shape, dst, Start::Zero, None, at.0, at.1, 1.0, Parallelism::None) };
            c
        };
        let whole = part(0..m, 0..n);
        for (rows, columns) in [(0..1, 0..n), (5..38, 7..8), (60..67, 33..150)] {
            let got = part(rows.clone(), columns.clone());
            for (i, r) in rows.enumerate() {
                for (j, c) in columns.clone().enumerate() {
                    assert_eq!(
                        got[i * columns.len() + j].to_bits(),
                        whole[r * n + c].to_bits(),
                        "{isa:?} {k} ({r}, {c})"
                    );
                }
            }
        }
    }
}
