//! Threads that have finished their part of an operation stay awake for the next one.
//!
//! Rayon's threads go to sleep after some ten microseconds without work, and waking one takes longer than many operations between two products do. As those of
//! OpenMP, ours wait a little longer first; whoever else wants their cores gets them meanwhile.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a thread looks for work before it may sleep: a multiple of what a step spends between operations, and little beside what waits for disks and users.
const PATIENCE: Duration = Duration::from_millis(1);

thread_local! {
    static LINGERS: Cell<bool> = const { Cell::new(false) };
}

/// Has the calling thread of the pool stay awake once it has finished its job. Not for the thread that waits for the job: it has other things to do.
pub fn after_this_job() {
    let here = rayon::current_thread_index();
    if here.is_some() && !LINGERS.get() {
        // Whoever waits for a job may take this one while it does: it must not be kept.
        rayon::spawn(move || {
            if rayon::current_thread_index() == here {
                linger();
            }
        });
    }
}

/// Runs the pool's jobs until there have been none for a while.
fn linger() {
    LINGERS.set(true);
    let mut idle_since = Instant::now();
    while idle_since.elapsed() < PATIENCE {
        match rayon::yield_now() {
            Some(rayon::Yield::Executed) => idle_since = Instant::now(),
            _ => std::thread::yield_now(),
        }
    }
    LINGERS.set(false);
}
