//! A thread panics within a product.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::super::kernel::{Ahead, Blocking, Interleaved, Kernel, Strip, To};
use super::super::portable::Portable;
use super::super::{Call, Mat, Start, workers};
use super::numbers;
use crate::tensor::element::Elem;

/// A micro-kernel whose first tile panics.
struct Panicking;

impl Kernel<f32> for Panicking {
    type Packed = f32;
    const MR: usize = <Portable as Kernel<f32>>::MR;
    const NR: usize = <Portable as Kernel<f32>>::NR;
    const KQ: usize = 1;

    fn blocking() -> Blocking {
        Blocking { alone: 0, ..<Portable as Kernel<f32>>::blocking() }
    }

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
        to: To<f32>,
        ahead: Ahead,
        interleaved: Option<Interleaved<f32, f32>>,
    ) {
        static CALLED: AtomicBool = AtomicBool::new(false);
        assert!(CALLED.swap(true, Ordering::Relaxed), "on purpose");
        // SAFETY: the caller's promise.
        unsafe { Portable::tile(rows, k, strip, panel, from, to, ahead, interleaved) }
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
        add: (*const C, usize),
    ) {
        // SAFETY: the caller's promise.
        unsafe { <Portable as Kernel<f32>>::finish(sums, rows, columns, to, scale, add) }
    }
}

/// The other thread waits for this task for ever, so the process has to end. The test therefore
/// starts a separate process.
#[test]
fn a_thread_that_panics_leaves_nobody_waiting() {
    const CHILD: &str = "KERNELS_TEST_PANICS";
    if std::env::var_os(CHILD).is_some() {
        let two = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        return two.install(|| {
            let (a, b, mut dst) =
                (numbers::<f32>(300 * 40, 1), numbers::<f32>(40 * 300, 2), vec![0f32; 300 * 300]);
            let (a, b) = (Mat(a.as_ptr(), 40, 1), Mat(b.as_ptr(), 300, 1));
            let dst = Mat(dst.as_mut_ptr(), 300, 1);
            let (shape, start, plus) = ((300, 300, 40), Start::Zero, None);
            let call = Call { shape, dst, start, plus, a, b, scale: 1.0, threads: 2 };
            // SAFETY: a is [300, 40], b [40, 300] and dst [300, 300]; the kernel needs no
            // instruction set.
            unsafe { workers::run::<f32, f32, Panicking>(call) }
        });
    }
    let name = "cpu::gemm::tests::panics::a_thread_that_panics_leaves_nobody_waiting";
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stderr(std::process::Stdio::piped());
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
    assert!(
        text.contains("on purpose") && text.contains("the process ends"),
        "{:?}: {text}",
        output.status
    );
}
