//! What a process has from whoever started it: ignored signals and limits.
// Signals and limits are foreign functions throughout; each call states why it is sound.
#![allow(unsafe_code)]

use std::sync::OnceLock;

/// Whether `signal` was ignored when this process started, as `nohup` and shells without job
/// control arrange, and still is. Whoever did so wants it to have no effect.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: an all-zero sigaction is valid; without a new action the call only fills it in.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

/// How many files this process might have open when it started, if that was changed since.
static OPEN_FILES: OnceLock<libc::rlimit> = OnceLock::new();

/// Makes limits into errors that can be reported, and the one of open files as wide as this user
/// may have it. Call once, first of all.
pub fn adjust() {
    // SAFETY: no handler is installed. A write beyond the limit of file sizes then fails with EFBIG
    // instead of ending the process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls touch nothing but `limit`. Where they are refused everything stays as it
    // is.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 && limit.rlim_cur < limit.rlim_max
        {
            let wide = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
            if libc::setrlimit(libc::RLIMIT_NOFILE, &wide) == 0 {
                let _ = OPEN_FILES.set(limit);
            }
        }
    }
}

/// Sets the signals and limits of a rank between fork and exec: allocates nothing and makes system
/// calls only.
pub fn prepare_rank() {
    // Other programs may take the limit for how many there are to close, or use `select`; this one
    // widens it again.
    if let Some(limit) = OPEN_FILES.get() {
        // SAFETY: the call reads `limit`, and is a system call alone.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) };
    }
    // SAFETY: signal is async-signal-safe and installs no handler here.
    unsafe {
        // A rank is of a background process group, which `stty tostop` would stop where it prints.
        libc::signal(libc::SIGTTOU, libc::SIG_IGN);
        // The supervisor asks ranks to stop by it, even if it ignores it itself.
        libc::signal(libc::SIGTERM, libc::SIG_DFL);
        // Other programs expect it as it was; this one adjusts it again.
        libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
    }
}
