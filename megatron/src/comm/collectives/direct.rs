//! Collectives of large tensors between ranks that can access each other's memory. Every byte is
//! copied once, directly from the source tensor or to the destination tensor. MPI libraries call
//! this cross-memory attach.
//!
//! The windows only exchange the addresses of the tensors and serve as a barrier at the end. A
//! tensor's storage is locked only while this rank writes it, never while waiting for a peer.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Storage, Tensor};
use kernels::tensor::host::{with_bytes, with_bytes_mut};

use super::rounds::Rounds;
use super::{pieces, slice};
use crate::comm::ReduceOp;
use crate::comm::local::{Mark, Reach, read_memory, write_memory};
use crate::comm::reduce::reduce_in_place;
use crate::{Error, Result};

/// Minimum bytes of a rank's part for this method between two ranks. For smaller parts the system
/// calls cost more than the saved copies.
const FROM: usize = 32 << 10;
/// The same minimum for more ranks, which need more calls, and for a reduce-scatter, which saves
/// fewer copies.
const FROM_OF_MANY: usize = 64 << 10;
/// Bytes, over all ranks, that are combined at a time. They fit in a second-level cache.
const PIECES: usize = 512 << 10;
/// A call whose ranks access each other's memory.
struct Direct<'r, 'a> {
    rounds: &'r mut Rounds<'a>,
    pids: Arc<[u32]>,
    /// Address of each member's tensor.
    addresses: Vec<u64>,
}

