//! What a supervisor is asked for, and how: by signals, and over ssh, which passes none on, by words on its standard input.
//!
//! The launcher of several machines holds the other end of that input. Whatever ends it, ssh or the connection, the input ends, too, and ranks are not
//! left alone.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::inherited::is_ignored;
use crate::error::{Error, Result};

/// The signals that ask a run to save and stop. The last two, which else would kill it, are schedulers' warnings: `sbatch --signal=USR1@120`.
pub const STOP_SIGNALS: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

/// Whether `code` is that of a rank that one of [`STOP_SIGNALS`] stopped.
pub fn is_stopped(code: i32) -> bool {
    STOP_SIGNALS.iter().any(|signal| code == 128 + signal)
}

/// The words, and the signals that they stand for.
const WORDS: [(&str, i32); 2] = [("stop", SIGTERM), ("kill", SIGKILL)];
/// How long a supervisor may take that was told to kill its ranks, before its connection is given up.
const PATIENCE: Duration = Duration::from_secs(3);

/// Requests to this process.
pub struct Requests {
    signals: Signals,
    words: Option<Receiver<i32>>,
}

impl Requests {
    /// Hears [`STOP_SIGNALS`] from now on, and standard input if `over_stdin`, the end of which is as SIGHUP.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub fn listen(over_stdin: bool) -> Result<Self> {
        let failed = |source| Error::Io { action: "listen for signals".to_string(), source };
        // `nohup` and the like have them ignored.
        let listened = STOP_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal));
        let signals = Signals::new(listened).map_err(failed)?;
        let words = over_stdin.then(listen_to_words).transpose().map_err(failed)?;
        Ok(Self { signals, words })
    }

    /// What was asked for since the last look.
    pub fn pending(&mut self) -> impl Iterator<Item = i32> {
        self.signals.pending().chain(self.words.iter().flat_map(Receiver::try_iter))
    }
}

fn listen_to_words() -> std::io::Result<Receiver<i32>> {
    let (sender, receiver) = channel();
    let input = std::fs::File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    thread::Builder::new().name("stdin".into()).spawn(move || {
        for line in BufReader::new(input).lines().map_while(std::result::Result::ok) {
            let signal = WORDS.iter().find(|(word, _)| *word == line.trim()).map(|(_, signal)| *signal);
            if signal.is_some_and(|signal| sender.send(signal).is_err()) {
                return;
            }
        }
        // The supervisor may have ended meanwhile.
        let _ = sender.send(SIGHUP);
    })?;
    Ok(receiver)
}

/// The input of a supervisor on another machine.
pub struct Control {
    input: ChildStdin,
    /// The last signal it was told of, and since when.
    told: Option<(i32, Instant)>,
}

impl Control {
    pub fn new(input: ChildStdin) -> Self {
        Self { input, told: None }
    }

    /// Passes `signal` on, once.
    pub fn tell(&mut self, signal: i32) {
        if self.told.is_some_and(|(last, _)| last == signal) {
            return;
        }
        self.told = Some((signal, Instant::now()));
        for (word, _) in WORDS.iter().filter(|(_, of)| *of == signal) {
            // One that has ended hears nothing; that is seen elsewhere.
            let _ = writeln!(self.input, "{word}").and_then(|()| self.input.flush());
        }
    }

    /// Whether nothing came of being told to kill.
    pub fn is_overdue(&self) -> bool {
        self.told.is_some_and(|(signal, since)| signal == SIGKILL && since.elapsed() >= PATIENCE)
    }
}
