//! Keeps threads that have finished their part of an operation awake for the next one.
//!
//! Rayon's threads go to sleep after some ten microseconds without work. Waking one takes longer
//! than many operations between two matrix products. Like those of OpenMP, our threads therefore
//! spin a little longer first; meanwhile they yield their cores to other work.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a thread looks for work before it may sleep. This is a multiple of the time between a
/// step's operations, and short compared with waits for disks and users.
const SPIN_TIME: Duration = Duration::from_millis(1);

thread_local! {
    static SPINS: Cell<bool> = const { Cell::new(false) };
    /// Number of operations that this thread waits for, or will wait for.
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// An operation that the calling thread waits for. Until it ends, the thread must not spin anywhere
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

/// Whether the calling thread is waiting for no operation.
fn is_free() -> bool {
    CALLS.get() == 0
}

/// Keeps the calling thread of the pool awake after its job. The job must not be one that waits for
/// others.
pub fn after_job() {
    let here = rayon::current_thread_index();
    if here.is_some() && !SPINS.get() && is_free() {
        // Another thread that waits for a job may run this closure; it must not spin then.
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

    /// Number of pools, and operations that each caller runs on one.
    const ROUNDS: usize = 40;
    const OPERATIONS: usize = 3;

    /// Number of parts that the threads of a new pool compute while they spin without end.
    /// `callers` threads outside the pool call the operations, or, if none, one thread inside.
    fn parts_done(threads: usize, callers: Option<usize>) -> usize {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let parts = AtomicUsize::new(0);
        let one = || {
            parallel::on_threads(threads, |thread| {
                assert!(thread < threads);
                // Long enough for other threads to come and steal.
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
