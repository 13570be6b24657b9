//! Receives. A message stays in the inbox, or in shared memory, until a caller waits for it.

use std::sync::Arc;

use candle_core::Tensor;
use kernels::tensor::host::with_bytes_mut;

use super::core::Core;
use crate::comm::communicator::Pending;
use crate::comm::inbox::Key;
use crate::comm::local::PIECE;
use crate::comm::message::{Call, Message};
use crate::comm::staging::{self, Issued};
use crate::{Error, Result};

/// A receive that is performed when a caller waits for it. Until then the message stays in the
/// inbox.
pub(super) struct Receive {
    pub core: Arc<Core>,
    pub t: Issued,
    pub src: usize,
    pub call: Call,
}

impl Receive {
    fn complete(&self) -> Result<()> {
        staging::between(None, Some(&self.t), |_, t| t.map_or(Ok(()), |t| self.complete_on_cpu(t)))
    }

    fn complete_on_cpu(&self, t: &Tensor) -> Result<()> {
        let Self { core, src, call, .. } = self;
        let key = Key::Tagged { group: core.id, tag: call.tag, index: call.seq };
        let Message { header, payload, block } = core.wait(*src, key, call, &[])?;
        if !header.call.same_elements(call) {
            return Err(Error::comm(format!(
                "{}: rank {} sent a {}, but rank {} receives {}×{}",
                core.label(),
                core.ranks[*src],
                header.call,
                core.endpoint.rank,
                call.dtype.as_str(),
                call.count,
            )));
        }
        let Some(block) = block else { return write(t, 0, &payload) };
        for piece in 0..block.len().div_ceil(PIECE) {
            core.await_peer(*src, block.written(), |_| block.has(piece), call)?;
            write(t, piece * PIECE, block.piece(piece))?;
        }
        Ok(())
    }
}

impl Pending for Receive {
    fn wait(self: Box<Self>) -> Result<()> {
        self.complete()
    }

    fn detach(self: Box<Self>) {
        // The caller dropped the result, so a failure cannot be reported to it; the group's next
        // wait reports it.
        let receiver = std::thread::Builder::new().name(format!("comm-recv-{}", self.core.name));
        let _ = receiver.spawn(move || drop(self.complete()));
    }
}

/// Copies `bytes` to `t`, starting at byte `offset`.
pub(crate) fn write(t: &Tensor, offset: usize, bytes: &[u8]) -> Result<()> {
    Ok(with_bytes_mut(t, "receive", |all| match all.get_mut(offset..offset + bytes.len()) {
        Some(part) => {
            part.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(kernels::Error::shape("receive", "more bytes than the tensor holds")),
    })?)
}
