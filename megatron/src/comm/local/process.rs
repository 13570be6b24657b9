//! Checks whether a process of this host is alive.
//!
//! A process is identified by its pid and its start time, because the kernel reuses pids
//! (`proc_pid_stat(5)`).

/// A process, distinguishable from a later one with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Pid in this process's pid namespace.
    pub pid: u32,
    /// Start time in clock ticks after boot.
    pub start: u64,
}

/// The kernel's flag of an exiting task (`PF_EXITING` in Linux's `sched.h`).
const EXITING: u64 = 4;

/// Fields of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    state: char,
    flags: u64,
    start: u64,
}

fn parse(stat: &str) -> Option<Stat> {
    // The second field is the command in parentheses, which may itself hold spaces and parentheses.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some(Stat { state, flags: fields.nth(5)?.parse().ok()?, start: fields.nth(12)?.parse().ok()? })
}

impl Stat {
    /// Whether the process will do nothing any more. A process that used a GPU may spend seconds
    /// exiting, to release it, before it becomes a zombie.
    fn is_over(self) -> bool {
        matches!(self.state, 'Z' | 'X') || self.flags & EXITING != 0
    }
}

impl Process {
    /// This process. Its start is 0 if `/proc` cannot be read.
    pub fn this() -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self { pid: std::process::id(), start: parse(&stat).map_or(0, |stat| stat.start) }
    }

    /// Whether it runs. A zombie or an exiting process does not.
    pub fn is_alive(self) -> bool {
        match std::fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => parse(&stat).is_none_or(|stat| !stat.is_over() && stat.start == self.start),
            Err(e) => {
                e.kind() != std::io::ErrorKind::NotFound && e.raw_os_error() != Some(libc::ESRCH)
            }
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
        let process = Process { pid: child.id(), start: parse(&stat).unwrap().start };
        assert!(process.is_alive());
        child.kill().unwrap();
        while process.is_alive() {
            std::thread::yield_now();
        }
        // Not reaped yet: the entry still exists.
        assert!(std::fs::exists(format!("/proc/{}/stat", child.id())).unwrap());
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn a_command_with_parentheses_does_not_confuse_the_parser() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4242 1000 1";
        assert_eq!(parse(stat), Some(Stat { state: 'S', flags: 4_194_304, start: 4242 }));
    }

    #[test]
    fn a_process_that_exits_is_over_before_it_is_a_zombie() {
        // As for a killed rank that is releasing its GPU, asleep in the driver.
        let stat = |flags| {
            parse(&format!("7 (a) D 1 7 7 0 -1 {flags} 1 0 0 0 0 0 0 0 20 0 1 0 4242 1000 1"))
                .unwrap()
        };
        assert!(stat(0x0040_0044).is_over());
        assert!(!stat(0x0040_0040).is_over());
    }
}
