//! What ranks print: read line by line by one thread per stream, handed to the supervisor in order of arrival.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::mpsc::SyncSender;
use std::thread;

/// Which of a process's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// Something that happened on a rank's stream.
#[derive(Debug)]
pub enum Event {
    /// A line without its end; longer ones come in pieces.
    Line { index: usize, stream: Stream, line: String },
    /// The stream ended: everyone who could write to it has.
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
                    let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_string();
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

/// Prints a line; a closed terminal or pipe is no reason to stop a run.
pub fn print(stream: Stream, prefix: &str, line: &str) {
    let text = format!("{prefix}{line}\n");
    let _ = match stream {
        Stream::Stdout => std::io::stdout().lock().write_all(text.as_bytes()),
        Stream::Stderr => std::io::stderr().lock().write_all(text.as_bytes()),
    };
}
