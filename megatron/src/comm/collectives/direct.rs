//! The collectives of large tensors between ranks that may read each other's memory: every byte is copied once, straight out of the
//! tensor where it is. MPI libraries call this cross-memory attach.
//!
//! The windows serve to tell where the tensors are, and to meet when all have read what they need.
//! A tensor's storage is locked only while it is written, never while waiting for a peer.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use kernels::host::{with_bytes, with_bytes_mut};

use super::rounds::Rounds;
use super::slice;
use crate::comm::ReduceOp;
use crate::comm::local::{Mark, Reach, read_memory};
use crate::comm::reduce::reduce_in_place;
use crate::{Error, Result};

/// An all-gather of at least so many bytes of each rank is done this way. Below, the system calls outweigh the copy that they save.
const GATHER_FROM: usize = 96 << 10;
/// An operation that combines tensors of at least so many bytes is done this way.
const REDUCE_FROM: usize = 2 << 20;
/// Bytes of all ranks together that are combined at a time: they stay in a second-level cache.
const PIECES: usize = 512 << 10;

/// A call whose ranks read each other's memory.
struct Direct<'r, 'a> {
    rounds: &'r mut Rounds<'a>,
    pids: Arc<[u32]>,
    /// Where each member's tensor is.
    addresses: Vec<u64>,
}

/// Whether all members can read the memory of all, which they find out together, once.
fn pids(rounds: &mut Rounds) -> Result<Option<Arc<[u32]>>> {
    match rounds.reach() {
        Reach::No => return Ok(None),
        Reach::Yes(pids) => return Ok(Some(pids.clone())),
        Reach::Unknown => {}
    }
    let (mut pids, mut all) = (Vec::new(), rounds.core.reads_memory());
    let mark = if all { Mark::this().encode().to_vec() } else { Vec::new() };
    rounds.fill(mark.len(), |slot| {
        slot.copy_from_slice(&mark);
        Ok(())
    })?;
    rounds.read(|blocks| {
        for mark in blocks.iter().map(|block| Mark::decode(block)) {
            all &= mark.is_some_and(Mark::is_readable);
            pids.extend(mark.map(|mark| mark.pid));
        }
        Ok(())
    })?;
    rounds.fill(1, |slot| {
        slot[0] = u8::from(all);
        Ok(())
    })?;
    rounds.read(|blocks| {
        all &= blocks.iter().all(|block| *block == [1]);
        Ok(())
    })?;
    *rounds.reach() = if all { Reach::Yes(pids.into()) } else { Reach::No };
    Ok(match rounds.reach() {
        Reach::Yes(pids) => Some(pids.clone()),
        _ => None,
    })
}

