//! A position in shared memory that one side publishes and others wait for.
//!
//! A waiter increments `sleepers` before it sleeps on the position, so publishing needs a system
//! call only if there is a sleeper.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::futex;

/// Time for which a waiter spins before it sleeps; about the cost of a wake-up.
const SPIN: Duration = Duration::from_micros(20);
/// The same time if every rank has its own core: a wake-up then has to wake an idle core, and the
/// core has no other work.
const SPIN_ALONE: Duration = Duration::from_micros(300);
/// The part of this time in which a waiter does not yield its core, if every rank has one.
/// Afterwards other threads may run: on a busy machine one of them may be the rank that is waited
/// for.
const ALONE: Duration = Duration::from_micros(2);

/// A position on its own cache line.
#[repr(C, align(64))]
pub struct RingPosition {
    /// Bytes or blocks that this side has written or read so far, modulo 2³².
    pub position: AtomicU32,
    /// Number of waiters that sleep until `position` changes, or are about to.
    sleepers: AtomicU32,
}

impl RingPosition {
    /// Publishes a new position, and wakes the waiters that sleep.
    pub fn publish(&self, position: u32) {
        // In one total order with the operations of `wait`: either this side sees a sleeper, or the
        // sleeper sees the new position. An exchange is faster than a store and a fence.
        self.position.swap(position, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            futex::wake(&self.position);
        }
    }

    /// Resets the position, while no other process uses it.
    pub fn reset(&self) {
        self.sleepers.store(0, Ordering::Relaxed);
        self.position.store(0, Ordering::Release);
    }

    /// Spins until `ready`, for about the duration of a wake-up; returns whether it is ready.
    /// `alone` means that every rank has its own core.
    pub fn spin(alone: bool, ready: impl Fn() -> bool) -> bool {
        let mut start = None;
        loop {
            for _ in 0..16 {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            // Most waits end before a clock could be read.
            let spent = start.get_or_insert_with(Instant::now).elapsed();
            if spent >= if alone { SPIN_ALONE } else { SPIN } {
                return false;
            }
            if !alone || spent >= ALONE {
                std::thread::yield_now();
            }
        }
    }

    /// Sleeps until `ready`, which this side makes true, or until `patience` is over; returns
    /// whether it is ready.
    pub fn wait(&self, patience: Duration, ready: impl Fn() -> bool) -> bool {
        if ready() {
            return true;
        }
        if patience.is_zero() {
            return false;
        }
        // If a process is killed here, its count stays. This costs the others at most a needless
        // system call.
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
