//! Whether a process of this host still lives.
//!
//! A process is its pid and its start time, since the kernel hands pids out again (`proc_pid_stat(5)`).

/// A process, recognizable after its pid was given to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    /// Clock ticks after boot.
    pub start: u64,
}

/// State and start time in the text of `/proc/PID/stat`.
fn parse(stat: &str) -> Option<(char, u64)> {
    // The second field is the command in parentheses, which may itself hold spaces and parentheses.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

impl Process {
    /// This process; its start is 0 where `/proc` cannot be read.
    pub fn this() -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self { pid: std::process::id(), start: parse(&stat).map_or(0, |(_, start)| start) }
    }

    /// Whether it runs; a zombie does not.
    pub fn is_alive(self) -> bool {
        match std::fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => parse(&stat).is_none_or(|(state, start)| !matches!(state, 'Z' | 'X') && start == self.start),
            Err(e) => e.kind() != std::io::ErrorKind::NotFound && e.raw_os_error() != Some(libc::ESRCH),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive() {
        assert!(Process::this().is_alive());
    }

    #[test]
    fn a_process_that_was_given_the_same_pid_is_another() {
        let this = Process::this();
        assert!(!Process { start: this.start + 1, ..this }.is_alive());
    }

    #[test]
    fn a_zombie_is_not_alive() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let process = Process { pid: child.id(), start: parse(&stat).unwrap().1 };
        assert!(process.is_alive());
        child.kill().unwrap();
        while process.is_alive() {
            std::thread::yield_now();
        }
        // Still unreaped: the entry exists.
        assert!(std::fs::exists(format!("/proc/{}/stat", child.id())).unwrap());
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn a_command_with_parentheses_does_not_confuse_the_parser() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4242 1000 1";
        assert_eq!(parse(stat), Some(('S', 4242)));
    }
}
