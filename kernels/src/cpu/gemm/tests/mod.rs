//! Products on every instruction set of this machine, compared with sums in f64 of the same
//! operands.

mod bits;
#[cfg(target_arch = "x86_64")]
mod interleave;
mod panics;
mod special;

use ::gemm::Parallelism;
use candle_core::DType;
use half::{bf16, f16};

use super::{Mat, Start, gemm_on};
use crate::tensor::element::{Elem, Float};
use crate::tensor::simd::Isa;

/// Rows, columns, inner dimension: edges of every tile size, several blocks and phases.
const SHAPES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (3, 5, 7),
    (14, 32, 33),
    (16, 40, 2),
    (33, 65, 31),
    (70, 130, 600),
    (100, 70, 640),
    (200, 31, 1100),
    (61, 1100, 129),
    (5, 1030, 2600),
];

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|&isa| isa <= Isa::supported())
}

/// Numbers in (−1, 1) that depend on `seed`.
fn numbers<E: Elem<Acc = f32>>(n: usize, seed: u64) -> Vec<E> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        E::store((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Layout of a matrix in memory.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Rows,
    Columns,
    /// Rows with a gap between them.
    Apart,
    /// Elements with gaps between them.
    Scattered,
}

fn mat<E>(data: &[E], (rows, columns): (usize, usize), lie: Lie) -> Mat<*const E> {
    let (row, column) = strides((rows, columns), lie);
    assert!((rows - 1) * row + (columns - 1) * column < data.len());
    Mat(data.as_ptr(), row, column)
}

fn strides((rows, columns): (usize, usize), lie: Lie) -> (usize, usize) {
    match lie {
        Lie::Rows => (columns, 1),
        Lie::Columns => (1, rows),
        Lie::Apart => (columns + 5, 1),
        Lie::Scattered => (2 * columns + 3, 2),
    }
}

const ROOM: usize = 4; // times the elements, plus 64: enough for every layout

/// A variant of a product: the layouts of A, B and C, the start ("plus": the bias, and a matrix is
/// added), and the scale.
type Case = ([Lie; 3], &'static str, f32);

/// A product's operands and settings.
struct Example<E, C> {
    shape: (usize, usize, usize),
    case: Case,
    a: Vec<E>,
    b: Vec<E>,
    c: Vec<C>,
    bias: Vec<E>,
    /// Rows of n, with [`GAP`] elements between them.
    plus: Vec<C>,
}

const GAP: usize = 3;

impl<E: Elem<Acc = f32>, C: Elem<Acc = f32>> Example<E, C> {
    fn new(shape: (usize, usize, usize), case: Case) -> Self {
        let (m, n, k) = shape;
        let [a, b] =
            [(m * k, 1), (k * n, 2)].map(|(len, seed)| numbers::<E>(ROOM * len + 64, seed));
        Self {
            shape,
            case,
            a,
            b,
            c: numbers(ROOM * m * n + 64, 3),
            bias: numbers(n, 4),
            plus: numbers(m * (n + GAP), 5),
        }
    }

    fn operands(&self) -> (Mat<*const E>, Mat<*const E>) {
        let ((m, n, k), [lie_a, lie_b, _]) = (self.shape, self.case.0);
        (mat(&self.a, (m, k), lie_a), mat(&self.b, (k, n), lie_b))
    }

    fn by(&self, isa: Isa, threads: Parallelism) -> Vec<C> {
        let ((m, n, _), (lies, start, scale)) = (self.shape, self.case);
        let ((a, b), (row, column)) = (self.operands(), strides((m, n), lies[2]));
        let mut c = self.c.clone();
        let plus = (start == "plus").then(|| (self.plus.as_ptr(), n + GAP));
        let start = match start {
            "zero" => Start::Zero,
            "old" => Start::Old,
            _ => Start::Bias(&self.bias),
        };
        // SAFETY: the vectors have room for every layout, and the machine has the instruction set.
        unsafe {
            gemm_on(
                isa,
                self.shape,
                Mat(c.as_mut_ptr(), row, column),
                start,
                plus,
                a,
                b,
                scale,
                threads,
            )
        };
        c
    }

    fn exact(&self) -> Vec<f64> {
        let ((m, n, k), (lies, start, scale)) = (self.shape, self.case);
        let ((a, b), (row, column)) = (self.operands(), strides((m, n), lies[2]));
        let mut want: Vec<f64> = self.c.iter().map(|v| v.load().f64()).collect();
        for r in 0..m {
            for j in 0..n {
                // SAFETY: both matrices have these elements.
                let term = |i: usize| unsafe {
                    (*a.0.add(r * a.1 + i * a.2)).load().f64()
                        * (*b.0.add(i * b.1 + j * b.2)).load().f64()
                };
                let first = match start {
                    "zero" => 0.0,
                    "old" => want[r * row + j * column],
                    "plus" => self.bias[j].load().f64() + self.plus[r * (n + GAP) + j].load().f64(),
                    _ => self.bias[j].load().f64(),
                };
                want[r * row + j * column] =
                    first + f64::from(scale) * (0..k).map(term).sum::<f64>();
            }
        }
        want
    }
}

/// Half a unit of C in the last place of `exact`, plus the accumulated rounding errors of k f32
/// additions of terms below 1: partial sums are about √k, and independent errors grow as √k.
fn allowed<C: Elem>(k: usize, exact: f64) -> f64 {
    let unit = match C::DTYPE {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    };
    unit * exact.abs() + 2f64.powi(-23) * (k + 4) as f64
}

fn check<E: Elem<Acc = f32>, C: Elem<Acc = f32>>() {
    use Lie::{Apart, Columns, Rows, Scattered};
    for shape in SHAPES {
        let cases: [Case; 9] = [
            ([Rows, Columns, Rows], "zero", 1.0),
            ([Rows, Columns, Rows], "bias", 1.0),
            ([Rows, Rows, Apart], "zero", 0.125),
            ([Columns, Rows, Rows], "old", 1.0),
            ([Columns, Rows, Rows], "old", -0.5),
            ([Apart, Apart, Columns], "old", 2.0),
            ([Scattered, Scattered, Rows], "bias", 1.0),
            ([Rows, Columns, Rows], "plus", 1.0),
            ([Columns, Rows, Columns], "plus", 1.0),
        ];
        for case in cases {
            let example = Example::<E, C>::new(shape, case);
            let want = example.exact();
            for isa in available() {
                for (i, (got, want)) in
                    example.by(isa, Parallelism::None).iter().zip(&want).enumerate()
                {
                    let error = (got.load().f64() - want).abs();
                    assert!(
                        error <= allowed::<C>(shape.2, *want) * f64::from(case.2.abs().max(1.0)),
                        "{isa:?} {:?} -> {:?} {shape:?} {case:?}, element {i}: {}, want {want}",
                        E::DTYPE,
                        C::DTYPE,
                        got.load()
                    );
                }
            }
        }
    }
}

#[test]
fn f32_is_exact_but_for_rounding_and_leaves_gaps_alone() {
    check::<f32, f32>();
}

#[test]
fn bf16_is_exact_but_for_rounding_and_leaves_gaps_alone() {
    check::<bf16, bf16>();
    check::<bf16, f32>();
}

#[test]
fn f16_is_exact_but_for_rounding_and_leaves_gaps_alone() {
    check::<f16, f16>();
    check::<f16, f32>();
}

/// A copy of `values` that is followed by memory that must not be read.
#[cfg(target_os = "linux")]
fn guarded<E: Elem>(values: &[E]) -> &'static [E] {
    let bytes = size_of_val(values);
    // SAFETY: only asks for the page size.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let room = bytes.next_multiple_of(page);
    // SAFETY: new memory. Its last page is unmapped, and the values end where that page begins. The
    // memory is never freed.
    unsafe {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let memory = libc::mmap(std::ptr::null_mut(), room + page, access, kind, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(memory.byte_add(room), page, libc::PROT_NONE), 0);
        let to = memory.byte_add(room - bytes).cast::<E>();
        to.copy_from_nonoverlapping(values.as_ptr(), values.len());
        std::slice::from_raw_parts(to, values.len())
    }
}

/// Operands end where readable memory ends: a read beyond them ends the test with a signal.
#[cfg(target_os = "linux")]
#[test]
fn nothing_behind_an_operand_is_read() {
    fn read<E: Elem<Acc = f32>>() {
        for (m, n, k) in [(47, 37, 70), (37, 70, 450), (19, 45, 1100), (3, 5, 33)] {
            let (a, b) = (guarded(&numbers::<E>(m * k, 1)), guarded(&numbers::<E>(k * n, 2)));
            for isa in available() {
                for (lie_a, lie_b) in
                    [(Lie::Rows, Lie::Rows), (Lie::Rows, Lie::Columns), (Lie::Columns, Lie::Rows)]
                {
                    let mut c = vec![0f32; m * n];
                    let (a, b, dst) =
                        (mat(a, (m, k), lie_a), mat(b, (k, n), lie_b), Mat(c.as_mut_ptr(), n, 1));
                    // SAFETY: the vectors have these shapes.
                    unsafe {
                        gemm_on::<E, f32>(
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
            }
        }
    }
    read::<f32>();
    read::<bf16>();
    read::<f16>();
}

/// In 16 bits and with this many rows, panels are packed ahead only for a B that is larger than the
/// caches.
#[test]
fn large_panels_packed_ahead_are_exact_but_for_rounding() {
    let shape = (520, 2100, 1000);
    let example =
        Example::<bf16, f32>::new(shape, ([Lie::Rows, Lie::Columns, Lie::Rows], "old", 1.0));
    let want = example.exact();
    for isa in available() {
        for (i, (&got, &want)) in example.by(isa, Parallelism::None).iter().zip(&want).enumerate() {
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= allowed::<f32>(shape.2, want),
                "{isa:?}, element {i}: {got}, want {want}"
            );
        }
    }
}
