//! Work sharing: a thread of a product without work gets some from threads that still have work.
//!
//! Threads of a machine with other load are not equally fast, and tasks are few if each has to pack
//! its own operands. So a thread that still has rows to compute gives half of them away once
//! another thread waits. While all threads have tasks, nothing is given away, and this costs
//! nothing.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Spins of a waiting thread before it yields.
const SPINS: usize = 10_000;

/// Waits until `done`; at first spins without yielding.
pub fn wait_until(mut done: impl FnMut() -> bool) {
    let mut spins = 0;
    while !done() {
        spins += 1;
        if spins < SPINS {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// Does `work` that other threads wait for, or that other threads' memory depends on. If it panics,
/// the process ends; otherwise the others would wait for ever or write to freed memory.
pub fn or_end_process(work: impl FnOnce()) {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            eprintln!(
                "a thread of a matrix product panicked, so the process ends; please report this defect"
            );
            std::process::abort();
        }
    }
    let end = End;
    work();
    std::mem::forget(end);
}

#[cfg(test)]
thread_local! {
    /// Parts that this thread gave away.
    pub static GIVEN: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    /// Threads that seem to wait from the beginning for parts of this thread's products. In the end
    /// this thread itself takes the parts that it gave to them.
    pub static SEEMING: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Parts that were given away.
pub struct WorkSharing<P> {
    /// Waiting threads, except those that were given a part.
    waiting: AtomicUsize,
    /// Parts that no thread has taken yet.
    ready: AtomicUsize,
    /// Parts that were given away and are not computed yet.
    unfinished: AtomicUsize,
    parts: Mutex<Vec<P>>,
}

impl<P> WorkSharing<P> {
    pub fn new() -> Self {
        #[cfg(test)]
        let waiting = SEEMING.get();
        #[cfg(not(test))]
        let waiting = 0;
        let [waiting, ready, unfinished] = [waiting, 0, 0].map(AtomicUsize::new);
        Self { waiting, ready, unfinished, parts: Mutex::new(Vec::new()) }
    }

    /// Whether a thread waits.
    #[inline(always)]
    pub fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Gives a part to a waiting thread, if there is one. Only a thread that computes may give.
    pub fn give(&self, part: impl FnOnce() -> P) -> bool {
        let claim = |waiting: usize| waiting.checked_sub(1);
        if !self.is_wanted()
            || self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).is_err()
        {
            return false;
        }
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).push(part());
        self.ready.fetch_add(1, Ordering::Release);
        #[cfg(test)]
        GIVEN.set(GIVEN.get() + 1);
        true
    }

    /// The next part, for a thread without other work. `None` once everything is computed: `done`,
    /// and every part that was given away.
    pub fn take(&self, done: impl Fn() -> bool) -> Option<P> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut taken = None;
        wait_until(|| {
            if self.ready.load(Ordering::Acquire) > 0 {
                taken = self.parts.lock().unwrap_or_else(PoisonError::into_inner).pop();
                if taken.is_some() {
                    self.ready.fetch_sub(1, Ordering::Relaxed);
                }
            }
            // The order matters: a thread gives a part before its own work is done.
            taken.is_some() || done() && self.unfinished.load(Ordering::Acquire) == 0
        });
        taken
    }

    /// Records that a taken part is computed.
    pub fn finished(&self) {
        self.unfinished.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_given_while_nobody_waits() {
        let sharing = WorkSharing::new();
        assert!(!sharing.give(|| -> usize { panic!("a part was made for nobody") }));
        assert_eq!(sharing.take(|| true), None);
    }

    /// Threads halve ranges as long as others wait. In the end every number was counted once, and
    /// all threads returned.
    #[test]
    fn every_part_is_computed_once_before_any_thread_leaves() {
        for threads in 1..6 {
            let sharing: WorkSharing<std::ops::Range<usize>> = WorkSharing::new();
            let (done, count) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let compute = |mut part: std::ops::Range<usize>| {
                while !part.is_empty() {
                    let middle = part.start + part.len() / 2;
                    if part.len() > 1 && sharing.give(|| middle..part.end) {
                        part.end = middle;
                    }
                    count.fetch_add(part.start, Ordering::Relaxed);
                    part.start += 1;
                }
            };
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let (sharing, done, count, compute) = (&sharing, &done, &count, &compute);
                    scope.spawn(move || {
                        if thread == 0 {
                            compute(0..20_000);
                            done.fetch_add(1, Ordering::Release);
                        }
                        while let Some(part) = sharing.take(|| done.load(Ordering::Acquire) == 1) {
                            compute(part);
                            sharing.finished();
                        }
                        assert_eq!(
                            count.load(Ordering::Relaxed),
                            19_999 * 10_000,
                            "{threads} threads"
                        );
                    });
                }
            });
        }
    }
}
