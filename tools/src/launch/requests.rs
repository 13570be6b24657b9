//! Requests to a supervisor: signals, or words on standard input over ssh, which does not forward
//! signals.
//!
//! The launcher of several machines holds the other end of that input. If the launcher, ssh or the
//! connection ends, the input ends too, so ranks are never left unsupervised. The first word is the
//! run's secret, which a command line would show to every user.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use megatron::comm::Secret;
use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::inherited::is_ignored;
use crate::error::{Error, Result};

/// The signals that ask a run to save and stop. The last two, which would kill it by default, are
/// warnings of schedulers: `sbatch --signal=USR1@120`.
pub const STOP_SIGNALS: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

/// Whether `code` is the exit code of a rank that one of [`STOP_SIGNALS`] stopped.
pub fn is_stopped(code: i32) -> bool {
    STOP_SIGNALS.iter().any(|signal| code == 128 + signal)
}

/// The words, and the equivalent signals.
const WORDS: [(&str, i32); 2] = [("stop", SIGTERM), ("kill", SIGKILL)];
/// Precedes the secret in its line.
const SECRET: &str = "secret ";
/// How long a launcher may take to send the secret, which it sends first.
const HANDING_ON: Duration = Duration::from_secs(30);
/// Interval at which signals are checked meanwhile.
const TICK: Duration = Duration::from_millis(20);
/// How long a supervisor may take to kill its ranks before its connection is closed.
const PATIENCE: Duration = Duration::from_secs(3);

/// The meaning of a line of standard input.
enum Word {
    Signal(i32),
    Secret(String),
}

impl Word {
    fn parse(line: &str) -> Option<Self> {
        let secret = || Some(Self::Secret(line.strip_prefix(SECRET)?.to_string()));
        let signal =
            WORDS.iter().find(|(word, _)| *word == line).map(|(_, signal)| Self::Signal(*signal));
        signal.or_else(secret)
    }
}

/// Requests to this process.
pub struct Requests {
    signals: Signals,
    words: Option<Receiver<Word>>,
}

impl Requests {
    /// Listens for [`STOP_SIGNALS`] from now on, and to standard input if `over_stdin`. The end of
    /// standard input counts as SIGHUP.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub fn listen(over_stdin: bool) -> Result<Self> {
        let failed = |source| Error::Io { action: "listen for signals".to_string(), source };
        // `nohup` and similar programs set signals to be ignored.
        let listened = STOP_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal));
        let signals = Signals::new(listened).map_err(failed)?;
        let words = over_stdin.then(listen_to_words).transpose().map_err(failed)?;
        Ok(Self { signals, words })
    }

    /// The requests since the last call.
    pub fn pending(&mut self) -> impl Iterator<Item = i32> {
        let signals =
            self.words.iter().flat_map(Receiver::try_iter).filter_map(|word| match word {
                Word::Signal(signal) => Some(signal),
                Word::Secret(_) => None,
            });
        self.signals.pending().chain(signals)
    }

    /// The secret that the launcher sends first on standard input, or the signal that came before
    /// it.
    ///
    /// # Errors
    /// If it sends none.
    pub fn secret(&mut self) -> Result<std::result::Result<Secret, i32>> {
        let none = || {
            Error::Launch(
                "the launcher passed no secret; run the same version of this program on all hosts"
                    .into(),
            )
        };
        let since = Instant::now();
        let words = self.words.as_ref().ok_or_else(none)?;
        while since.elapsed() < HANDING_ON {
            if let Some(signal) = self.signals.pending().next() {
                return Ok(Err(signal));
            }
            match words.recv_timeout(TICK) {
                Ok(Word::Secret(text)) => return Ok(Ok(Secret::parse(&text)?)),
                Ok(Word::Signal(signal)) => return Ok(Err(signal)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(SIGHUP)),
            }
        }
        Err(none())
    }
}

fn listen_to_words() -> std::io::Result<Receiver<Word>> {
    let (sender, receiver) = channel();
    let input = std::fs::File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    thread::Builder::new().name("stdin".into()).spawn(move || {
        for line in BufReader::new(input).lines().map_while(std::result::Result::ok) {
            if Word::parse(line.trim()).is_some_and(|word| sender.send(word).is_err()) {
                return;
            }
        }
        // The supervisor may have ended by now.
        let _ = sender.send(Word::Signal(SIGHUP));
    })?;
    Ok(receiver)
}

/// The input of a supervisor on another machine.
pub struct Control {
    input: ChildStdin,
    /// The last signal that was passed on, and the time.
    told: Option<(i32, Instant)>,
}

impl Control {
    /// Sends `secret` first.
    pub fn new(mut input: ChildStdin, secret: &Secret) -> Self {
        if let Some(secret) = secret.reveal() {
            // A supervisor that has ended receives nothing; that is detected elsewhere.
            let _ = writeln!(input, "{SECRET}{secret}").and_then(|()| input.flush());
        }
        Self { input, told: None }
    }

    /// Passes `signal` on, once.
    pub fn tell(&mut self, signal: i32) {
        if self.told.is_some_and(|(last, _)| last == signal) {
            return;
        }
        self.told = Some((signal, Instant::now()));
        for (word, _) in WORDS.iter().filter(|(_, of)| *of == signal) {
            // A supervisor that has ended receives nothing; that is detected elsewhere.
            let _ = writeln!(self.input, "{word}").and_then(|()| self.input.flush());
        }
    }

    /// Whether the supervisor did not react in time to a request to kill.
    pub fn is_overdue(&self) -> bool {
        self.told.is_some_and(|(signal, since)| signal == SIGKILL && since.elapsed() >= PATIENCE)
    }
}