/// The members' process ids if all members can access each other's memory, else `None`. The members
/// find this out together, in the first call.
fn pids(rounds: &mut Rounds) -> Result<Option<Arc<[u32]>>> {
    match rounds.reach() {
        Reach::No => return Ok(None),
        Reach::Yes(pids) => return Ok(Some(pids.clone())),
        Reach::Unknown => {}
    }
    let (mut pids, mut all) = (Vec::new(), rounds.core.remote_memory_access());
    let mark = if all { Mark::this().encode().to_vec() } else { Vec::new() };
    rounds.fill(mark.len(), |slot| {
        slot.copy_from_slice(&mark);
        Ok(())
    })?;
    rounds.read(|blocks| {
        for mark in blocks.iter().map(Mark::decode) {
            all &= mark.is_some_and(Mark::is_in_reach);
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
    /// Exchanges the tensors' addresses. `None` if not all members can access each other's memory.
    fn begin(rounds: &'r mut Rounds<'a>, t: &Tensor) -> Result<Option<Self>> {
        let Some(pids) = pids(rounds)? else { return Ok(None) };
        // The caller holds the tensor until all members have met, so its memory does not move.
        let address = with_bytes(t, "send", |all| Ok(all.as_ptr().addr() as u64))?;
        let mut addresses = Vec::with_capacity(pids.len());
        rounds.fill(8, |slot| {
            slot.copy_from_slice(&address.to_le_bytes());
            Ok(())
        })?;
        rounds.read(|blocks| {
            addresses.extend(
                blocks
                    .iter()
                    .map(|block| block.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))),
            );
            Ok(())
        })?;
        Ok(Some(Self { rounds, pids, addresses }))
    }

    /// Waits until all members have finished, then returns the result of this rank's `work`. If a
    /// peer is gone, its loss is the error.
    fn meet(self, work: Result<()>) -> Result<()> {
        self.rounds.pass()?;
        self.rounds.read(|_| Ok(()))?;
        work
    }

    /// The other members, starting with a different one on each rank.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.rounds.core.size(), self.rounds.core.rank);
        (1..n).map(move |i| (me + i) % n)
    }

    /// Copies bytes from `peer`'s tensor, starting at byte `at`.
    fn read(&self, peer: usize, at: usize, out: &mut [u8]) -> Result<()> {
        let done = read_memory(self.pids[peer], self.addresses[peer] + at as u64, out);
        done.or_else(|error| Err(self.out_of_reach("read", peer, out.len(), &error)?))
    }

    /// Copies `bytes` to byte `at` of every other member's tensor.
    ///
    /// # Safety
    /// No other code may read or write there during this call, and the others must keep their
    /// tensors until all have met.
    #[allow(unsafe_code)]
    unsafe fn write_to_all(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.peers().try_for_each(|peer| {
            // SAFETY: the caller's promise.
            let done =
                unsafe { write_memory(self.pids[peer], self.addresses[peer] + at as u64, bytes) };
            done.or_else(|error| Err(self.out_of_reach("write", peer, bytes.len(), &error)?))
        })
    }

    /// The error for memory of `peer` that could not be accessed.
    ///
    /// # Errors
    /// If the peer is gone: the error that reports the loss.
    fn out_of_reach(
        &self,
        what: &str,
        peer: usize,
        len: usize,
        error: &io::Error,
    ) -> Result<Error> {
        // The peer may have died after it sent the address.
        if error.raw_os_error() == Some(libc::ESRCH) {
            self.rounds.await_loss(peer)?;
        }
        let (core, call) = (self.rounds.core, &self.rounds.call);
        Ok(Error::comm(format!(
            "{}: cannot {what} {len} bytes of the tensor of rank {} (process {}): {error}",
            core.operation(call),
            core.ranks[peer],
            self.pids[peer]
        )))
    }

    /// Combines `range` of the members' tensors into byte `to` of `t`, which may be the same place.
    /// `input` is this rank's tensor. Calls `then` with each combined piece and its position in the
    /// tensors.
    fn combine(
        &mut self,
        input: &Tensor,
        range: Range<usize>,
        (t, to): (&Tensor, usize),
        op: ReduceOp,
        then: impl Fn(&Self, usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (n, me, width) = (self.rounds.core.size(), self.rounds.core.rank, self.rounds.width());
        let step = (PIECES / n / width).max(1) * width;
        let mut scratch = std::mem::take(self.rounds.scratch());
        scratch.resize(n * step, 0);
        for start in range.clone().step_by(step) {
            let len = step.min(range.end - start);
            for peer in self.peers() {
                self.read(peer, start, &mut scratch[peer * step..][..len])?;
            }
            let parts = (0..n).map(|r| (r != me).then(|| &scratch[r * step..][..len]));
            let place = to + start - range.start;
            self.take_own(input, start, t, place, len)?;
            with_bytes_mut(t, "reduce", |all| {
                let out = &mut all[place..place + len];
                Ok(reduce_in_place(parts, out, &mut [], t.dtype(), op)
                    .and_then(|()| then(self, start, out)))
            })??;
        }
        *self.rounds.scratch() = scratch;
        Ok(())
    }

    /// Copies `len` bytes from byte `at` of the tensor of `peer`, which is another rank, to byte
    /// `to` of `t`. It copies in pieces, so that other writers of the storage wait only briefly.
    fn copy(&self, peer: usize, at: usize, len: usize, t: &Tensor, to: usize) -> Result<()> {
        for piece in pieces(len, PIECES) {
            let place = to + piece.start..to + piece.end;
            with_bytes_mut(t, "receive", |all| {
                Ok(self.read(peer, at + piece.start, &mut all[place]))
            })??;
        }
        Ok(())
    }

    /// Copies `len` bytes from byte `at` of `input`, this rank's tensor, to byte `place` of `t`,
    /// unless both are the same memory.
    fn take_own(
        &self,
        input: &Tensor,
        at: usize,
        t: &Tensor,
        place: usize,
        len: usize,
    ) -> Result<()> {
        let me = self.rounds.core.rank;
        if !share_storage(input, t) {
            with_bytes(input, "send", |from| {
                with_bytes_mut(t, "receive", |all| {
                    all[place..place + len].copy_from_slice(&from[at..at + len]);
                    Ok(())
                })
            })?;
            return Ok(());
        }
        // candle does not allow a read while the same storage is borrowed for writing, but its
        // memory can be read.
        with_bytes_mut(t, "receive", |all| {
            let out = &mut all[place..place + len];
            let is_there = self.addresses[me] + at as u64 == out.as_ptr().addr() as u64;
            Ok(if is_there { Ok(()) } else { self.read(me, at, out) })
        })??;
        Ok(())
    }
}

fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0).addr();
    address(a) == address(b)
}

