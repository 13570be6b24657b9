//! Steps through the blocks of a group's windows: waits, and checks that all members make the same
//! call.
//!
//! Every block carries the header of its call, even if it has no bytes. Ranks that disagree thus
//! notice at once.

use std::sync::MutexGuard;

use candle_core::Tensor;
use kernels::tensor::host::with_bytes;

use crate::Result;
use crate::comm::group::{Core, width};
use crate::comm::inbox::lock;
use crate::comm::local::{BLOCK, Blocks, Reach, Windows};
use crate::comm::message::{Call, Header, HeaderWords};

/// One call's blocks. All members fill and read the same number of blocks in the same order.
pub struct Rounds<'a> {
    pub core: &'a Core,
    pub call: Call,
    windows: MutexGuard<'a, Windows>,
    /// The encoded header of the next block. Blocks of a call differ only in their length.
    header: HeaderWords,
}

impl<'a> Rounds<'a> {
    /// `None` if the group has no windows.
    pub fn begin(core: &'a Core, call: Call) -> Option<Self> {
        let windows = lock(core.windows.as_ref()?);
        Some(Self { core, call, windows, header: core.header(0, call, 0).words() })
    }

    /// Bytes of one element.
    pub fn width(&self) -> usize {
        width(self.call.dtype)
    }

    /// Bytes of the tensor that the call counts.
    pub fn bytes(&self) -> usize {
        self.call.count as usize * self.width()
    }

    /// The group's knowledge about access to its members' memory.
    pub fn reach(&mut self) -> &mut Reach {
        &mut self.windows.reach
    }

    /// Memory of the group that this call may use freely.
    pub fn scratch(&mut self) -> &mut Vec<u8> {
        &mut self.windows.scratch
    }

    /// Waits until the loss of `peer`, whose process is gone, is noticed, and returns it as the
    /// error.
    pub fn await_loss(&self, peer: usize) -> Result<()> {
        self.core.await_peer(peer, self.windows.posted_by(peer), |_| false, &self.call)
    }

    fn wait_for_room(&self) -> Result<()> {
        let windows = &*self.windows;
        let has_room = |peer| windows.has_room(peer);
        self.core.peers().try_for_each(|peer| {
            self.core.await_peer(peer, windows.taken_by(peer), has_room, &self.call)
        })
    }

    /// Waits for the next block of every member.
    fn wait_for_blocks(&mut self) -> Result<()> {
        for peer in 0..self.core.size() {
            let windows = &*self.windows;
            if peer != self.core.rank {
                let has_block = |peer| windows.has_block(peer);
                self.core.await_peer(peer, windows.posted_by(peer), has_block, &self.call)?;
            }
            // Compares the encoded headers, because decoding one takes as long as a small
            // operation.
            let theirs = windows.header(peer);
            let ([.., len], [expected @ .., _]) = (theirs, &self.header);
            let len = u64::from_le(len);
            if expected.iter().zip(&theirs).any(|(ours, theirs)| ours != theirs)
                || len > BLOCK as u64
            {
                return Err(self.core.disagreement(
                    peer,
                    Header::from_words(&theirs)?.call,
                    self.call,
                ));
            }
            self.windows.set_len(peer, len as usize);
        }
        Ok(())
    }

    fn post(&mut self, len: usize) {
        let [.., of_block] = &mut self.header;
        *of_block = (len as u64).to_le();
        self.windows.post(&self.header);
    }

    /// Fills this rank's next block with `len` bytes.
    pub fn fill(&mut self, len: usize, f: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.wait_for_room()?;
        f(self.windows.slot(len))?;
        self.post(len);
        Ok(())
    }

    /// As [`Rounds::fill`], from the bytes of `t`. It posts the block before it unlocks the
    /// storage: unlocking would first wait for the pending writes of the core.
    pub fn fill_from(
        &mut self,
        t: &Tensor,
        len: usize,
        f: impl FnOnce(&[u8], &mut [u8]),
    ) -> Result<()> {
        self.wait_for_room()?;
        with_bytes(t, "send", |all| {
            f(all, self.windows.slot(len));
            self.post(len);
            Ok(())
        })?;
        Ok(())
    }

    /// The first `len` bytes of the last filled block.
    pub fn filled(&self, len: usize) -> &[u8] {
        self.windows.last_posted(len)
    }

    /// Posts an empty block, if this rank has nothing to send.
    pub fn pass(&mut self) -> Result<()> {
        self.fill(0, |_| Ok(()))
    }

    /// Reads the next block of every member, this rank's own included, in group order.
    pub fn read(&mut self, f: impl FnOnce(Blocks) -> Result<()>) -> Result<()> {
        self.wait_for_blocks()?;
        f(self.windows.blocks())?;
        self.windows.take();
        Ok(())
    }

    /// As [`Rounds::read`], and fills this rank's next block with `len` bytes at the same time.
    pub fn read_and_fill(
        &mut self,
        len: usize,
        f: impl FnOnce(Blocks, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.wait_for_blocks()?;
        self.wait_for_room()?;
        let (blocks, slot) = self.windows.blocks_and_slot(len);
        f(blocks, slot)?;
        self.windows.take();
        self.post(len);
        Ok(())
    }
}
