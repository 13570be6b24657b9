//! One round of this machine's ranks, or of the supervisors of several machines: starts them,
//! relays output and signals, and ends them together.

mod conclusion;

use std::io;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL};

use super::local::not_started;
use super::output::{Event, Printer, Stream, forward};
use super::plan::Plan;
use super::process::{Exit, died_of_a_signal, reap, signal_group, signal_name, spawn};
use super::requests::{Control, Requests, is_stopped};
use super::restarts::End;
use crate::error::{Error, Result};
use crate::fault::Fault;

/// Interval at which ranks and signals are checked while nothing is printed.
const TICK: Duration = Duration::from_millis(20);
/// Time from SIGTERM to SIGKILL after a rank has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long to wait for the remaining output of an ended rank.
const DRAIN: Duration = Duration::from_millis(500);
/// How long a stopping run waits for its output to be read.
const UNREAD: Duration = Duration::from_secs(2);

/// Advice if a thread could not be started.
const MORE_PROCESSES: &str = "raise `ulimit -u`, or the container's limit of processes";

/// A rank of this machine, or the supervisor of another.
struct Rank {
    child: Option<Child>,
    /// Input of a supervisor on another machine, in place of signals.
    control: Option<Control>,
    /// Output streams that may still have writers.
    open_streams: usize,
    pid: u32,
    prefix: String,
    fault: Option<Fault>,
    last_line: Option<String>,
    /// The last signal it was sent.
    told: Option<i32>,
    exit: Option<Exit>,
}

/// Why ranks are being ended.
enum Phase {
    Running,
    /// A signal came, and ranks were asked to stop.
    Stopping {
        since: Instant,
    },
    /// A rank failed.
    Failing {
        since: Instant,
        terminated: bool,
    },
}

/// Runs the ranks of `plan`, which were restarted `restarts` times before, until they end. Prints
/// why they failed.
///
/// # Errors
/// If a rank cannot be started.
pub fn attempt(plan: &Plan, restarts: u32, requests: &mut Requests) -> Result<End> {
    let mut supervisor = Supervisor::start(plan, restarts)?;
    loop {
        supervisor.relay(TICK);
        supervisor.interrupt_all(requests.pending());
        supervisor.reap()?;
        supervisor.enforce_deadlines();
        if supervisor.ranks.iter().all(|r| r.child.is_none()) {
            supervisor.drain(requests);
            let end = supervisor.conclude();
            let asked = supervisor.finish_printing(requests);
            return Ok(End { again: end.again && !asked, ..end });
        }
    }
}

struct Supervisor<'a> {
    plan: &'a Plan,
    /// How often ranks were restarted before.
    restarts: u32,
    ranks: Vec<Rank>,
    events: Receiver<Event>,
    printer: Printer,
    /// Lines of ending ranks that could not be printed because output was not read.
    unread: usize,
    phase: Phase,
    /// The signal for which ranks were asked to stop, before any failed.
    stop: Option<i32>,
    /// Whether a signal came, before or after.
    asked: bool,
    /// Whether a rank ended because of the request. A rank that had already finished does not
    /// count.
    cut_short: bool,
    /// Whether ranks were killed because they did not stop in time.
    overdue: bool,
    /// Local indices and exits of failed ranks, in order.
    ended_badly: Vec<(usize, Exit)>,
}

impl<'a> Supervisor<'a> {
    fn start(plan: &'a Plan, restarts: u32) -> Result<Self> {
        let (sender, events) = sync_channel(1024);
        let printer = Printer::start().map_err(|source| Error::Io {
            action: format!("start a thread for printing ({MORE_PROCESSES})"),
            source,
        })?;
        let mut started = Self {
            plan,
            restarts,
            ranks: Vec::new(),
            events,
            printer,
            unread: 0,
            phase: Phase::Running,
            stop: None,
            asked: false,
            cut_short: false,
            overdue: false,
            ended_badly: Vec::new(),
        };
        for index in 0..plan.work.len() {
            let mut command = plan.command(index, restarts)?;
            // On an error `started` is dropped, which kills the ranks before this one.
            let mut child = spawn(&mut command).map_err(|source| {
                not_started(&plan.work.who(index), command.get_program(), source)
            })?;
            let unread = |source| Error::Io {
                action: format!(
                    "start a thread for reading the output of {} ({MORE_PROCESSES})",
                    plan.work.who(index)
                ),
                source,
            };
            let mut open_streams = 0;
            if let Some(stdout) = child.stdout.take() {
                forward(index, Stream::Stdout, stdout, sender.clone()).map_err(unread)?;
                open_streams += 1;
            }
            if let Some(stderr) = child.stderr.take() {
                forward(index, Stream::Stderr, stderr, sender.clone()).map_err(unread)?;
                open_streams += 1;
            }
            started.ranks.push(Rank {
                pid: child.id(),
                control: child.stdin.take().map(|input| Control::new(input, plan.work.secret())),
                child: Some(child),
                open_streams,
                prefix: plan.work.prefix(index),
                fault: None,
                last_line: None,
                told: None,
                exit: None,
            });
        }
        Ok(started)
    }

