//! What a process inherits from its parent: ignored signals and limits.
// Signals and limits are foreign functions throughout; each call states why it is sound.
#![allow(unsafe_code)]

use std::sync::OnceLock;

/// Whether `signal` was ignored when this process started, as by `nohup` and shells without job
/// control, and still is. Such a signal must have no effect.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: an all-zero sigaction is valid; without a new action the call only fills it in.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

/// The limit on open files at this process's start, if it was changed since.
static OPEN_FILES: OnceLock<libc::rlimit> = OnceLock::new();

/// Makes exceeded limits reportable errors, and raises the limit on open files as far as this user
/// may. Call once, before anything else.
pub fn adjust() {
    // SAFETY: no handler is installed. A write beyond the limit on file sizes then fails with EFBIG
    // instead of ending the process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls touch only `limit`. If they fail, nothing changes.
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
    // Other programs may close as many files as the limit says, or use `select`; this program
    // raises it again.
    if let Some(limit) = OPEN_FILES.get() {
        // SAFETY: the call only reads `limit` and is a plain system call.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) };
    }
    // SAFETY: signal is async-signal-safe and installs no handler here.
    unsafe {
        // A rank is in a background process group, which `stty tostop` would stop when it prints.
        libc::signal(libc::SIGTTOU, libc::SIG_IGN);
        // The supervisor asks ranks to stop with this signal, even if it ignores it itself.
        libc::signal(libc::SIGTERM, libc::SIG_DFL);
        // Other programs expect the default; this program adjusts it again.
        libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
    }
}
