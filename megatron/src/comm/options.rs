//! How long ranks wait for each other.

use std::time::Duration;

/// Deadlines of communication.
#[derive(Clone, Debug)]
pub struct CommOptions {
    /// How long an operation waits for its peers before it fails with [`crate::Error::Timeout`]. Covers everything a
    /// peer may do in between, such as evaluating or writing a checkpoint.
    pub timeout: Duration,
    /// How long ranks wait for each other to appear at the start.
    pub connect_timeout: Duration,
}

impl Default for CommOptions {
    /// Ten minutes for an operation, one minute for ranks to appear.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), connect_timeout: Duration::from_secs(60) }
    }
}
