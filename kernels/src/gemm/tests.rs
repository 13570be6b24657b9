//! Products on every instruction set that this machine has, against sums in f64 of the same operands.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::gemm::Parallelism;
use candle_core::DType;
use half::{bf16, f16};

use super::kernel::{Ahead, Blocking, Chore, Kernel, Strip};
use super::portable::Portable;
use super::{Mat, Start, crew, gemm_on, help};
use crate::float::{Elem, Float};
use crate::simd::Isa;

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

/// A micro-kernel whose first tile panics.
struct Panicking;

impl Kernel<f32> for Panicking {
    type Packed = f32;
    const MR: usize = 6;
    const NR: usize = 8;
    const KQ: usize = 1;
    const BLOCKING: Blocking = Blocking { alone: 0, ..<Portable as Kernel<f32>>::BLOCKING };

    unsafe fn pack_a(a: Mat<*const f32>, rows: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { Portable::pack_a(a, rows, k, to) }
    }

    unsafe fn pack_b(b: Mat<*const f32>, columns: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { Portable::pack_b(b, columns, k, to) }
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<f32, f32>,
        panel: *const f32,
        from: (*const f32, usize),
        to: (*mut f32, usize),
        ahead: Ahead,
        chore: Option<Chore<f32, f32>>,
    ) {
        static CALLED: AtomicBool = AtomicBool::new(false);
        assert!(CALLED.swap(true, Ordering::Relaxed), "on purpose");
        // SAFETY: the caller's promise.
        unsafe { Portable::tile(rows, k, strip, panel, from, to, ahead, chore) }
    }

    fn leaves_other_rows(rows: usize) -> bool {
        <Portable as Kernel<f32>>::leaves_other_rows(rows)
    }

    unsafe fn finish<C: Elem<Acc = f32>>(
        sums: *const f32,
        rows: usize,
        columns: usize,
        to: (*mut C, usize),
        scale: f32,
        add: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe { <Portable as Kernel<f32>>::finish(sums, rows, columns, to, scale, add) }
    }
}

/// The other thread waits for that task for ever, so the process has to end; it is one of its own.
#[test]
fn a_thread_that_panics_leaves_nobody_waiting() {
    const CHILD: &str = "KERNELS_TEST_PANICS";
    if std::env::var_os(CHILD).is_some() {
        let two = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        return two.install(|| {
            let (a, b, mut dst) = (numbers::<f32>(300 * 40, 1), numbers::<f32>(40 * 300, 2), vec![0f32; 300 * 300]);
            let (a, b) = (Mat(a.as_ptr(), 40, 1), Mat(b.as_ptr(), 300, 1));
            let dst = Mat(dst.as_mut_ptr(), 300, 1);
            // SAFETY: a is [300, 40], b [40, 300] and dst [300, 300]; the kernel needs no instruction set.
            unsafe { crew::run::<f32, f32, Panicking>((300, 300, 40), dst, Start::Zero, a, b, 1.0, 2) }
        });
    }
    let name = "gemm::tests::a_thread_that_panics_leaves_nobody_waiting";
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args([name, "--exact", "--nocapture"]).env(CHILD, "1").stderr(std::process::Stdio::piped());
    let mut child = test.spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("on purpose") && text.contains("the process ends"), "{:?}: {text}", output.status);
}

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

/// How the rows of a matrix lie in memory.
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

const ROOM: usize = 4; // times the elements, and 64 of them: enough for every lie

