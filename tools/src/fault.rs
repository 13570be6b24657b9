//! How a process of this program reports why it ends: as one line for the user, or as data for its
//! supervisor.
//!
//! The supervisor gathers the faults of all ranks and prints one message. A fault travels as a line
//! of standard error that starts with a control character no other output starts with.

use std::io::Write;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Set for ranks with a supervisor that reads faults; identifies the supervisor.
pub const SUPERVISED: &str = "MEGATRON_SUPERVISED";
/// The value of [`SUPERVISED`] for the supervisor of one of several machines: their launcher is at
/// the other end of its standard streams.
pub const OVER_STDIN: &str = "stdin";
/// The exit code after a panic, as in Rust's runtime.
pub const PANICKED: u8 = 101;
/// ASCII "record separator".
const MARK: char = '\u{1e}';

static REPORTED: AtomicBool = AtomicBool::new(false);

/// Why a rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// What is wrong, where, and what to do.
    pub message: String,
    /// Whether the rank failed only because another one did.
    pub blames_a_peer: bool,
    /// Whether another try would fail again.
    #[serde(default)]
    pub comes_again: bool,
}

impl Fault {
    /// The fault in `line`, if it holds one.
    pub fn from_line(line: &str) -> Option<Self> {
        serde_json::from_str(line.strip_prefix(MARK)?).ok()
    }

    /// The fault as a line.
    pub fn to_line(&self) -> Option<String> {
        serde_json::to_string(self).ok().map(|json| format!("{MARK}{json}"))
    }

    fn write(&self) {
        // A process reports only its first fault, because later ones usually follow from it.
        if REPORTED.swap(true, Ordering::SeqCst) {
            return;
        }
        let line = match (std::env::var_os(SUPERVISED), self.to_line()) {
            (Some(_), Some(line)) => format!("{line}\n"),
            _ => format!("error: {}\n", self.message),
        };
        // If standard error is closed, nobody can be told.
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }
}

/// Prints a line for the user.
pub fn tell(line: &str) {
    // If standard error is closed, nobody can be told.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Reports the error that ends this process.
pub fn report(error: &Error) {
    let (message, blames_a_peer) = (error.to_string(), error.blames_a_peer());
    Fault { message, blames_a_peer, comes_again: error.comes_again() }.write();
}

/// Ends this process at once after a failure, without destructors and exit handlers. After a
/// failure, those of CUDA and NCCL may hang, or free resources that threads still use. Nothing is
/// lost: files are synced before a failure is reported, and output is flushed here.
pub fn leave(code: u8) -> ! {
    // If standard output is closed, nobody can be told.
    let _ = std::io::stdout().flush();
    signal_hook::low_level::exit(i32::from(code))
}

/// Turns panics, which are bugs of this program, into one line.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        Fault { message: describe(info), blames_a_peer: false, comes_again: false }.write();
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v == "full") {
            let trace = std::backtrace::Backtrace::force_capture();
            let _ = writeln!(std::io::stderr(), "{trace}");
        }
    }));
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let what = info.payload_as_str().unwrap_or("panic without a message");
    let place = info.location().map_or(String::new(), |l| format!(" at {}:{}", l.file(), l.line()));
    format!(
        "internal error{place}: {what}. This is a bug in megatron {}; please report it with the command and the run file",
        env!("CARGO_PKG_VERSION")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_survives_its_line() {
        let fault = Fault {
            message: "two\nlines and \"quotes\"".into(),
            blames_a_peer: true,
            comes_again: true,
        };
        let line = fault.to_line().unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(Fault::from_line(&line), Some(fault));
    }

    #[test]
    fn ordinary_output_is_no_fault() {
        assert_eq!(Fault::from_line("{\"message\":\"x\",\"blames_a_peer\":false}"), None);
    }
}
