//! How a round ended, and why: the message for the user, and the exit code.

use std::time::Duration;

use super::{Rank, Supervisor};
use crate::fault::Fault;
use crate::launch::failure::{Failure, Who, cause, describe, listed};
use crate::launch::output::Stream;
use crate::launch::process::Exit;
use crate::launch::requests::is_stopped;
use crate::launch::restarts::End;

impl Supervisor<'_> {
    /// Reports, once, the ranks that still run after `limit`.
    pub(super) fn tell_overdue(&mut self, limit: Duration) {
        if std::mem::replace(&mut self.overdue, true) {
            return;
        }
        let running = self.ranks.iter().enumerate().filter(|(_, rank)| rank.child.is_some());
        let late: Vec<Who> = running.map(|(index, _)| self.plan.work.who(index)).collect();
        let message = format!(
            "{} did not stop within {} s of the request, and was killed; unsaved progress is lost",
            listed(&late),
            limit.as_secs()
        );
        self.tell_why(Fault { message, blames_a_peer: false, comes_again: false });
    }

    /// Reports why ranks failed: to the user, or to the launcher of several machines, which tells
    /// the user.
    fn tell_why(&mut self, fault: Fault) {
        match fault.to_line().filter(|_| self.plan.over_stdin) {
            Some(line) => self.printer.print(Stream::Stderr, "", &line),
            None => self.printer.print(Stream::Stderr, "error: ", &fault.message),
        }
    }

    pub(super) fn conclude(&mut self) -> End {
        let last = |code| End { code, again: false };
        if self.overdue {
            return last(Exit::Signal(libc::SIGKILL).code());
        }
        let failures: Vec<Failure> = self
            .ended_badly
            .iter()
            .map(|&(index, exit)| {
                let rank = &self.ranks[index];
                let (fault, last_line) = (rank.fault.clone(), rank.last_line.clone());
                let explanation = self.plan.work.explain(index, exit, last_line.as_deref());
                Failure {
                    who: self.plan.work.who(index),
                    pid: rank.pid,
                    exit,
                    fault,
                    last_line,
                    explanation,
                }
            })
            .collect();
        if let Some(code) = self.stopped(&failures) {
            return last(code);
        }
        let Some(cause) = cause(&failures) else { return last(0) };
        let most = self.plan.max_restarts;
        let again = !self.asked && self.restarts < most && !cause.comes_again(self.restarts == 0);
        let advice = self.plan.advice.as_deref().filter(|_| !again);
        let message = describe(&failures, self.ranks.len(), advice);
        let code = cause.exit.code().max(1);
        if !again {
            let (blames_a_peer, comes_again) =
                (cause.blames_a_peer(), cause.comes_again(self.restarts == 0));
            self.tell_why(Fault { message, blames_a_peer, comes_again });
        } else {
            self.printer.print(Stream::Stderr, "error: ", &message);
            let note =
                format!("restarting all ranks (restart {} of at most {most})", self.restarts + 1);
            self.printer.print(Stream::Stderr, "", &note);
        }
        End { code, again }
    }

    /// The code of a run that was stopped on request and did not fail.
    fn stopped(&self, failures: &[Failure]) -> Option<u8> {
        // A rank that got the signal before it could handle it died of it, and others report it
        // missing.
        if let Some(signal) =
            self.stop.filter(|_| self.cut_short && failures.iter().all(Failure::blames_a_peer))
        {
            return Some(Exit::Signal(signal).code());
        }
        // A signal may have been sent directly to a rank, here or on another machine: the ranks
        // saved, and their exit codes show it.
        let asked = |rank: &Rank| matches!(rank.exit, Some(Exit::Code(code)) if code == 0 || is_stopped(code));
        let well = self.ranks.iter().all(asked) && failures.iter().all(|f| f.fault.is_none());
        failures.first().filter(|_| well).map(|first| first.exit.code())
    }
}