/// How a product is asked for: how A, B and C lie, what it starts from, its scale.
type Case = ([Lie; 3], &'static str, f32);

/// A product's operands and what it should give.
struct Example<E, C> {
    shape: (usize, usize, usize),
    case: Case,
    a: Vec<E>,
    b: Vec<E>,
    c: Vec<C>,
    bias: Vec<E>,
}

impl<E: Elem<Acc = f32>, C: Elem<Acc = f32>> Example<E, C> {
    fn new(shape: (usize, usize, usize), case: Case) -> Self {
        let (m, n, k) = shape;
        let [a, b] = [(m * k, 1), (k * n, 2)].map(|(len, seed)| numbers::<E>(ROOM * len + 64, seed));
        Self { shape, case, a, b, c: numbers(ROOM * m * n + 64, 3), bias: numbers(n, 4) }
    }

    fn operands(&self) -> (Mat<*const E>, Mat<*const E>) {
        let ((m, n, k), [lie_a, lie_b, _]) = (self.shape, self.case.0);
        (mat(&self.a, (m, k), lie_a), mat(&self.b, (k, n), lie_b))
    }

    fn by(&self, isa: Isa, threads: Parallelism) -> Vec<C> {
        let ((m, n, _), (lies, start, scale)) = (self.shape, self.case);
        let ((a, b), (row, column)) = (self.operands(), strides((m, n), lies[2]));
        let mut c = self.c.clone();
        let start = match start {
            "zero" => Start::Zero,
            "old" => Start::Old,
            _ => Start::Bias(&self.bias),
        };
        // SAFETY: the vectors have room for every lie, and the machine has the instruction set.
        unsafe { gemm_on(isa, self.shape, Mat(c.as_mut_ptr(), row, column), start, a, b, scale, threads) };
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
                    (*a.0.add(r * a.1 + i * a.2)).load().f64() * (*b.0.add(i * b.1 + j * b.2)).load().f64()
                };
                let first = match start {
                    "zero" => 0.0,
                    "old" => want[r * row + j * column],
                    _ => self.bias[j].load().f64(),
                };
                want[r * row + j * column] = first + f64::from(scale) * (0..k).map(term).sum::<f64>();
            }
        }
        want
    }
}

