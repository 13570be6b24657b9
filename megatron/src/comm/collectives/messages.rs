//! Collectives over messages: direct exchanges between every pair of ranks.
//!
//! All-reduce is a reduce-scatter and an all-gather (Rabenseifner 2004) without trees or rings:
//! each rank receives its slice from every other rank, combines it in rank order, and returns it.
//! Bits therefore never depend on timing. Short tensors are exchanged whole and combined on every
//! rank, which takes one round instead of two and gives the same bits. A tensor's storage is locked
//! only while it is copied or combined, never while waiting for a peer.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use kernels::tensor::host::with_bytes;

use crate::Result;
use crate::comm::ReduceOp;
use crate::comm::group::{Core, width, write};
use crate::comm::message::{Call, Payload};
use crate::comm::reduce::reduce_bytes;

/// Tensors up to this many bytes over all ranks are exchanged whole.
const EXCHANGE_WHOLE: usize = 128 << 10;

/// Copies of the given byte ranges of `t`.
fn read_ranges(t: &Tensor, ranges: impl IntoIterator<Item = Range<usize>>) -> Result<Vec<Payload>> {
    Ok(with_bytes(t, "send", |all| {
        let copy = |range: Range<usize>| all.get(range).map(|part| Arc::new(part.to_vec()));
        let parts: Option<Vec<Payload>> = ranges.into_iter().map(copy).collect();
        parts.ok_or_else(|| kernels::Error::shape("send", "a part past the end of the tensor"))
    })?)
}

fn read(t: &Tensor) -> Result<Payload> {
    Ok(with_bytes(t, "send", |all| Ok(Arc::new(all.to_vec())))?)
}

/// Receives one message from every peer; `None` at this rank's own place.
fn recv_all(
    core: &Core,
    phase: u8,
    call: Call,
    len: impl Fn(usize) -> Option<usize>,
) -> Result<Vec<Option<Payload>>> {
    let peers: Vec<usize> = core.peers().collect();
    let mut received = vec![None; core.size()];
    for (i, &peer) in peers.iter().enumerate() {
        received[peer] = Some(core.recv(peer, phase, call, len(peer), &peers[i + 1..])?);
    }
    Ok(received)
}

/// Combines the peers' `received` parts with the same `range` of this rank's `t`, in rank order.
fn combine(
    t: &Tensor,
    range: Range<usize>,
    received: &[Option<Payload>],
    op: ReduceOp,
) -> Result<Vec<u8>> {
    let mut out = vec![0; range.len()];
    let mut combined = Ok(());
    with_bytes(t, "reduce", |all| {
        let mine = &all[range];
        let parts = received.iter().map(|part| part.as_ref().map_or(mine, |bytes| bytes));
        combined = reduce_bytes(parts, &mut out, t.dtype(), op);
        Ok(())
    })?;
    combined.map(|()| out)
}

/// Byte range of the slice that rank `i` of `n` owns.
fn slice(call: Call, i: usize, n: usize) -> Range<usize> {
    let (count, width) = (call.count as usize, width(call.dtype));
    count * i / n * width..count * (i + 1) / n * width
}

pub fn all_reduce(core: &Core, call: Call, t: &Tensor, op: ReduceOp) -> Result<()> {
    let n = core.size();
    if n == 1 {
        return Ok(());
    }
    let bytes = call.count as usize * width(call.dtype);
    if bytes * n <= EXCHANGE_WHOLE {
        let mine = read(t)?;
        core.peers().for_each(|peer| core.send(peer, 0, call, mine.clone()));
        let received = recv_all(core, 0, call, |_| Some(bytes))?;
        return write(t, 0, &combine(t, 0..bytes, &received, op)?);
    }
    let slices = read_ranges(t, core.peers().map(|peer| slice(call, peer, n)))?;
    core.peers().zip(slices).for_each(|(peer, part)| core.send(peer, 0, call, part));
    let own = slice(call, core.rank, n);
    let received = recv_all(core, 0, call, |_| Some(own.len()))?;
    let combined = Arc::new(combine(t, own.clone(), &received, op)?);
    core.peers().for_each(|peer| core.send(peer, 1, call, combined.clone()));
    write(t, own.start, &combined)?;
    let received = recv_all(core, 1, call, |peer| Some(slice(call, peer, n).len()))?;
    write_all(t, &received, |peer| slice(call, peer, n).start)
}

fn write_all(
    t: &Tensor,
    received: &[Option<Payload>],
    offset: impl Fn(usize) -> usize,
) -> Result<()> {
    for (peer, part) in received.iter().enumerate() {
        if let Some(part) = part {
            write(t, offset(peer), part)?;
        }
    }
    Ok(())
}