impl<'r, 'a> Direct<'r, 'a> {
    /// Tells the others where `t` is; none where they cannot read it there.
    fn begin(rounds: &'r mut Rounds<'a>, t: &Tensor) -> Result<Option<Self>> {
        let Some(pids) = pids(rounds)? else { return Ok(None) };
        // The caller holds the tensor until all have met, so its memory stays where it is.
        let address = with_bytes(t, "send", |all| Ok(all.as_ptr().addr() as u64))?;
        let mut addresses = Vec::with_capacity(pids.len());
        rounds.fill(8, |slot| {
            slot.copy_from_slice(&address.to_le_bytes());
            Ok(())
        })?;
        rounds.read(|blocks| {
            addresses
                .extend(blocks.iter().map(|block| block.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))));
            Ok(())
        })?;
        Ok(Some(Self { rounds, pids, addresses }))
    }

    /// Waits until all have done their `work`. Where it failed because a peer is gone, that is the error.
    fn meet(&mut self, work: Result<()>) -> Result<()> {
        self.rounds.pass()?;
        self.rounds.read(|_| Ok(()))?;
        work
    }

    /// The members, this one last, each beginning with another.
    fn peers_then_me(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.rounds.core.size(), self.rounds.core.rank);
        (1..=n).map(move |i| (me + i) % n)
    }

    /// Copies what begins at byte `at` of `peer`'s tensor.
    fn read(&self, peer: usize, at: usize, out: &mut [u8]) -> Result<()> {
        let Err(error) = read_memory(self.pids[peer], self.addresses[peer] + at as u64, out) else { return Ok(()) };
        // It may have died after it told where its tensor is.
        if error.raw_os_error() == Some(libc::ESRCH) {
            self.rounds.await_loss(peer)?;
        }
        let (core, call) = (self.rounds.core, &self.rounds.call);
        Err(Error::comm(format!(
            "{}: cannot read {} bytes of the tensor of rank {} (process {}): {error}",
            core.operation(call),
            out.len(),
            core.ranks[peer],
            self.pids[peer]
        )))
    }

    /// Combines `range` of the members' tensors into `to` of `t`, which may be the very place of this rank's.
    fn combine(&mut self, range: Range<usize>, t: &Tensor, to: usize, op: ReduceOp) -> Result<()> {
        let (n, me, width) = (self.rounds.core.size(), self.rounds.core.rank, self.rounds.width());
        let step = (PIECES / n / width).max(1) * width;
        let mut scratch = std::mem::take(self.rounds.scratch());
        scratch.resize(n * step, 0);
        for start in range.clone().step_by(step) {
            let len = step.min(range.end - start);
            for peer in self.peers_then_me().filter(|peer| *peer != me) {
                self.read(peer, start, &mut scratch[peer * step..][..len])?;
            }
            let parts: Vec<_> = (0..n).map(|r| (r != me).then(|| &scratch[r * step..][..len])).collect();
            with_bytes_mut(t, "reduce", |all| {
                let out = &mut all[to + start - range.start..][..len];
                let is_mine = out.as_ptr().addr() as u64 == self.addresses[me] + start as u64;
                let own = if is_mine { Ok(()) } else { self.read(me, start, out) };
                Ok(own.and_then(|()| reduce_in_place(&parts, out, &mut [], t.dtype(), op)))
            })??;
        }
        *self.rounds.scratch() = scratch;
        Ok(())
    }

    /// Copies `range` of `peer`'s tensor to byte `to` of `t`, unless that is where it comes from; in pieces, so that others who write to
    /// the storage need not wait long.
    fn copy(&self, peer: usize, range: Range<usize>, t: &Tensor, to: usize) -> Result<()> {
        for start in range.clone().step_by(PIECES) {
            let len = PIECES.min(range.end - start);
            with_bytes_mut(t, "receive", |all| {
                let out = &mut all[to + start - range.start..][..len];
                let there = self.addresses[peer] + start as u64;
                let is_there = peer == self.rounds.core.rank && there == out.as_ptr().addr() as u64;
                Ok(if is_there { Ok(()) } else { self.read(peer, start, out) })
            })??;
        }
        Ok(())
    }
}

/// A reduce-scatter and an all-gather (Rabenseifner 2004): every rank combines its slice in place for all. As all below, it says whether
/// the call was done; where not, nothing was done, by any member.
pub fn all_reduce(rounds: &mut Rounds, t: &Tensor, op: ReduceOp) -> Result<bool> {
    let (n, me, width, len) = (rounds.core.size(), rounds.core.rank, rounds.width(), rounds.bytes());
    if len < REDUCE_FROM {
        return Ok(false);
    }
    let Some(mut direct) = Direct::begin(rounds, t)? else { return Ok(false) };
    let own = slice(len, width, me, n);
    let combined = direct.combine(own.clone(), t, own.start, op);
    direct.meet(combined)?;
    let mut peers = direct.peers_then_me().filter(|peer| *peer != me);
    let copied = peers.try_for_each(|peer| {
        let theirs = slice(len, width, peer, n);
        direct.copy(peer, theirs.clone(), t, theirs.start)
    });
    direct.meet(copied).map(|()| true)
}

pub fn all_gather(rounds: &mut Rounds, input: &Tensor, output: &Tensor) -> Result<bool> {
    let len = rounds.bytes();
    if len < GATHER_FROM {
        return Ok(false);
    }
    let Some(mut direct) = Direct::begin(rounds, input)? else { return Ok(false) };
    let copied = direct.peers_then_me().try_for_each(|peer| direct.copy(peer, 0..len, output, peer * len));
    direct.meet(copied).map(|()| true)
}

pub fn reduce_scatter(rounds: &mut Rounds, input: &Tensor, output: &Tensor, op: ReduceOp) -> Result<bool> {
    let (n, me, part) = (rounds.core.size(), rounds.core.rank, rounds.bytes());
    if n * part < REDUCE_FROM {
        return Ok(false);
    }
    let Some(mut direct) = Direct::begin(rounds, input)? else { return Ok(false) };
    let combined = direct.combine(me * part..(me + 1) * part, output, 0, op);
    direct.meet(combined).map(|()| true)
}