/// Half a unit of C in the last place of `exact`, and what k roundings of f32 sums of k terms below 1 add up to: partial sums
/// are about √k, and independent errors grow as √k.
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
        let cases: [Case; 7] = [
            ([Rows, Columns, Rows], "zero", 1.0),
            ([Rows, Columns, Rows], "bias", 1.0),
            ([Rows, Rows, Apart], "zero", 0.125),
            ([Columns, Rows, Rows], "old", 1.0),
            ([Columns, Rows, Rows], "old", -0.5),
            ([Apart, Apart, Columns], "old", 2.0),
            ([Scattered, Scattered, Rows], "bias", 1.0),
        ];
        for case in cases {
            let example = Example::<E, C>::new(shape, case);
            let want = example.exact();
            for isa in available() {
                for (i, (got, want)) in example.by(isa, Parallelism::None).iter().zip(&want).enumerate() {
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

/// Chores beside tiles of any number of rows, of whole strips and panels and of the last, narrower ones.
#[cfg(target_arch = "x86_64")]
#[test]
fn chores_pack_as_packing_alone_does() {
    use super::driver::{pack_panels, pack_strips};
    use super::kernel::{Ahead, Chore, Kernel, Next, Pack, Strip};

    fn check<E: Elem<Acc = f32>, K: Kernel<E>>()
    where
        K::Packed: Elem,
    {
        let k = 86; // not a multiple of a tile's shares
        let zeros = vec![K::Packed::store(Float::of(0.0)); K::MR.max(K::NR) * k];
        let mut sums = vec![0f32; K::MR * K::NR];
        for (is_panel, unit) in [(false, K::MR), (true, K::NR)] {
            for width in [1, unit / 2 + 2, unit] {
                let row = width + 3;
                let from = numbers::<E>(k * row, 5);
                let mut want = zeros.clone();
                // SAFETY: the memory has the sizes that are named.
                unsafe {
                    if is_panel {
                        pack_panels::<E, K>(Mat(from.as_ptr(), row, 1), width, k, want.as_mut_ptr());
                    } else {
                        pack_strips::<E, K>(Mat(from.as_ptr(), 1, row), width, k, want.as_mut_ptr());
                    }
                }
                for rows in 1..=K::MR {
                    let mut got = zeros.clone();
                    let pack = Pack { from: from.as_ptr(), row, width, k, to: got.as_mut_ptr(), is_panel };
                    let nothing = Next::nothing(std::ptr::null());
                    // SAFETY: strips and panels have so many zeros, and sums MR rows of NR.
                    unsafe {
                        let (from, to) = ((std::ptr::null(), 0), (sums.as_mut_ptr(), K::NR));
                        let ahead = Ahead { written: nothing, read: nothing };
                        let strip = Strip::Packed(zeros.as_ptr());
                        K::tile(rows, k, strip, zeros.as_ptr(), from, to, ahead, Some(Chore::Pack(pack)));
                    }
                    let same = got.iter().zip(&want).all(|(got, want)| got.load().f64() == want.load().f64());
                    assert!(same, "{:?}, panel {is_panel}, {width} wide, beside {rows} rows", E::DTYPE);
                }
            }
        }
    }
    if Isa::supported() >= Isa::Avx512 {
        check::<f32, super::avx512::Avx512>();
        check::<f16, super::avx512::Avx512>();
    }
    if Isa::supported() >= Isa::Avx512Bf16 {
        check::<bf16, super::avx512bf16::Avx512Bf16>();
    }
}

/// A copy of `values` behind which lies memory that must not be read.
#[cfg(target_os = "linux")]
fn guarded<E: Elem>(values: &[E]) -> &'static [E] {
    let bytes = size_of_val(values);
    // SAFETY: a length the system gives.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let room = bytes.next_multiple_of(page);
    // SAFETY: new memory, of which the last page is taken back and the values end where it begins. It is never given back.
    unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let memory = libc::mmap(std::ptr::null_mut(), room + page, access, kind, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(memory.byte_add(room), page, libc::PROT_NONE), 0);
        let to = memory.byte_add(room - bytes).cast::<E>();
        to.copy_from_nonoverlapping(values.as_ptr(), values.len());
        std::slice::from_raw_parts(to, values.len())
    }
}

/// Operands that end where memory ends: who reads behind them ends the test with a signal.
#[cfg(target_os = "linux")]
#[test]
fn nothing_behind_an_operand_is_read() {
    fn read<E: Elem<Acc = f32>>() {
        for (m, n, k) in [(47, 37, 70), (37, 70, 450), (19, 45, 1100), (3, 5, 33)] {
            let (a, b) = (guarded(&numbers::<E>(m * k, 1)), guarded(&numbers::<E>(k * n, 2)));
            for isa in available() {
                for (lie_a, lie_b) in [(Lie::Rows, Lie::Rows), (Lie::Rows, Lie::Columns), (Lie::Columns, Lie::Rows)] {
                    let mut c = vec![0f32; m * n];
                    let (a, b, dst) = (mat(a, (m, k), lie_a), mat(b, (k, n), lie_b), Mat(c.as_mut_ptr(), n, 1));
                    // SAFETY: the vectors have the shapes.
                    unsafe { gemm_on::<E, f32>(isa, (m, n, k), dst, Start::Zero, a, b, 1.0, Parallelism::None) };
                }
            }
        }
    }
    read::<f32>();
    read::<bf16>();
    read::<f16>();
}

/// In 16 bits panels are packed ahead of B's that are larger than caches only.
#[test]
fn large_panels_packed_ahead_are_exact_but_for_rounding() {
    let shape = (33, 4100, 1100);
    let example = Example::<bf16, f32>::new(shape, ([Lie::Rows, Lie::Columns, Lie::Rows], "old", 1.0));
    let want = example.exact();
    for isa in available() {
        for (i, (&got, &want)) in example.by(isa, Parallelism::None).iter().zip(&want).enumerate() {
            let error = (f64::from(got) - want).abs();
            assert!(error <= allowed::<f32>(shape.2, want), "{isa:?}, element {i}: {got}, want {want}");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let lies = [Lie::Rows, Lie::Columns, Lie::Rows];
    for isa in available() {
        for shape in [(300, 700, 1100), (1000, 130, 100), (64, 1500, 3000)] {
            let example = Example::<bf16, f32>::new(shape, (lies, "old", 1.0));
            let alone = example.by(isa, Parallelism::None);
            for threads in [2, 3, 7] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let together = pool.install(|| example.by(isa, Parallelism::Rayon(threads)));
                assert!(alone.iter().zip(&together).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?} {shape:?}");
            }
        }
    }
}

/// Products of one block and of several, whose tasks pack panels alone or share them, keep sums of tasks or of all, read A or pack it.
#[test]
fn rows_given_to_threads_that_wait_have_the_same_bits() {
    let (rows, columns) = (Lie::Rows, Lie::Columns);
    for isa in available() {
        for (shape, lies) in [
            ((1500, 130, 384), [rows, columns, rows]),
            ((1500, 130, 1536), [rows, columns, rows]),
            ((1500, 130, 1536), [columns, rows, rows]),
            ((1500, 130, 1300), [columns, rows, rows]),
            ((130, 1500, 1300), [columns, rows, rows]),
            ((1500, 3000, 1100), [rows, columns, rows]),
            ((700, 3000, 2500), [rows, rows, rows]),
            ((1000, 260, 777), [columns, columns, columns]),
        ] {
            let example = Example::<bf16, f32>::new(shape, (lies, "old", 1.0));
            let whole = example.by(isa, Parallelism::None);
            for waiting in [1, 2, 5] {
                help::GIVEN.set(0);
                help::SEEMING.set(waiting);
                let halved = example.by(isa, Parallelism::None);
                help::SEEMING.set(0);
                assert!(help::GIVEN.get() > 0, "{isa:?} {shape:?} {lies:?}: nothing was given");
                let same = whole.iter().zip(&halved).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa:?} {shape:?} {lies:?}, {waiting} waiting");
            }
        }
    }
}

#[test]
fn an_element_is_the_same_however_rows_and_columns_are_cut() {
    // With 1216, and rows that begin with a cache line, AMX reads A where it lies.
    let (m, n) = (67, 150);
    for (isa, k) in available().flat_map(|isa| [(isa, 1200), (isa, 1216)]) {
        let (a, b) = (numbers::<bf16>(m * k, 1), numbers::<bf16>(k * n, 2));
        let part = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
            let mut c = vec![0f32; rows.len() * columns.len()];
            let at = (Mat(a[rows.start * k..].as_ptr(), k, 1), Mat(b[columns.start..].as_ptr(), n, 1));
            let dst = Mat(c.as_mut_ptr(), columns.len(), 1);
            let shape = (rows.len(), columns.len(), k);
            // SAFETY: the part lies in the whole.
            unsafe { gemm_on::<bf16, f32>(isa, shape, dst, Start::Zero, at.0, at.1, 1.0, Parallelism::None) };
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

#[test]
fn infinities_and_nans_stay_in_their_rows_and_columns() {
    let (m, n, k) = (35, 70, 45);
    for isa in available() {
        let (mut a, mut b) = (numbers::<bf16>(m * k, 1), numbers::<bf16>(k * n, 2));
        (a[3 * k + 44], a[34 * k]) = (bf16::NAN, bf16::INFINITY);
        b[44 * n + 69] = bf16::NEG_INFINITY;
        let mut c = vec![0f32; m * n];
        let (a, b) = (Mat(a.as_ptr(), k, 1), Mat(b.as_ptr(), n, 1));
        // SAFETY: the vectors have the shapes.
        unsafe {
            let dst = Mat(c.as_mut_ptr(), n, 1);
            gemm_on::<bf16, f32>(isa, (m, n, k), dst, Start::Zero, a, b, 1.0, Parallelism::None);
        }
        for (i, v) in c.iter().enumerate() {
            match (i / n, i % n) {
                (3, _) => assert!(v.is_nan(), "{isa:?} {i}"),
                (34, _) | (_, 69) => assert!(!v.is_finite(), "{isa:?} {i}"),
                _ => assert!(v.is_finite(), "{isa:?} {i}"),
            }
        }
    }
}

#[test]
fn subnormal_operands_count_or_are_zero() {
    for isa in available() {
        let (a, b) = ([bf16::from_bits(1)], [bf16::from_f32(1.0)]);
        let mut c = [7f32];
        let (a, b) = (Mat(a.as_ptr(), 1, 1), Mat(b.as_ptr(), 1, 1));
        // SAFETY: one element each.
        unsafe {
            let dst = Mat(c.as_mut_ptr(), 1, 1);
            gemm_on::<bf16, f32>(isa, (1, 1, 1), dst, Start::Zero, a, b, 1.0, Parallelism::None);
        }
        let flushed = isa >= Isa::Avx512Bf16;
        assert_eq!(c[0], if flushed { 0.0 } else { bf16::from_bits(1).to_f32() }, "{isa:?}");
    }
}

#[test]
fn an_empty_inner_dimension_gives_the_start() {
    let nothing = [bf16::ZERO; 1];
    let bias = [1.0, 2.0, 3.0].map(bf16::from_f32);
    for isa in available() {
        for (start, want) in [(Start::Zero, [0.0; 3]), (Start::Old, [5.0; 3]), (Start::Bias(&bias), [1.0, 2.0, 3.0])] {
            let mut c = [5f32; 6];
            let none = Mat(nothing.as_ptr(), 0, 1);
            // SAFETY: there is nothing to read.
            unsafe {
                let dst = Mat(c.as_mut_ptr(), 3, 1);
                gemm_on::<bf16, f32>(isa, (2, 3, 0), dst, start, none, none, 1.0, Parallelism::None);
            }
            assert_eq!(c, [want, want].concat()[..], "{isa:?} {start:?}");
        }
    }
}
