//! Sleeping and waking between processes on a word of shared memory.
//!
//! Linux `futex(2)`, without `FUTEX_PRIVATE_FLAG` because the waiters are other processes.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` holds `seen`, at most `patience`. May return early.
pub fn wait(word: &AtomicU32, seen: u32, patience: Duration) {
    let timeout = libc::timespec {
        tv_sec: patience.as_secs().min(3600) as libc::time_t,
        tv_nsec: patience.subsec_nanos() as libc::c_long,
    };
    // SAFETY: `word` is a live, aligned u32 and `timeout` lives through the call. Every outcome
    // (woken, changed, timed out, interrupted) is a permitted early return, so the result needs no
    // look.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout);
    }
}

/// Wakes all threads that sleep on `word`.
pub fn wake(word: &AtomicU32) {
    // SAFETY: `word` is a live, aligned u32; waking has no other effect.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}
