//! Threads that have finished their part of an operation stay awake for the next one.
//!
//! Rayon's threads go to sleep after some ten microseconds without work, and waking one takes
//! longer than many operations between two products do. As those of OpenMP, ours wait a little
//! longer first; whoever else wants their cores gets them meanwhile.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a thread looks for work before it may sleep: a multiple of what a step spends between
/// operations, and little beside what waits for disks and users.
const SPIN_TIME: Duration = Duration::from_millis(1);

thread_local! {
    static SPINS: Cell<bool> = const { Cell::new(false) };
    /// Operations for whose end this thread waits, or will.
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// An operation that the calling thread waits for: until it ends, the thread may not stay anywhere
/// else.
pub struct Call(());

impl Call {
    pub fn begin() -> Self {
        CALLS.set(CALLS.get() + 1);
        Self(())
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.set(CALLS.get() - 1);
    }
}

/// Whether the calling thread has nobody waiting for it.
fn is_free() -> bool {
    CALLS.get() == 0
}

/// Has the calling thread of the pool stay awake once it has finished its job, which must not be
/// one that waits for others.
pub fn after_job() {
    let here = rayon::current_thread_index();
    if here.is_some() && !SPINS.get() && is_free() {
        // Another thread, which waits for a job, may take this one meanwhile.
        rayon::spawn(move || {
            if rayon::current_thread_index() == here && is_free() {
                spin();
            }
        });
    }
}

/// Runs the pool's jobs until there have been none for a while.
fn spin() {
    SPINS.set(true);
    let mut idle_since = Instant::now();
    while spin_forever() || idle_since.elapsed() < SPIN_TIME {
        match rayon::yield_now() {
            Some(rayon::Yield::Executed) => idle_since = Instant::now(),
            _ => std::thread::yield_now(),
        }
    }
    SPINS.set(false);
}

#[cfg(test)]
static SPIN_FOREVER: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Whether threads spin without end.
fn spin_forever() -> bool {
    #[cfg(test)]
    return SPIN_FOREVER.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(test))]
    false
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::SPIN_FOREVER;
    use crate::tensor::parallel;

    /// Pools, and operations that each caller calls on one.
    const ROUNDS: usize = 40;
    const OPERATIONS: usize = 3;

    /// How many parts of operations threads of a new pool do, which spin without end. Operations
    /// are called by so many threads outside of the pool, or by one within.
    fn parts_done(threads: usize, callers: Option<usize>) -> usize {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let parts = AtomicUsize::new(0);
        let one = || {
            parallel::on_threads(threads, |thread| {
                assert!(thread < threads);
                // Long enough that others come and take something.
                std::thread::sleep(Duration::from_micros(20));
                parts.fetch_add(1, Ordering::Relaxed);
            })
        };
        SPIN_FOREVER.store(true, Ordering::Relaxed);
        match callers {
            None => pool.install(|| (0..OPERATIONS).for_each(|_| one())),
            Some(callers) => std::thread::scope(|scope| {
                for _ in 0..callers {
                    scope.spawn(|| (0..OPERATIONS).for_each(|_| pool.install(one)));
                }
            }),
        }
        SPIN_FOREVER.store(false, Ordering::Relaxed);
        parts.into_inner()
    }

    #[test]
    fn operations_end_though_threads_spin_without_end() {
        const CASES: [(usize, Option<usize>); 9] = {
            let (one, four) = (Some(1), Some(4));
            [
                (2, None),
                (2, one),
                (2, four),
                (3, None),
                (3, one),
                (3, four),
                (5, None),
                (5, one),
                (5, four),
            ]
        };
        let (done, ended) = mpsc::channel();
        std::thread::spawn(move || {
            for (threads, callers) in CASES {
                done.send((0..ROUNDS).map(|_| parts_done(threads, callers)).sum()).unwrap();
            }
        });
        for (threads, callers) in CASES {
            let parts: usize = ended.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| {
                SPIN_FOREVER.store(false, Ordering::Relaxed);
                panic!("{threads} threads, {callers:?} callers: one that waits spins");
            });
            assert_eq!(
                parts,
                ROUNDS * OPERATIONS * threads * callers.unwrap_or(1),
                "{threads} threads, {callers:?} callers"
            );
        }
    }
}