    /// Prints the output of ranks, waiting up to `patience` for the first line. While it is not
    /// read, ranks also wait with their output. Ranks that are to end do not, because they could
    /// not end while they wait.
    fn relay(&mut self, patience: Duration) {
        if matches!(self.phase, Phase::Running) && self.printer.is_stuck() {
            std::thread::sleep(patience);
            return;
        }
        let mut next = self.events.recv_timeout(patience);
        // Bounded, so that a flood of output does not keep signals and deaths from being seen.
        for _ in 0..1024 {
            if matches!(self.phase, Phase::Running) && self.printer.is_stuck() {
                break;
            }
            match next {
                Ok(event) => self.show(event),
                Err(RecvTimeoutError::Timeout) => return,
                Err(RecvTimeoutError::Disconnected) => {
                    std::thread::sleep(patience);
                    return;
                }
            }
            next = self.events.recv_timeout(Duration::ZERO);
        }
        if let Ok(event) = next {
            self.show(event);
        }
    }

    fn show(&mut self, event: Event) {
        let (index, stream, line) = match event {
            Event::Line { index, stream, line } => (index, stream, line),
            Event::Closed { index } => {
                self.ranks[index].open_streams -= 1;
                return;
            }
        };
        let rank = &mut self.ranks[index];
        if stream == Stream::Stderr {
            if let Some(fault) = Fault::from_line(&line) {
                rank.fault.get_or_insert(fault);
                return;
            }
            if !line.trim().is_empty() {
                rank.last_line = Some(line.clone());
            }
        }
        if self.printer.is_stuck() && !matches!(self.phase, Phase::Running) {
            self.unread += 1;
        } else {
            self.printer.print(stream, &rank.prefix, &line);
        }
    }

    /// Handles the signals since the last call, in unknown order. The first one stops the run;
    /// signals that arrive together with it do not yet count as impatience. SIGHUP follows another
    /// signal (systemd, a closing terminal), and the run ends with the code of that one.
    fn interrupt_all(&mut self, signals: impl Iterator<Item = i32>) {
        let mut signals: Vec<i32> = signals.collect();
        if matches!(self.phase, Phase::Running) {
            signals.sort_by_key(|&signal| signal == SIGHUP);
            signals.truncate(1);
        }
        signals.into_iter().for_each(|signal| self.interrupt(signal));
    }

    /// Passes a signal on as SIGTERM, which ranks of this program treat as "save and stop". Among
    /// later signals only SIGINT, a user's second Ctrl-C, kills: schedulers repeat SIGTERM, and
    /// systemd sends SIGHUP after it. The launcher of several machines asks for SIGKILL.
    fn interrupt(&mut self, signal: i32) {
        self.asked = true;
        match self.phase {
            Phase::Running => {
                // On another machine, the launcher sent the request and has already printed this.
                if !self.plan.over_stdin {
                    let does = if self.plan.saves { "saving and stopping" } else { "stopping" };
                    let note = format!("{}: {does}; Ctrl-C now stops at once", signal_name(signal));
                    self.printer.print(Stream::Stderr, "", &note);
                }
                self.signal_all(if signal == SIGKILL { SIGKILL } else { libc::SIGTERM });
                self.stop = Some(signal);
                self.phase = Phase::Stopping { since: Instant::now() };
            }
            Phase::Stopping { .. } | Phase::Failing { .. }
                if matches!(signal, SIGINT | SIGKILL) =>
            {
                self.signal_all(libc::SIGKILL);
            }
            Phase::Stopping { .. } | Phase::Failing { .. } => {}
        }
    }

    fn signal_all(&mut self, signal: i32) {
        for rank in &mut self.ranks {
            if let Some(child) = &rank.child {
                rank.told = Some(signal);
                match &mut rank.control {
                    Some(control) => control.tell(signal),
                    None => signal_group(child, signal),
                }
            }
        }
    }

