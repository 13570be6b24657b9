//! A child process that cannot outlive its supervisor.
//!
//! On Linux the kernel kills the child when the supervisor dies (prctl(2), PR_SET_PDEATHSIG),
//! however it dies. The child leads its own process group, so that Ctrl-C reaches only the
//! supervisor, and a signal to the group also reaches processes that the child started.
// Process control is foreign functions throughout; each call states why it is sound.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};

use super::inherited::prepare_rank;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    /// The exit code with which shells report it.
    pub fn code(self) -> u8 {
        match self {
            Self::Code(code) => code as u8,
            Self::Signal(signal) => 128u8.wrapping_add(signal as u8),
        }
    }
}

/// Starts `command` bound to this process's life.
///
/// The kernel binds the child to the *thread* that starts it, so call this from a thread that lives
/// as long as the process.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let parent = std::process::id();
    command.process_group(0);
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; `prepare_rank` and
    // `bind_to_parent` make system calls only and allocate nothing: errors are plain codes.
    unsafe {
        command.pre_exec(move || {
            prepare_rank();
            bind_to_parent(parent)
        })
    };
    command.spawn()
}

#[cfg(target_os = "linux")]
fn bind_to_parent(parent: u32) -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes one integer argument and touches no memory of ours.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: getppid has no arguments and cannot fail.
    if unsafe { libc::getppid() } as u32 != parent {
        // The parent died before the call above took effect.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn bind_to_parent(_parent: u32) -> io::Result<()> {
    Ok(())
}

/// Sends `signal` to the child's process group. A missing group is not an error.
pub fn signal_group(child: &Child, signal: i32) {
    // SAFETY: kill takes two integers. The child has not been reaped (`reap` removes it), so its id
    // still names its group.
    unsafe { libc::kill(-(child.id() as libc::pid_t), signal) };
}

/// How `child` ended, if it has. First kills the rest of its process group, while its id cannot
/// have been reused.
pub fn reap(child: &mut Child) -> io::Result<Option<Exit>> {
    if how_ended(child)?.is_none() {
        return Ok(None);
    }
    signal_group(child, libc::SIGKILL);
    let status = child.wait()?;
    Ok(Some(match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or(libc::SIGKILL)),
    }))
}

/// Whether a signal ended `child`; does not reap it.
pub fn died_of_a_signal(child: &Child) -> io::Result<bool> {
    Ok(how_ended(child)?.is_some_and(|code| code != libc::CLD_EXITED))
}

/// How `child` ended, if it has, as `CLD_EXITED` or similar; does not reap it.
fn how_ended(child: &Child) -> io::Result<Option<i32>> {
    // SAFETY: an all-zero siginfo_t is valid, and waitid writes to nothing else. WNOWAIT leaves the
    // child waitable.
    let (result, info) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        (libc::waitid(libc::P_PID, child.id(), &mut info, flags), info)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid succeeded, so si_pid is set: to 0 if nothing has ended, else to the child.
    Ok((unsafe { info.si_pid() } != 0).then_some(info.si_code))
}

/// The name of a signal, as `kill -l` lists it.
pub fn signal_name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal)
        .map_or_else(|| format!("signal {signal}"), str::to_string)
}
