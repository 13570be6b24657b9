//! The collectives of large tensors between ranks that may read and write each other's memory:
//! every byte is copied once, straight out of the tensor where it is, or into the one where it
//! belongs. MPI libraries call this cross-memory attach.
//!
//! The windows serve to tell where the tensors are, and to meet when all have done their part.
//! A tensor's storage is locked only while this rank writes it, never while waiting for a peer.

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

/// Bytes of a rank's part from which on this is done between two ranks. Below, the system calls
/// outweigh the copies that they save.
const FROM: usize = 32 << 10;
/// The same between more ranks, where there are more calls, and of a reduce-scatter, which saves
/// fewer copies.
const FROM_OF_MANY: usize = 64 << 10;
/// Bytes of all ranks together that are combined at a time: they stay in a second-level cache.
const PIECES: usize = 512 << 10;
/// A call whose ranks read and write each other's memory.
struct Direct<'r, 'a> {
    rounds: &'r mut Rounds<'a>,
    pids: Arc<[u32]>,
    /// Where each member's tensor is.
    addresses: Vec<u64>,
}

/// Whether all members can read and write the memory of all, which they find out together, once.
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
    /// Tells the others where `t` is; none where they cannot reach it there.
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
            addresses.extend(
                blocks
                    .iter()
                    .map(|block| block.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))),
            );
            Ok(())
        })?;
        Ok(Some(Self { rounds, pids, addresses }))
    }

    /// Waits until all have done their `work`. Where it failed because a peer is gone, that is the
    /// error.
    fn meet(self, work: Result<()>) -> Result<()> {
        self.rounds.pass()?;
        self.rounds.read(|_| Ok(()))?;
        work
    }

    /// The other members, each rank beginning with another.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.rounds.core.size(), self.rounds.core.rank);
        (1..n).map(move |i| (me + i) % n)
    }

    /// Copies what begins at byte `at` of `peer`'s tensor.
    fn read(&self, peer: usize, at: usize, out: &mut [u8]) -> Result<()> {
        let done = read_memory(self.pids[peer], self.addresses[peer] + at as u64, out);
        done.or_else(|error| Err(self.out_of_reach("read", peer, out.len(), &error)?))
    }

    /// Copies `bytes` to byte `at` of every other's tensor.
    ///
    /// # Safety
    /// Nobody else may read or write there while this call lasts, and the others must keep their
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

    /// What to say where `peer`'s memory could not be reached.
    ///
    /// # Errors
    /// If the peer is gone, what says so.
    fn out_of_reach(
        &self,
        what: &str,
        peer: usize,
        len: usize,
        error: &io::Error,
    ) -> Result<Error> {
        // It may have died after it told where its tensor is.
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

    /// Combines `range` of the members' tensors, of which `input` is this rank's, into `to` of `t`,
    /// which may be the very place. Piece by piece `then` gets what was combined and where in the
    /// tensors that is.
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

    /// Copies `len` bytes from byte `at` of `peer`'s tensor, not this rank's, to byte `to` of `t`;
    /// in pieces, so that others who write to the storage need not wait long.
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
    /// unless that is where they are.
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
        // One storage cannot be read while it is lent, but its memory can.
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

/// Bytes of a rank's part from which on it pays.
fn from(rounds: &Rounds) -> usize {
    if rounds.core.size() == 2 { FROM } else { FROM_OF_MANY }
}

/// A reduce-scatter and an all-gather (Rabenseifner 2004) in one: every rank combines its slice and
/// writes it into the tensors of all. As all below, it says whether the call was done; where not,
/// nothing was done, by any member.
pub fn all_reduce(rounds: &mut Rounds, t: &Tensor, op: ReduceOp) -> Result<bool> {
    if rounds.bytes() < rounds.core.size() * from(rounds) {
        return Ok(false);
    }
    let done = reduce_for_all(rounds, t, op);
    if done.is_err() {
        // A peer that has not noticed may still write there.
        std::mem::forget(t.clone());
    }
    done
}

fn reduce_for_all(rounds: &mut Rounds, t: &Tensor, op: ReduceOp) -> Result<bool> {
    let (n, me, width, len) =
        (rounds.core.size(), rounds.core.rank, rounds.width(), rounds.bytes());
    let Some(mut direct) = Direct::begin(rounds, t)? else { return Ok(false) };
    let own = slice(len, width, me, n);
    // What this rank writes, apart from what the others do.
    let mine = t.flatten_all()?.narrow(0, own.start / width, own.len() / width)?;
    let combined = direct.combine(t, own.clone(), (&mine, 0), op, |direct, at, sums| {
        // SAFETY: the slice is this rank's alone to read and write, in every member's tensor, and
        // all keep them until they have met.
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
