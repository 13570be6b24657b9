//! Turns the failures of several ranks into one message that names the cause. With several
//! machines, their supervisors report the cause of their ranks.

use std::fmt;

use megatron::text::printable;

use super::process::{Exit, signal_name};
use crate::fault::Fault;

/// A process that a supervisor started.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    Rank(usize),
    /// A machine, represented by its supervisor.
    Host(String),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.short())
    }
}

impl Who {
    fn kind(&self) -> &'static str {
        match self {
            Self::Rank(_) => "rank",
            Self::Host(_) => "host",
        }
    }

    fn short(&self) -> String {
        match self {
            Self::Rank(rank) => rank.to_string(),
            Self::Host(name) => name.clone(),
        }
    }
}

/// Several processes of one kind: `rank 1, 3`.
pub fn listed(who: &[Who]) -> String {
    let names: Vec<String> = who.iter().map(Who::short).collect();
    format!("{} {}", who.first().map_or("rank", Who::kind), names.join(", "))
}

/// A rank or host that failed. Kept in the order in which they ended.
#[derive(Clone, Debug)]
pub struct Failure {
    pub who: Who,
    pub pid: u32,
    pub exit: Exit,
    /// The rank's own report, if it is a rank of this program.
    pub fault: Option<Fault>,
    /// The last line of its standard error.
    pub last_line: Option<String>,
    /// An explanation from its exit, if it could not report anything itself.
    pub explanation: Option<String>,
}

impl Failure {
    /// Whether a rank of this program reports that it would fail again. After a restart, an error
    /// about settings can be temporary, until a GPU or a port is free, so it counts only for the
    /// `first` round.
    pub fn comes_again(&self, first: bool) -> bool {
        self.fault
            .as_ref()
            .is_some_and(|fault| fault.comes_again || first && self.exit == Exit::Code(2))
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
    let Failure { who, pid, .. } = cause;
    let message = match (&cause.fault, cause.exit) {
        (Some(fault), _) => with_ranks(fault, cause, failures, started),
        (None, _) if let Some(explanation) = &cause.explanation => explanation.clone(),
        (None, Exit::Signal(signal)) => {
            format!("{who} (pid {pid}) was killed by {}{}", signal_name(signal), hint(signal))
        }
        (None, Exit::Code(code)) => {
            let last = cause
                .last_line
                .as_ref()
                .map_or(String::new(), |line| format!("; its last line was: {}", printable(line)));
            format!("{who} (pid {pid}) exited with code {code}{last}")
        }
    };
    let died = cause.fault.is_none() && started > 1;
    let stopped =
        if died { format!("; the other {}s were stopped", who.kind()) } else { String::new() };
    let advice = advice.filter(|_| died).map_or(String::new(), |advice| format!(". {advice}"));
    format!("{message}{stopped}{advice}")
}

fn with_ranks(fault: &Fault, cause: &Failure, failures: &[Failure], started: usize) -> String {
    let mut same: Vec<&Who> = failures
        .iter()
        .filter(|f| f.fault.as_ref().is_some_and(|other| other.message == fault.message))
        .map(|f| &f.who)
        .collect();
    let kind = cause.who.kind();
    match same.len() {
        0 | 1 if started == 1 => fault.message.clone(),
        0 | 1 => format!("{}: {}", cause.who, fault.message),
        n if n == started => format!("{} (on all {kind}s)", fault.message),
        _ => {
            same.sort_unstable();
            let same: Vec<String> = same.into_iter().map(Who::short).collect();
            format!("{} (on {kind}s {})", fault.message, same.join(", "))
        }
    }
}

fn hint(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => " (by a user, or by the kernel because memory ran out: see `dmesg`)",
        libc::SIGBUS => " (a file was truncated while it was read, or shared memory ran out)",
        libc::SIGILL => " (the program was built for another processor)",
        libc::SIGSEGV | libc::SIGABRT => {
            " (a bug: please report it with the command and the run file)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(rank: usize, message: &str, blames_a_peer: bool) -> Failure {
        let fault = Some(Fault { message: message.to_string(), blames_a_peer, comes_again: false });
        Failure { fault, exit: Exit::Code(1), ..killed(rank) }
    }

    fn killed(rank: usize) -> Failure {
        Failure {
            who: Who::Rank(rank),
            pid: 100 + rank as u32,
            exit: Exit::Signal(libc::SIGKILL),
            fault: None,
            last_line: None,
            explanation: None,
        }
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
    fn hosts_are_called_by_their_names() {
        let host = |name: &str, message: &str| Failure {
            who: Who::Host(name.to_string()),
            ..said(0, message, false)
        };
        assert_eq!(
            describe(&[host("b", "rank 2: disk full")], 2, None),
            "host b: rank 2: disk full"
        );
        let unreachable = Failure {
            explanation: Some("ssh to host a failed".into()),
            fault: None,
            ..host("a", "")
        };
        assert_eq!(
            describe(&[unreachable], 2, None),
            "ssh to host a failed; the other hosts were stopped"
        );
        assert_eq!(listed(&[Who::Rank(1), Who::Rank(3)]), "rank 1, 3");
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
