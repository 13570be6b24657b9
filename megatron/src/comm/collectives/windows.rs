//! Collectives over windows of shared memory: direct exchanges between all ranks, in blocks that
//! fit in a cache.
//!
//! A rank copies a block of its tensor to its window, and the other ranks read it there. Every byte
//! is copied once on the way out, and combined or copied once on the way in. While one block is
//! read, the next one is already filled. If ranks can access each other's memory, [`direct`]
//! handles large tensors. A tensor's storage is locked only while a block is copied or combined,
//! never while waiting for a peer.

use std::cell::Cell;
use std::ops::Range;

use candle_core::Tensor;
use kernels::tensor::host::with_bytes_mut;

use super::rounds::Rounds;
use super::{direct, pieces, slice};
use crate::Result;
use crate::comm::ReduceOp;
use crate::comm::local::{BLOCK, copy_out};
use crate::comm::message::Payload;
use crate::comm::reduce::reduce_in_place;

/// Tensors of up to this many bytes over all ranks are exchanged whole: one exchange instead of
/// two, and every rank combines everything. The bits are the same.
const EXCHANGE_WHOLE: usize = 128 << 10;

/// For parts of up to this many bytes, a rank copies its own part to the output together with the
/// others' parts, because locking the output takes longer than the copy.
const COPIED_AT_ONCE: usize = 512;

/// Fills and reads one block per piece. The next block is filled before the current one is read.
fn pipelined<'a>(
    mut rounds: Rounds<'a>,
    pieces: impl Iterator<Item = Range<usize>> + Clone,
    mut fill: impl FnMut(&mut Rounds<'a>, Range<usize>) -> Result<()>,
    mut read: impl FnMut(&mut Rounds<'a>, Range<usize>) -> Result<()>,
) -> Result<()> {
    let mut ahead = pieces.clone();
    ahead.next().map_or(Ok(()), |first| fill(&mut rounds, first))?;
    for piece in pieces {
        ahead.next().map_or(Ok(()), |next| fill(&mut rounds, next))?;
        read(&mut rounds, piece)?;
    }
    Ok(())
}

/// Fills the next block with `piece` of `t`.
fn fill_from(rounds: &mut Rounds, t: &Tensor, piece: Range<usize>) -> Result<()> {
    rounds.fill_from(t, piece.len(), |all, slot| copy_out(slot, &all[piece]))
}

/// Fills the next block with the same `piece` of each rank's part of `t`.
fn fill_parts(rounds: &mut Rounds, t: &Tensor, part: usize, piece: Range<usize>) -> Result<()> {
    let (n, me, len) = (rounds.core.size(), rounds.core.rank, piece.len());
    rounds.fill_from(t, n * len, |all, slot| {
        for rank in 0..n {
            let (place, bytes) = (
                &mut slot[rank * len..(rank + 1) * len],
                &all[rank * part..(rank + 1) * part][piece.clone()],
            );
            if rank == me {
                place.copy_from_slice(bytes);
            } else {
                copy_out(place, bytes);
            }
        }
    })
}

/// Bytes of the largest piece, in whole elements of `width` bytes, such that a block holds `n`
/// pieces.
fn share_of_block(n: usize, width: usize) -> usize {
    (BLOCK / n / width).max(1) * width
}

/// Combines `parts` into `range` of `t`. `None` among the parts stands for the present content.
fn combine<'a>(
    t: &Tensor,
    range: Range<usize>,
    parts: impl Iterator<Item = Option<&'a [u8]>>,
    op: ReduceOp,
) -> Result<()> {
    with_bytes_mut(t, "reduce", |all| {
        Ok(reduce_in_place(parts, &mut all[range], &mut [], t.dtype(), op))
    })?
}

