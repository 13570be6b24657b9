//! Whether a thread emulates a GPU, and what it asked of it: below all that touches tensors, which
//! tells here that it did.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

/// In which order threads of a block get their turns, and blocks are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Forward,
    Backward,
    /// Anew whenever every thread had a turn, from this seed.
    Shuffled(u64),
    /// A warp goes on for as long as it can before the next has a turn, so it writes early what
    /// slower ones have still to read.
    WarpByWarp,
}

static EVERYWHERE: AtomicBool = AtomicBool::new(false);

thread_local! {
    pub(crate) static HERE: Cell<Option<Order>> = const { Cell::new(None) };
}

/// Calls `f` with emulation on this thread: what it computes with tensors of f32, bf16 and f16 is
/// computed by GPUs' kernels.
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

/// What a thread asked of the emulated device: what would wait for a real one, or need the host's
/// memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels launched.
    pub launches: u64,
    /// Readings of the device's memory by the host, each of which waits until all launched kernels
    /// have run.
    pub waits: u64,
    /// Kernels launched before the last of them.
    pub launches_before_last_wait: u64,
    /// Times asked for.
    pub timestamps: u64,
    /// Copies of the host's values into new memory of the device.
    pub uploads: u64,
    /// Operations that touched elements by the CPU, by name, each once: on a real device there
    /// would be none to touch. Products are computed so here, by cuBLASLt there.
    pub on_the_host: Vec<&'static str>,
}

thread_local! {
    pub(crate) static COUNTS: RefCell<Counts> = RefCell::default();
    /// Whether it is this backend that looks at a tensor's storage.
    pub(crate) static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// What this thread asked for since it was last asked.
pub fn take_counts() -> Counts {
    COUNTS.take()
}

/// The host read the device's memory.
pub(crate) fn waited() {
    if is_on() {
        COUNTS.with_borrow_mut(|counts| {
            counts.waits += 1;
            counts.launches_before_last_wait = counts.launches;
        });
    }
}

/// The host copied values into the device's memory.
pub(crate) fn uploaded() {
    COUNTS.with_borrow_mut(|counts| counts.uploads += 1);
}

/// `op` touches elements of a tensor by the CPU.
pub(crate) fn touched(op: &'static str) {
    if is_on() && !INSIDE.get() {
        COUNTS.with_borrow_mut(|counts| {
            if !counts.on_the_host.contains(&op) {
                counts.on_the_host.push(op);
            }
        });
    }
}