/// Minimum bytes of a rank's part for this method.
fn from(rounds: &Rounds) -> usize {
    if rounds.core.size() == 2 { FROM } else { FROM_OF_MANY }
}

/// A reduce-scatter and an all-gather (Rabenseifner 2004) in one: every rank combines its slice and
/// writes it to the tensors of all members. This function and those below return whether the call
/// was done. If false, no member has done anything.
pub fn all_reduce(rounds: &mut Rounds, t: &Tensor, op: ReduceOp) -> Result<bool> {
    if rounds.bytes() < rounds.core.size() * from(rounds) {
        return Ok(false);
    }
    let done = reduce_for_all(rounds, t, op);
    if done.is_err() {
        // A peer that has not noticed the failure may still write to this memory.
        std::mem::forget(t.clone());
    }
    done
}

fn reduce_for_all(rounds: &mut Rounds, t: &Tensor, op: ReduceOp) -> Result<bool> {
    let (n, me, width, len) =
        (rounds.core.size(), rounds.core.rank, rounds.width(), rounds.bytes());
    let Some(mut direct) = Direct::begin(rounds, t)? else { return Ok(false) };
    let own = slice(len, width, me, n);
    // The elements that only this rank writes.
    let mine = t.flatten_all()?.narrow(0, own.start / width, own.len() / width)?;
    let combined = direct.combine(t, own.clone(), (&mine, 0), op, |direct, at, sums| {
        // SAFETY: only this rank reads and writes the slice, in every member's tensor, and all
        // members keep their tensors until they have met.
        #[allow(unsafe_code)]
        unsafe {
            direct.write_to_all(at, sums)
        }
    });
    direct.meet(combined).map(|()| true)
}

pub fn all_gather(rounds: &mut Rounds, input: &Tensor, output: &Tensor) -> Result<bool> {
    let len = rounds.bytes();
    if len < from(rounds) {
        return Ok(false);
    }
    let Some(direct) = Direct::begin(rounds, input)? else { return Ok(false) };
    let me = direct.rounds.core.rank;
    let copied = direct.peers().try_for_each(|peer| direct.copy(peer, 0, len, output, peer * len));
    let copied = copied.and_then(|()| direct.take_own(input, 0, output, me * len, len));
    direct.meet(copied).map(|()| true)
}

pub fn reduce_scatter(
    rounds: &mut Rounds,
    input: &Tensor,
    output: &Tensor,
    op: ReduceOp,
) -> Result<bool> {
    let (me, part) = (rounds.core.rank, rounds.bytes());
    if part < FROM_OF_MANY {
        return Ok(false);
    }
    let Some(mut direct) = Direct::begin(rounds, input)? else { return Ok(false) };
    let combined =
        direct.combine(input, me * part..(me + 1) * part, (output, 0), op, |_, _, _| Ok(()));
    direct.meet(combined).map(|()| true)
}

pub fn all_to_all(rounds: &mut Rounds, input: &Tensor, output: &Tensor) -> Result<bool> {
    let part = rounds.bytes() / rounds.core.size();
    if part < from(rounds) {
        return Ok(false);
    }
    // Peers read the input while this rank writes the output.
    let apart = if share_storage(input, output) { Some(input.copy()?) } else { None };
    let input = apart.as_ref().unwrap_or(input);
    let Some(direct) = Direct::begin(rounds, input)? else { return Ok(false) };
    let me = direct.rounds.core.rank;
    let copied =
        direct.peers().try_for_each(|peer| direct.copy(peer, me * part, part, output, peer * part));
    let copied = copied.and_then(|()| direct.take_own(input, me * part, output, me * part, part));
    direct.meet(copied).map(|()| true)
}