/// Copies `bytes` to byte `at` of `t`.
fn write(t: &Tensor, at: usize, bytes: &[u8]) -> Result<()> {
    with_bytes_mut(t, "receive", |all| {
        all[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    Ok(())
}

pub fn all_reduce(mut rounds: Rounds, t: &Tensor, op: ReduceOp) -> Result<()> {
    if direct::all_reduce(&mut rounds, t, op)? {
        return Ok(());
    }
    let (n, me, bytes) = (rounds.core.size(), rounds.core.rank, rounds.bytes());
    if bytes * n > EXCHANGE_WHOLE {
        return all_reduce_by_slices(rounds, t, op);
    }
    pipelined(
        rounds,
        pieces(bytes, BLOCK),
        |rounds, piece| fill_from(rounds, t, piece),
        |rounds, piece| rounds.read(|blocks| combine(t, piece, blocks.but(me), op)),
    )
}

/// Per block a reduce-scatter and an all-gather (Rabenseifner 2004): every rank combines its slice
/// for all ranks.
fn all_reduce_by_slices(mut rounds: Rounds, t: &Tensor, op: ReduceOp) -> Result<()> {
    let (n, me, width) = (rounds.core.size(), rounds.core.rank, rounds.width());
    let pieces: Vec<_> = pieces(rounds.bytes(), BLOCK).collect();
    let read_sums = |rounds: &mut Rounds, piece: &Range<usize>| {
        rounds.read(|blocks| {
            with_bytes_mut(t, "receive", |all| {
                for (peer, block) in blocks.iter().enumerate().filter(|(peer, _)| *peer != me) {
                    all[piece.clone()][slice(piece.len(), width, peer, n)].copy_from_slice(block);
                }
                Ok(())
            })?;
            Ok(())
        })
    };
    // Everything except this rank's own slice, which no other rank reads.
    let fill = |rounds: &mut Rounds, piece: &Range<usize>| {
        rounds.fill_from(t, piece.len(), |all, slot| {
            let (own, mine) = (slice(piece.len(), width, me, n), &all[piece.clone()]);
            copy_out(&mut slot[..own.start], &mine[..own.start]);
            copy_out(&mut slot[own.end..], &mine[own.end..]);
        })
    };
    fill(&mut rounds, &pieces[0])?;
    for (i, piece) in pieces.iter().enumerate() {
        if let Some(next) = pieces.get(i + 1) {
            fill(&mut rounds, next)?;
        }
        let own = slice(piece.len(), width, me, n);
        rounds.read_and_fill(own.len(), |blocks, slot| {
            let parts = (0..n).map(|rank| (rank != me).then(|| &blocks.of(rank)[own.clone()]));
            with_bytes_mut(t, "reduce", |all| {
                Ok(reduce_in_place(
                    parts,
                    &mut all[piece.clone()][own.clone()],
                    slot,
                    t.dtype(),
                    op,
                ))
            })?
        })?;
        // The sums are read one piece later, so that no rank waits for the sums of others.
        if i > 0 {
            read_sums(&mut rounds, &pieces[i - 1])?;
        }
    }
    read_sums(&mut rounds, &pieces[pieces.len() - 1])
}

pub fn all_gather(mut rounds: Rounds, input: &Tensor, output: &Tensor) -> Result<()> {
    if direct::all_gather(&mut rounds, input, output)? {
        return Ok(());
    }
    let (n, me, len) = (rounds.core.size(), rounds.core.rank, rounds.bytes());
    let at_once = len <= COPIED_AT_ONCE;
    // Address of the input, known as soon as a block of it is filled.
    let from = Cell::new(0);
    // Copies a block to its place in the output. This rank's own block may already be there.
    let receive = |all: &mut [u8], member: usize, piece: &Range<usize>, block: &[u8]| {
        let part = &mut all[member * len..][piece.clone()];
        if member != me || part.as_ptr().addr() != from.get() + piece.start {
            part.copy_from_slice(block);
        }
    };
    pipelined(
        rounds,
        pieces(len, BLOCK),
        |rounds, piece| {
            rounds.fill_from(input, piece.len(), |all, slot| {
                from.set(all.as_ptr().addr());
                copy_out(slot, &all[piece.clone()]);
            })?;
            if at_once {
                return Ok(());
            }
            // Overlaps with the transfer of the others' blocks.
            with_bytes_mut(output, "receive", |all| {
                receive(all, me, &piece, rounds.filled(piece.len()));
                Ok(())
            })?;
            Ok(())
        },
        |rounds, piece| {
            rounds.read(|blocks| {
                with_bytes_mut(output, "receive", |all| {
                    for member in (0..n).filter(|member| at_once || *member != me) {
                        receive(all, member, &piece, blocks.of(member));
                    }
                    Ok(())
                })?;
                Ok(())
            })
        },
    )
}

pub fn reduce_scatter(
    mut rounds: Rounds,
    input: &Tensor,
    output: &Tensor,
    op: ReduceOp,
) -> Result<()> {
    if direct::reduce_scatter(&mut rounds, input, output, op)? {
        return Ok(());
    }
    let (n, me, part) = (rounds.core.size(), rounds.core.rank, rounds.bytes());
    pipelined(
        rounds,
        pieces(part, share_of_block(n, output.dtype().size_in_bytes())),
        |rounds, piece| fill_parts(rounds, input, part, piece),
        |rounds, piece| {
            rounds.read(|blocks| {
                let len = piece.len();
                combine(
                    output,
                    piece,
                    blocks.iter().map(|block| Some(&block[me * len..][..len])),
                    op,
                )
            })
        },
    )
}

pub fn broadcast(rounds: Rounds, t: &Tensor, root: usize) -> Result<()> {
    let (me, len) = (rounds.core.rank, rounds.bytes());
    pipelined(
        rounds,
        pieces(len, BLOCK),
        |rounds, piece| if me == root { fill_from(rounds, t, piece) } else { rounds.pass() },
        |rounds, piece| {
            rounds.read(
                |blocks| if me == root { Ok(()) } else { write(t, piece.start, blocks.of(root)) },
            )
        },
    )
}

pub fn reduce(rounds: Rounds, t: &Tensor, root: usize, op: ReduceOp) -> Result<()> {
    let (me, len) = (rounds.core.rank, rounds.bytes());
    pipelined(
        rounds,
        pieces(len, BLOCK),
        |rounds, piece| if me == root { rounds.pass() } else { fill_from(rounds, t, piece) },
        |rounds, piece| {
            rounds.read(
                |blocks| if me == root { combine(t, piece, blocks.but(me), op) } else { Ok(()) },
            )
        },
    )
}

pub fn gather(rounds: Rounds, input: &Tensor, output: Option<&Tensor>, _root: usize) -> Result<()> {
    let len = rounds.bytes();
    pipelined(
        rounds,
        pieces(len, BLOCK),
        |rounds, piece| fill_from(rounds, input, piece),
        |rounds, piece| {
            rounds.read(|blocks| {
                let Some(output) = output else { return Ok(()) };
                let mut parts = blocks.iter().enumerate();
                parts.try_for_each(|(peer, block)| write(output, peer * len + piece.start, block))
            })
        },
    )
}

pub fn scatter(rounds: Rounds, input: Option<&Tensor>, output: &Tensor, root: usize) -> Result<()> {
    let (n, me, part) = (rounds.core.size(), rounds.core.rank, rounds.bytes());
    pipelined(
        rounds,
        pieces(part, share_of_block(n, output.dtype().size_in_bytes())),
        |rounds, piece| match input {
            Some(input) => fill_parts(rounds, input, part, piece),
            None => rounds.pass(),
        },
        |rounds, piece| {
            rounds.read(|blocks| {
                write(output, piece.start, &blocks.of(root)[me * piece.len()..][..piece.len()])
            })
        },
    )
}

pub fn all_to_all(mut rounds: Rounds, input: &Tensor, output: &Tensor) -> Result<()> {
    if direct::all_to_all(&mut rounds, input, output)? {
        return Ok(());
    }
    let (n, me) = (rounds.core.size(), rounds.core.rank);
    let part = rounds.bytes() / n;
    pipelined(
        rounds,
        pieces(part, share_of_block(n, 1)),
        |rounds, piece| fill_parts(rounds, input, part, piece),
        |rounds, piece| {
            rounds.read(|blocks| {
                let mut parts = blocks
                    .iter()
                    .map(|block| &block[me * piece.len()..][..piece.len()])
                    .enumerate();
                parts.try_for_each(|(peer, block)| write(output, peer * part + piece.start, block))
            })
        },
    )
}

pub fn barrier(mut rounds: Rounds) -> Result<()> {
    rounds.pass()?;
    rounds.read(|_| Ok(()))
}

/// Each rank sends the number of its bytes, then the bytes. From the first block all ranks know how
/// many blocks follow.
pub fn all_gather_bytes(mut rounds: Rounds, mine: Payload) -> Result<Vec<Vec<u8>>> {
    let stream = [&(mine.len() as u64).to_le_bytes()[..], &mine].concat();
    let mut gathered = vec![Vec::new(); rounds.core.size()];
    let (mut block, mut blocks) = (0, 1);
    while block < blocks {
        let piece = (block * BLOCK).min(stream.len())..((block + 1) * BLOCK).min(stream.len());
        rounds.fill(piece.len(), |slot| {
            slot.copy_from_slice(&stream[piece]);
            Ok(())
        })?;
        rounds.read(|theirs| {
            gathered
                .iter_mut()
                .zip(theirs.iter())
                .for_each(|(all, bytes)| all.extend_from_slice(bytes));
            Ok(())
        })?;
        let longest =
            gathered.iter().filter_map(|all| Some(u64::from_le_bytes(*all.first_chunk()?))).max();
        blocks = (8 + longest.unwrap_or(0) as usize).div_ceil(BLOCK);
        block += 1;
    }
    gathered.iter_mut().for_each(|all| drop(all.drain(..8)));
    Ok(gathered)
}
