//! The start time of the run. Ranks, restarted ones too, count from their supervisor's start, as
//! the scheduler's time limit does.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Set for ranks: start of their supervisor in milliseconds since 1970.
pub const STARTED_AT: &str = "MEGATRON_STARTED_AT";

static STARTED: OnceLock<Instant> = OnceLock::new();

/// The start of this program, or of this rank's supervisor. Call before anything else.
pub fn started() -> Instant {
    *STARTED.get_or_init(|| {
        let now = Instant::now();
        let at = std::env::var(STARTED_AT)
            .ok()
            .and_then(|at| at.parse().ok())
            .map(Duration::from_millis);
        at.and_then(|at| now.checked_sub(since_1970().checked_sub(at)?)).unwrap_or(now)
    })
}

/// The value of [`STARTED_AT`] for ranks of this process.
pub fn for_ranks() -> String {
    since_1970().saturating_sub(started().elapsed()).as_millis().to_string()
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
