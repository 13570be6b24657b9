//! Ends ranks together with their supervisor, even if other programs are between them.
//!
//! The kernel ends the supervisor's direct children (`process.rs`) but not their children: with
//! `bash -c 'megatron …; true'`, only the shell. Ranks of this program therefore watch the
//! supervisor themselves.

use std::time::Duration;

use megatron::comm::Process;

use crate::fault::SUPERVISED;

/// Interval at which a rank checks.
const PERIOD: Duration = Duration::from_millis(500);

/// The value of [`SUPERVISED`] for this process's ranks: its pid, its start, and where that pid is
/// valid.
pub fn supervisor() -> String {
    let Process { pid, start } = Process::this();
    format!("{pid} {start} {}", pid_namespace())
}

fn pid_namespace() -> String {
    std::fs::read_link("/proc/self/ns/pid")
        .map(|link| link.display().to_string())
        .unwrap_or_default()
}

/// The supervisor in the value of [`SUPERVISED`], if this process can tell whether it runs.
fn parse(value: &str) -> Option<Process> {
    let mut words = value.split_ascii_whitespace();
    let process = Process { pid: words.next()?.parse().ok()?, start: words.next()?.parse().ok()? };
    // In another container the pid belongs to another process or to none.
    (words.next()? == pid_namespace() && process.is_alive()).then_some(process)
}

/// Ends this process, if it is a rank, soon after its supervisor has died.
pub fn watch_supervisor() {
    let Some(supervisor) = std::env::var(SUPERVISED).ok().and_then(|value| parse(&value)) else {
        return;
    };
    // Without the thread, the rank behaves as under another launcher.
    let _ = std::thread::Builder::new().name("watch-supervisor".into()).spawn(move || {
        while supervisor.is_alive() {
            std::thread::sleep(PERIOD);
        }
        // Ends as if killed by the kernel, without a message that nobody could read.
        signal_hook::low_level::exit(128 + libc::SIGKILL);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_is_recognized_where_its_pid_is_valid() {
        let value = supervisor();
        assert_eq!(parse(&value), Some(Process::this()));
        assert_eq!(parse(&value.replace("pid:[", "pid:[9")), None, "of another container");
        assert_eq!(parse("1"), None, "of an earlier version");
    }
}
