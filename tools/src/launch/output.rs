//! The output of ranks. One thread per stream reads it line by line and passes it to the supervisor
//! in order of arrival. Another thread prints it, so that the supervisor never waits for a slow
//! reader.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};

/// Which of a process's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// Something that happened on a rank's stream.
#[derive(Debug)]
pub enum Event {
    /// A line without its line break; long lines come in pieces.
    Line { index: usize, stream: Stream, line: String },
    /// The stream ended: all its writers have ended.
    Closed { index: usize },
}

/// Bytes of the longest piece of a line that is kept in memory.
const LONGEST: u64 = 1 << 16;

/// Reads `source`, the `stream` of local rank `index`, to its end.
///
/// # Errors
/// If no thread can be started for it.
pub fn forward(
    index: usize,
    stream: Stream,
    source: impl Read + Send + 'static,
    events: SyncSender<Event>,
) -> std::io::Result<()> {
    thread::Builder::new().spawn(move || {
        let mut source = BufReader::new(source);
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            match source.by_ref().take(LONGEST).read_until(b'\n', &mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(_) => {
                    let line =
                        String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_string();
                    if events.send(Event::Line { index, stream, line }).is_err() {
                        return;
                    }
                }
            }
        }
        // The supervisor may have stopped listening.
        let _ = events.send(Event::Closed { index });
    })?;
    Ok(())
}

/// Prints lines in order, on a thread of its own.
pub struct Printer {
    /// None once there is nothing more to print.
    sender: Option<SyncSender<(Stream, String)>>,
    thread: JoinHandle<()>,
    /// Lines without room in the queue, because this program's output is not being read.
    waiting: VecDeque<(Stream, String)>,
}

impl Printer {
    /// # Errors
    /// If no thread can be started, or there is no output.
    pub fn start() -> std::io::Result<Self> {
        let (sender, lines) = sync_channel::<(Stream, String)>(1024);
        // Not the standard library's streams: their locks would be held while output is not read,
        // and the program needs them to exit.
        let mut stdout = std::fs::File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
        let mut stderr = std::fs::File::from(std::io::stderr().as_fd().try_clone_to_owned()?);
        let thread = thread::Builder::new().spawn(move || {
            for (stream, text) in lines {
                // A closed terminal or pipe must not stop a run.
                let _ = match stream {
                    Stream::Stdout => stdout.write_all(text.as_bytes()),
                    Stream::Stderr => stderr.write_all(text.as_bytes()),
                };
            }
        })?;
        Ok(Self { sender: Some(sender), thread, waiting: VecDeque::new() })
    }

    /// Takes a line in any case; a caller with much output checks [`Self::is_stuck`] first.
    pub fn print(&mut self, stream: Stream, prefix: &str, line: &str) {
        self.waiting.push_back((stream, format!("{prefix}{line}\n")));
        self.hand_over();
    }

    /// Whether the queue is full because output is not read.
    pub fn is_stuck(&mut self) -> bool {
        self.hand_over();
        !self.waiting.is_empty()
    }

    /// Passes waiting lines to the thread, as far as there is room.
    fn hand_over(&mut self) {
        let Some(sender) = &self.sender else { return };
        while let Some(line) = self.waiting.pop_front() {
            if let Err(TrySendError::Full(line) | TrySendError::Disconnected(line)) =
                sender.try_send(line)
            {
                self.waiting.push_front(line);
                return;
            }
        }
    }

    /// Whether all lines have been printed. No lines may be added after this call.
    pub fn is_done(&mut self) -> bool {
        if !self.is_stuck() {
            self.sender = None;
        }
        self.thread.is_finished()
    }
}
