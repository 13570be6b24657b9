//! From the ends of several ranks to the one message that names the cause.

use super::process::{Exit, signal_name};
use crate::fault::Fault;

/// A rank that ended badly. Kept in the order in which they ended.
#[derive(Clone, Debug)]
pub struct Failure {
    pub rank: usize,
    pub pid: u32,
    pub exit: Exit,
    /// What the rank itself said, if it is one of ours.
    pub fault: Option<Fault>,
    /// The last line of its standard error.
    pub last_line: Option<String>,
}

impl Failure {
    /// Whether one of our ranks says that it would end so again. What it says of settings may only hold until a GPU or a port is free where ranks with
    /// the same settings ran before, so it counts of the `first` alone.
    pub fn comes_again(&self, first: bool) -> bool {
        self.fault.as_ref().is_some_and(|fault| fault.comes_again || first && self.exit == Exit::Code(2))
    }

    pub fn blames_a_peer(&self) -> bool {
        self.fault.as_ref().is_some_and(|f| f.blames_a_peer)
    }
}

/// The failure that the others follow from: the first that does not blame a peer.
pub fn cause(failures: &[Failure]) -> Option<&Failure> {
    failures.iter().find(|f| !f.blames_a_peer()).or(failures.first())
}

/// One message for the whole run. `world_size` ranks were started here.
pub fn describe(failures: &[Failure], started: usize, advice: Option<&str>) -> String {
    let Some(cause) = cause(failures) else {
        return "the run failed".to_string();
    };
    let message = match (&cause.fault, cause.exit) {
        (Some(fault), _) => with_ranks(fault, cause, failures, started),
        (None, Exit::Signal(signal)) => {
            format!("rank {} (pid {}) was killed by {}{}", cause.rank, cause.pid, signal_name(signal), hint(signal))
        }
        (None, Exit::Code(code)) => {
            let last = cause.last_line.as_ref().map_or(String::new(), |line| format!("; its last line was: {line}"));
            format!("rank {} (pid {}) exited with code {code}{last}", cause.rank, cause.pid)
        }
    };
    let died = cause.fault.is_none() && started > 1;
    let stopped = if died { "; the other ranks were stopped" } else { "" };
    let advice = advice.filter(|_| died).map_or(String::new(), |advice| format!(". {advice}"));
    format!("{message}{stopped}{advice}")
}

fn with_ranks(fault: &Fault, cause: &Failure, failures: &[Failure], started: usize) -> String {
    let same: Vec<usize> = failures
        .iter()
        .filter(|f| f.fault.as_ref().is_some_and(|other| other.message == fault.message))
        .map(|f| f.rank)
        .collect();
    match same.len() {
        0 | 1 if started == 1 => fault.message.clone(),
        0 | 1 => format!("rank {}: {}", cause.rank, fault.message),
        n if n == started => format!("{} (on all ranks)", fault.message),
        _ => {
            let mut same = same;
            same.sort_unstable();
            let same: Vec<String> = same.iter().map(usize::to_string).collect();
            format!("{} (on ranks {})", fault.message, same.join(", "))
        }
    }
}

fn hint(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => " (by someone, or by the kernel because memory ran out: see `dmesg`)",
        libc::SIGBUS => " (a file was cut short while it was read, or no memory was left for what ranks share)",
        libc::SIGILL => " (the program was built for another processor)",
        libc::SIGSEGV | libc::SIGABRT => " (a bug; please report it with the command and the run file)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(rank: usize, message: &str, blames_a_peer: bool) -> Failure {
        let fault = Some(Fault { message: message.to_string(), blames_a_peer, comes_again: false });
        Failure { rank, pid: 100 + rank as u32, exit: Exit::Code(1), fault, last_line: None }
    }

    fn killed(rank: usize) -> Failure {
        Failure { rank, pid: 100 + rank as u32, exit: Exit::Signal(libc::SIGKILL), fault: None, last_line: None }
    }

    #[test]
    fn the_same_message_of_several_ranks_is_printed_once() {
        let two = [said(1, "disk full", false), said(0, "disk full", false)];
        assert_eq!(describe(&two, 2, None), "disk full (on all ranks)");
        assert_eq!(describe(&two, 4, None), "disk full (on ranks 0, 1)");
        assert_eq!(describe(&two[..1], 4, None), "rank 1: disk full");
        assert_eq!(describe(&two[..1], 1, None), "disk full");
    }

    #[test]
    fn a_rank_that_blames_a_peer_is_not_the_cause() {
        let failures = [said(0, "rank 1 left", true), killed(1)];
        let message = describe(&failures, 2, Some("Resume it."));
        assert!(message.starts_with("rank 1 (pid 101) was killed by SIGKILL"), "{message}");
        assert!(message.ends_with("the other ranks were stopped. Resume it."), "{message}");
        assert_eq!(cause(&failures).map(|f| f.exit.code()), Some(137));
    }

    #[test]
    fn an_exit_without_a_reason_shows_the_last_line() {
        let mut failure = killed(3);
        failure.exit = Exit::Code(7);
        failure.last_line = Some("no such file".to_string());
        assert_eq!(
            describe(&[failure], 1, None),
            "rank 3 (pid 103) exited with code 7; its last line was: no such file"
        );
    }
}