    /// Records ranks that ended.
    fn reap(&mut self) -> Result<()> {
        for index in 0..self.ranks.len() {
            let rank = &mut self.ranks[index];
            let Some(child) = &mut rank.child else { continue };
            // A script dies of the stop request, but processes that it started may still be saving.
            // They live as long as their output streams are open.
            let may_save = self.plan.stop_limit.is_some()
                && matches!(self.phase, Phase::Stopping { .. })
                && rank.told != Some(libc::SIGKILL)
                && rank.open_streams > 0;
            if may_save && died_of_a_signal(child).map_err(|e| wait_error(rank.pid, e))? {
                continue;
            }
            let Some(exit) = reap(child).map_err(|e| wait_error(rank.pid, e))? else { continue };
            rank.child = None;
            // Closing its input ends processes that may still run there.
            rank.control = None;
            rank.exit = Some(exit);
            let as_told = match exit {
                Exit::Signal(signal) => rank.told == Some(signal),
                // A scheduler may have signalled it as well.
                Exit::Code(code) => rank.told.is_some() && is_stopped(code),
            };
            // A rank killed because others failed may have been hanging.
            let killed =
                exit == Exit::Signal(libc::SIGKILL) && matches!(self.phase, Phase::Failing { .. });
            self.cut_short |= as_told && !killed;
            if exit == Exit::Code(0) || as_told {
                continue;
            }
            self.ended_badly.push((index, exit));
            if !matches!(self.phase, Phase::Failing { .. }) {
                self.phase = Phase::Failing { since: Instant::now(), terminated: false };
            }
        }
        Ok(())
    }

    fn enforce_deadlines(&mut self) {
        for rank in &self.ranks {
            if let (Some(child), Some(control)) = (&rank.child, &rank.control)
                && control.is_overdue()
            {
                signal_group(child, libc::SIGKILL);
            }
        }
        match self.phase {
            Phase::Running => {}
            Phase::Stopping { since } => {
                if let Some(limit) = self.plan.stop_limit.filter(|limit| since.elapsed() > *limit) {
                    self.tell_overdue(limit);
                    self.signal_all(libc::SIGKILL);
                }
            }
            Phase::Failing { since, terminated: false } => {
                if since.elapsed() >= self.plan.self_end {
                    self.signal_all(libc::SIGTERM);
                    self.phase = Phase::Failing { since, terminated: true };
                }
            }
            Phase::Failing { since, terminated: true } => {
                if since.elapsed() >= self.plan.self_end + LAST_WORDS {
                    self.signal_all(libc::SIGKILL);
                }
            }
        }
    }

    /// Prints the rest of the output in the pipes. A slow reader loses nothing, unless a signal
    /// comes.
    fn drain(&mut self, requests: &mut Requests) {
        let mut until = Instant::now() + DRAIN;
        while self.ranks.iter().any(|rank| rank.open_streams > 0) && Instant::now() < until {
            self.relay(TICK);
            self.interrupt_all(requests.pending());
            if matches!(self.phase, Phase::Running) && self.printer.is_stuck() {
                until = Instant::now() + DRAIN;
            }
        }
    }

    /// Waits until everything is printed, but gives up on a stalled reader if a signal asks the run
    /// to end. Returns whether a signal did.
    fn finish_printing(&mut self, requests: &mut Requests) -> bool {
        if self.unread > 0 {
            let note = format!(
                "{} lines of ranks are not shown: standard output was not read",
                self.unread
            );
            self.printer.print(Stream::Stderr, "", &note);
        }
        let since = Instant::now();
        while !self.printer.is_done() {
            let asked = requests.pending().count() > 0;
            if asked || self.stop.is_some() && since.elapsed() >= UNREAD {
                return asked;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

impl Drop for Supervisor<'_> {
    fn drop(&mut self) {
        self.signal_all(libc::SIGKILL);
        for rank in &mut self.ranks {
            // Closing the connection ends the processes at its other end.
            let is_connection = rank.control.take().is_some();
            if let Some(child) = &mut rank.child {
                if is_connection {
                    signal_group(child, libc::SIGKILL);
                }
                let _ = child.wait();
            }
        }
    }
}

fn wait_error(pid: u32, source: io::Error) -> Error {
    Error::Io { action: format!("wait for process {pid}"), source }
}
