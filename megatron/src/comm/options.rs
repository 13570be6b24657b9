//! How long ranks wait for each other, and what they may do.

use std::time::Duration;

use super::secret::Secret;

/// Deadlines of communication, and its means.
#[derive(Clone, Debug)]
pub struct CommOptions {
    /// How long an operation waits for its peers before it fails with [`crate::Error::Timeout`].
    /// Covers everything a peer may do in between, such as evaluating or writing a checkpoint.
    pub timeout: Duration,
    /// How long ranks wait for each other to appear at the start.
    pub connect_timeout: Duration,
    /// Whether this rank may read and write the memory of others on its host and lets them do so
    /// with its own, so that large tensors are copied once only. Where one rank of a group must
    /// not, or the system does not allow it, none does. The bits are the same.
    pub remote_memory_access: bool,
    /// What [`crate::comm::Communicator::overlaps`] answers. It changes no bit.
    pub overlap: bool,
    /// Where this rank says whom it waits for at the start, if that takes longer than ten seconds,
    /// and whom it refused.
    pub on_wait: Option<fn(&str)>,
    /// What the ranks prove to each other with that they are of one run.
    pub secret: Secret,
}

impl Default for CommOptions {
    /// Ten minutes for an operation, one minute for ranks to appear, which is enough where all
    /// start alike; memory is reached, and nothing is issued before it is needed.
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
