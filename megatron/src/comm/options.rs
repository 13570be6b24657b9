//! Options of communication: deadlines and permitted mechanisms.

use std::time::Duration;

use super::secret::Secret;

/// Deadlines and mechanisms of communication.
#[derive(Clone, Debug)]
pub struct CommOptions {
    /// How long an operation waits for its peers before it fails with [`crate::Error::Timeout`]. It
    /// must cover everything that a peer may do in between, such as an evaluation or a checkpoint.
    pub timeout: Duration,
    /// How long ranks wait for each other to appear at the start.
    pub connect_timeout: Duration,
    /// Whether this rank and the others on its host may access each other's memory, so that large
    /// tensors are copied only once. If one rank of a group may not, or the system does not allow
    /// it, no rank does. The bits are the same.
    pub remote_memory_access: bool,
    /// The result of [`crate::comm::Communicator::overlaps`]. It changes no bit.
    pub overlap: bool,
    /// Receives messages at the start: which ranks this rank waits for, if that takes longer than
    /// ten seconds, and which processes it refused.
    pub on_wait: Option<fn(&str)>,
    /// The secret with which ranks prove to each other that they belong to the same run.
    pub secret: Secret,
}

impl Default for CommOptions {
    /// Ten minutes for an operation, and one minute for ranks to appear, which suffices if all
    /// start alike. Remote memory access is on, and overlap is off.
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            connect_timeout: Duration::from_secs(60),
            remote_memory_access: true,
            overlap: false,
            on_wait: None,
            secret: Secret::default(),
        }
    }
}