pub fn all_gather(core: &Core, call: Call, input: &Tensor, output: &Tensor) -> Result<()> {
    let mine = read(input)?;
    core.peers().for_each(|peer| core.send(peer, 0, call, mine.clone()));
    write(output, core.rank * mine.len(), &mine)?;
    let received = recv_all(core, 0, call, |_| Some(mine.len()))?;
    write_all(output, &received, |peer| peer * mine.len())
}

/// Byte range of the `i`-th part; `call.count` counts one part.
fn part(call: Call, i: usize) -> Range<usize> {
    let len = call.count as usize * width(call.dtype);
    i * len..(i + 1) * len
}

pub fn reduce_scatter(
    core: &Core,
    call: Call,
    input: &Tensor,
    output: &Tensor,
    op: ReduceOp,
) -> Result<()> {
    let parts = read_ranges(input, core.peers().map(|peer| part(call, peer)))?;
    core.peers().zip(parts).for_each(|(peer, part)| core.send(peer, 0, call, part));
    let own = part(call, core.rank);
    let received = recv_all(core, 0, call, |_| Some(own.len()))?;
    write(output, 0, &combine(input, own, &received, op)?)
}

pub fn broadcast(core: &Core, call: Call, t: &Tensor, root: usize) -> Result<()> {
    if core.rank == root {
        let bytes = read(t)?;
        core.peers().for_each(|peer| core.send(peer, 0, call, bytes.clone()));
        return Ok(());
    }
    write(t, 0, &core.recv(root, 0, call, Some(part(call, 0).len()), &[])?)
}

/// For operations in which only the root receives: the root confirms its role to the others.
/// Without this, two ranks that each name the other as root would wait for each other.
fn agree_on_root(core: &Core, call: Call, root: usize) -> Result<()> {
    if core.rank != root {
        return core.recv(root, 1, call, Some(0), &[]).map(drop);
    }
    core.peers().for_each(|peer| core.send(peer, 1, call, Payload::default()));
    Ok(())
}

pub fn reduce(core: &Core, call: Call, t: &Tensor, root: usize, op: ReduceOp) -> Result<()> {
    if core.rank != root {
        core.send(root, 0, call, read(t)?);
        return agree_on_root(core, call, root);
    }
    agree_on_root(core, call, root)?;
    let whole = part(call, 0);
    let received = recv_all(core, 0, call, |_| Some(whole.len()))?;
    write(t, 0, &combine(t, whole, &received, op)?)
}

pub fn gather(
    core: &Core,
    call: Call,
    input: &Tensor,
    output: Option<&Tensor>,
    root: usize,
) -> Result<()> {
    let mine = read(input)?;
    let Some(output) = output else {
        core.send(root, 0, call, mine);
        return agree_on_root(core, call, root);
    };
    agree_on_root(core, call, root)?;
    write(output, core.rank * mine.len(), &mine)?;
    let received = recv_all(core, 0, call, |_| Some(mine.len()))?;
    write_all(output, &received, |peer| peer * mine.len())
}

pub fn scatter(
    core: &Core,
    call: Call,
    input: Option<&Tensor>,
    output: &Tensor,
    root: usize,
) -> Result<()> {
    let mine = match input {
        Some(input) => {
            let parts = read_ranges(input, (0..core.size()).map(|rank| part(call, rank)))?;
            core.peers().for_each(|peer| core.send(peer, 0, call, parts[peer].clone()));
            parts[core.rank].clone()
        }
        None => core.recv(root, 0, call, Some(part(call, 0).len()), &[])?,
    };
    write(output, 0, &mine)
}

pub fn all_to_all(core: &Core, call: Call, input: &Tensor, output: &Tensor) -> Result<()> {
    let n = core.size();
    let len = call.count as usize / n * width(call.dtype);
    let parts = read_ranges(input, (0..n).map(|rank| rank * len..(rank + 1) * len))?;
    core.peers().for_each(|peer| core.send(peer, 0, call, parts[peer].clone()));
    write(output, core.rank * len, &parts[core.rank])?;
    let received = recv_all(core, 0, call, |_| Some(len))?;
    write_all(output, &received, |peer| peer * len)
}

pub fn barrier(core: &Core, call: Call) -> Result<()> {
    let empty = Payload::default();
    core.peers().for_each(|peer| core.send(peer, 0, call, empty.clone()));
    recv_all(core, 0, call, |_| Some(0)).map(drop)
}

pub fn all_gather_bytes(core: &Core, call: Call, mine: Payload) -> Result<Vec<Vec<u8>>> {
    core.peers().for_each(|peer| core.send(peer, 0, call, mine.clone()));
    let received = recv_all(core, 0, call, |_| None)?;
    Ok(received
        .into_iter()
        .map(|part| part.map_or_else(|| mine.to_vec(), |bytes| bytes.to_vec()))
        .collect())
}
