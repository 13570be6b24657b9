//! A position in shared memory that one side publishes and the other waits for.
//!
//! The waiting side counts itself in `sleepers` before it sleeps on the position, so publishing
//! costs a system call only when somebody sleeps.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::futex;

/// How long a waiter looks again and again before it sleeps; about the cost of being woken.
const SPIN: Duration = Duration::from_micros(20);
/// The same where there is a core for every rank, which has nothing else to do: being woken there
/// means that an idle core has to be woken.
const SPIN_ALONE: Duration = Duration::from_micros(300);
/// How long of that it keeps its core for itself, where there is one for every rank. After that
/// whoever else is there may run: on a busy machine that may be the very rank that is waited for.
const ALONE: Duration = Duration::from_micros(2);

/// A position on its own cache line.
#[repr(C, align(64))]
pub struct RingPosition {
    /// Bytes or blocks that this side has written or read so far, modulo 2³².
    pub position: AtomicU32,
    /// Others that sleep until `position` changes, or are about to.
    sleepers: AtomicU32,
}

impl RingPosition {
    /// Publishes that this side has moved on, and wakes the other if it sleeps.
    pub fn publish(&self, position: u32) {
        // In one order with what `wait` does: either this side sees a sleeper, or the sleeper sees
        // the new position. Exchanged rather than stored before a fence, which takes longer.
        self.position.swap(position, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            futex::wake(&self.position);
        }
    }

    /// Begins anew, where nobody else looks yet.
    pub fn reset(&self) {
        self.sleepers.store(0, Ordering::Relaxed);
        self.position.store(0, Ordering::Release);
    }

    /// Looks until it is `ready`, for about as long as being woken would take; returns whether it
    /// is. `alone` tells that there is a core for every rank.
    pub fn spin(alone: bool, ready: impl Fn() -> bool) -> bool {
        let mut start = None;
        loop {
            for _ in 0..16 {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            // Most waits are over before a clock could be read.
            let spent = start.get_or_insert_with(Instant::now).elapsed();
            if spent >= if alone { SPIN_ALONE } else { SPIN } {
                return false;
            }
            if !alone || spent >= ALONE {
                std::thread::yield_now();
            }
        }
    }

    /// Sleeps until `ready`, which this side must bring about, or until `patience` is over; returns
    /// whether it is ready.
    pub fn wait(&self, patience: Duration, ready: impl Fn() -> bool) -> bool {
        if ready() {
            return true;
        }
        if patience.is_zero() {
            return false;
        }
        // A process that is killed here stays counted, which costs the others a needless system
        // call at most.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        let is_ready = loop {
            let seen = self.position.load(Ordering::SeqCst);
            if ready() {
                break true;
            }
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                break false;
            }
            futex::wait(&self.position, seen, left);
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        is_ready
    }
}
