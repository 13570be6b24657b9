//! What a supervisor is asked for, and how: by signals, and over ssh, which passes none on, by
//! words on its standard input.
//!
//! The launcher of several machines holds the other end of that input. Whatever ends it, ssh or the
//! connection, the input ends, too, and ranks are not left alone. The first word is the run's
//! secret, which nobody else sees there: a command line is everybody's to read.

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

/// The signals that ask a run to save and stop. The last two, which else would kill it, are
/// schedulers' warnings: `sbatch --signal=USR1@120`.
pub const STOP_SIGNALS: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

/// Whether `code` is that of a rank that one of [`STOP_SIGNALS`] stopped.
pub fn is_stopped(code: i32) -> bool {
    STOP_SIGNALS.iter().any(|signal| code == 128 + signal)
}

/// The words, and the signals that they stand for.
const WORDS: [(&str, i32); 2] = [("stop", SIGTERM), ("kill", SIGKILL)];
/// What the secret follows in its line.
const SECRET: &str = "secret ";
/// How long a launcher may take to hand on the secret: it is the first thing that it does.
const HANDING_ON: Duration = Duration::from_secs(30);
/// How often signals are looked at meanwhile.
const TICK: Duration = Duration::from_millis(20);
/// How long a supervisor may take that was told to kill its ranks, before its connection is given
/// up.
const PATIENCE: Duration = Duration::from_secs(3);

/// What a line of standard input says.
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
    /// Hears [`STOP_SIGNALS`] from now on, and standard input if `over_stdin`, the end of which is
    /// as SIGHUP.
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
        let signals =
            self.words.iter().flat_map(Receiver::try_iter).filter_map(|word| match word {
                Word::Signal(signal) => Some(signal),
                Word::Secret(_) => None,
            });
        self.signals.pending().chain(signals)
    }

    /// The secret that the launcher at the other end of standard input hands on before anything
    /// else, or the signal that came before it.
    ///
    /// # Errors
    /// If it hands on none.
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
        // The supervisor may have ended meanwhile.
        let _ = sender.send(Word::Signal(SIGHUP));
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
    /// Hands on `secret` first of all.
    pub fn new(mut input: ChildStdin, secret: &Secret) -> Self {
        if let Some(secret) = secret.reveal() {
            // One that has ended hears nothing; that is seen elsewhere.
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
            // One that has ended hears nothing; that is seen elsewhere.
            let _ = writeln!(self.input, "{word}").and_then(|()| self.input.flush());
        }
    }

    /// Whether nothing came of being told to kill.
    pub fn is_overdue(&self) -> bool {
        self.told.is_some_and(|(signal, since)| signal == SIGKILL && since.elapsed() >= PATIENCE)
    }
}
