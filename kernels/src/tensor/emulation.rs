//! Whether a thread emulates a GPU, and counts of its requests. This module is below all code that
//! touches tensors, which reports to it.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

/// The order in which threads of a block take turns, and blocks start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Forward,
    Backward,
    /// Reshuffled after every thread had a turn, from this seed.
    Shuffled(u64),
    /// A warp runs as long as it can before the next has a turn, so it writes early to data that
    /// slower warps have still to read.
    WarpByWarp,
}

static EVERYWHERE: AtomicBool = AtomicBool::new(false);

thread_local! {
    pub(crate) static HERE: Cell<Option<Order>> = const { Cell::new(None) };
}

/// Calls `f` with emulation on this thread: GPU kernels compute its operations on f32, bf16 and f16
/// tensors.
pub fn run<R>(order: Order, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Order>);
    impl Drop for Restore {
        fn drop(&mut self) {
            HERE.set(self.0);
        }
    }
    let _restore = Restore(HERE.replace(Some(order)));
    f()
}

/// Emulates on all threads of the process from now on, for runs whose ranks are threads.
pub fn everywhere() {
    EVERYWHERE.store(true, Ordering::Relaxed);
}

/// Whether this thread emulates.
pub(crate) fn is_on() -> bool {
    HERE.get().is_some() || EVERYWHERE.load(Ordering::Relaxed)
}

/// A thread's requests to the emulated device that would make the host wait for a real one, or
/// would need the host's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels launched.
    pub launches: u64,
    /// Reads of device memory by the host. Each waits until all launched kernels have run.
    pub waits: u64,
    /// Kernels launched before the last wait.
    pub launches_before_last_wait: u64,
    /// Timestamps requested.
    pub timestamps: u64,
    /// Copies of host values into new device memory.
    pub uploads: u64,
    /// Operations that touched elements on the CPU, by name, each once. On a real device there are
    /// no elements in host memory. Matrix products are among them; cuBLASLt computes them on a GPU.
    pub on_the_host: Vec<&'static str>,
}

thread_local! {
    pub(crate) static COUNTS: RefCell<Counts> = RefCell::default();
    /// Whether this backend itself is looking at a tensor's storage.
    pub(crate) static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Returns this thread's counts since the last call, and resets them.
pub fn take_counts() -> Counts {
    COUNTS.take()
}

/// Records that the host read device memory.
pub(crate) fn waited() {
    if is_on() {
        COUNTS.with_borrow_mut(|counts| {
            counts.waits += 1;
            counts.launches_before_last_wait = counts.launches;
        });
    }
}

/// Records that the host copied values into device memory.
pub(crate) fn uploaded() {
    COUNTS.with_borrow_mut(|counts| counts.uploads += 1);
}

/// Records that `op` touches elements of a tensor on the CPU.
pub(crate) fn touched(op: &'static str) {
    if is_on() && !INSIDE.get() {
        COUNTS.with_borrow_mut(|counts| {
            if !counts.on_the_host.contains(&op) {
                counts.on_the_host.push(op);
            }
        });
    }
}
