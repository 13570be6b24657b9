//! A product has the same bits for every partition.

use ::gemm::Parallelism;
use half::{bf16, f16};

use super::super::{Mat, Start, gemm_on, work_sharing};
use super::{Example, Lie, available, mat, numbers};
use crate::tensor::element::Elem;

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    any_number_of_threads::<bf16>();
    any_number_of_threads::<f32>();
}

fn any_number_of_threads<E: Elem<Acc = f32>>() {
    let (rows, columns) = (Lie::Rows, Lie::Columns);
    let [in_place, packed] = [[rows, columns, rows], [columns, rows, rows]];
    for isa in available() {
        for (shape, lies) in [
            ((300, 700, 1100), in_place),
            ((1000, 130, 100), in_place),
            ((64, 1500, 3000), in_place),
            ((700, 130, 1100), packed),
            ((130, 700, 1100), packed),
        ] {
            let example = Example::<E, f32>::new(shape, (lies, "old", 1.0));
            let alone = example.by(isa, Parallelism::None);
            for threads in [2, 3, 7] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                // The thread that waits, and the time it waits, differ every time.
                for _ in 0..8 {
                    let together = pool.install(|| example.by(isa, Parallelism::Rayon(threads)));
                    let same = alone.iter().zip(&together).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{:?} {isa:?} {shape:?} {lies:?}, {threads} threads", E::DTYPE);
                }
            }
        }
    }
}

/// Products of one block and of several: tasks pack panels alone or share them, keep their own sums
/// or those of all, read A or pack it.
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
                work_sharing::GIVEN.set(0);
                work_sharing::SEEMING.set(waiting);
                let halved = example.by(isa, Parallelism::None);
                work_sharing::SEEMING.set(0);
                assert!(
                    work_sharing::GIVEN.get() > 0,
                    "{isa:?} {shape:?} {lies:?}: nothing was given of {:?}",
                    E::DTYPE
                );
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
    // With 1216, and rows that begin with a cache line, AMX reads A in place. For columns of B,
    // panels are packed ahead for few rows and otherwise not (in 16 bits).
    let of_rows = [(67, 150, 1200, Lie::Rows), (67, 150, 1216, Lie::Rows)];
    let of_columns = [(530, 70, 384, Lie::Columns), (530, 70, 1216, Lie::Columns)];
    for (isa, (m, n, k, lie)) in
        available().flat_map(|isa| of_rows.into_iter().chain(of_columns).map(move |c| (isa, c)))
    {
        let (a, b) = (numbers::<E>(m * k, 1), numbers::<E>(k * n, 2));
        let whole_b = mat(&b, (k, n), lie);
        let part = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
            let mut c = vec![0f32; rows.len() * columns.len()];
            let at = (Mat(a[rows.start * k..].as_ptr(), k, 1), whole_b.at(0, columns.start));
            let dst = Mat(c.as_mut_ptr(), columns.len(), 1);
            let shape = (rows.len(), columns.len(), k);
            // SAFETY: the part lies in the whole.
            unsafe {
                gemm_on::<E, f32>(
                    isa,
                    shape,
                    dst,
                    Start::Zero,
                    None,
                    at.0,
                    at.1,
                    1.0,
                    Parallelism::None,
                )
            };
            c
        };
        let whole = part(0..m, 0..n);
        for (rows, columns) in [(0..1, 0..n), (5..38, 7..8), (60..67, 33..n), (m / 8..m, 0..n)] {
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

#[test]
fn few_rows_have_the_bits_that_they_have_among_many() {
    few_rows::<bf16>();
    few_rows::<f32>();
    few_rows::<f16>();
}

fn few_rows<E: Elem<Acc = f32>>() {
    for (isa, k) in available().flat_map(|isa| [0, 1, 31, 64, 77, 1030].map(|k| (isa, k))) {
        let (m, n) = (40, 2 * 32 + 21);
        // Rows of A and columns of B may be strided.
        let (a_row, b_column) = (k + 3, k + 5);
        let (a, b) = (numbers::<E>(m * a_row, 1), numbers::<E>(n * b_column, 2));
        let (bias, plus) = (numbers::<E>(n, 3), numbers::<E>(m * n, 4));
        let product = |first: usize, rows: usize, starts: bool, threads| {
            let mut c = numbers::<E>(rows * n, 5);
            let (a, b) = (Mat(a[first * a_row..].as_ptr(), a_row, 1), Mat(b.as_ptr(), 1, b_column));
            let (start, plus) = match starts {
                true => (Start::Bias(&bias[..]), Some((plus[first * n..].as_ptr(), n))),
                false => (Start::Zero, None),
            };
            let dst = Mat(c.as_mut_ptr(), n, 1);
            // SAFETY: the vectors have all elements that are read and written, and the machine has
            // the instruction set.
            unsafe { gemm_on::<E, E>(isa, (rows, n, k), dst, start, plus, a, b, 1.0, threads) };
            c.iter().map(|c| c.load().to_bits()).collect::<Vec<_>>()
        };
        for starts in [true, false] {
            let whole = product(0, m, starts, Parallelism::None);
            for rows in (1..=9).chain([17, 31, 32, 33]) {
                for threads in [Parallelism::None, Parallelism::Rayon(2)] {
                    let first = m - rows;
                    let few = product(first, rows, starts, threads);
                    assert!(
                        few == whole[first * n..],
                        "{isa:?}, {rows} rows, k {k}, {:?}",
                        E::DTYPE
                    );
                }
            }
        }
    }
}
