//! Messages between ranks: the header that identifies a payload's call, and its encoding.
//!
//! Every message carries the whole call (group, operation, sequence number, dtype, count, root).
//! The receiver thus detects ranks that disagree, instead of combining unrelated bytes.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;

use super::ReduceOp;
use super::local::{Arena, Block};
use crate::{Error, Result};

/// The bytes of a message, shared by all its receivers.
pub(crate) type Payload = Arc<Vec<u8>>;

/// Largest payload that a header may announce; a larger value means a corrupt header.
const MAX_PAYLOAD: u64 = 1 << 40;
const MAGIC: u32 = 0x4d47_4354;

/// The operations of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
    AllGatherBytes,
    Split,
    SendRecv,
}

const OPS: [(Op, &str); 12] = [
    (Op::AllReduce, "all_reduce"),
    (Op::AllGather, "all_gather"),
    (Op::ReduceScatter, "reduce_scatter"),
    (Op::Broadcast, "broadcast"),
    (Op::Reduce, "reduce"),
    (Op::Gather, "gather"),
    (Op::Scatter, "scatter"),
    (Op::AllToAll, "all_to_all"),
    (Op::Barrier, "barrier"),
    (Op::AllGatherBytes, "all_gather_bytes"),
    (Op::Split, "split"),
    (Op::SendRecv, "send/recv"),
];

impl Op {
    /// Its name in messages and profiles.
    pub fn name(self) -> &'static str {
        OPS.iter().find(|(op, _)| *op == self).map_or("operation", |(_, name)| name)
    }
}

const DTYPES: [DType; 7] =
    [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];

const REDUCTIONS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

/// Whether elements of `dtype` can be sent.
pub(crate) fn is_sendable(dtype: DType) -> bool {
    DTYPES.contains(&dtype)
}

/// One call of one operation, as every member of the group must issue it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub op: Op,
    /// Index of the call among the group's collectives; for point-to-point messages, the sender's
    /// count.
    pub seq: u64,
    pub dtype: DType,
    /// Number of elements of the tensor that the operation counts; 0 if lengths may differ.
    pub count: u64,
    pub reduce: Option<ReduceOp>,
    pub root: Option<u32>,
    /// Tag of a point-to-point message.
    pub tag: u32,
}

impl Call {
    /// A call without elements, reduction or root.
    pub fn new(op: Op) -> Self {
        Self { op, seq: 0, dtype: DType::U8, count: 0, reduce: None, root: None, tag: 0 }
    }

    /// Whether both describe the same elements.
    pub fn same_elements(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.count == other.count
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.op == Op::SendRecv {
            return write!(
                f,
                "message of {}×{} with tag {}",
                self.dtype.as_str(),
                self.count,
                self.tag
            );
        }
        write!(f, "{} #{}", self.op.name(), self.seq)?;
        match self.reduce {
            None | Some(ReduceOp::Sum) => {}
            Some(ReduceOp::Max) => write!(f, " (max)")?,
            Some(ReduceOp::Min) => write!(f, " (min)")?,
        }
        if let Some(root) = self.root {
            write!(f, " with root {root}")?;
        }
        match self.op {
            Op::Barrier | Op::AllGatherBytes | Op::Split => Ok(()),
            _ => write!(f, " of {}×{}", self.dtype.as_str(), self.count),
        }
    }
}

/// The header before every payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Identity of the group; see [`super::group`].
    pub group: u64,
    /// Step within the call.
    pub phase: u8,
    pub call: Call,
    /// Bytes of the payload.
    pub len: u64,
}

impl Header {
    /// Length of an encoded header in bytes.
    pub const BYTES: usize = 48;

    /// Place of the payload's length in an encoded header: its last field.
    const LEN: Range<usize> = 40..48;

    /// The encoded header.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let call = &self.call;
        let index = |found: Option<usize>| found.map_or(u8::MAX, |i| i as u8);
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = index(OPS.iter().position(|(op, _)| *op == call.op));
        out[5] = index(DTYPES.iter().position(|d| *d == call.dtype));
        out[6] = index(REDUCTIONS.iter().position(|r| Some(*r) == call.reduce));
        out[7] = self.phase;
        out[8..16].copy_from_slice(&self.group.to_le_bytes());
        out[16..24].copy_from_slice(&call.seq.to_le_bytes());
        out[24..32].copy_from_slice(&call.count.to_le_bytes());
        out[32..36].copy_from_slice(&call.root.unwrap_or(u32::MAX).to_le_bytes());
        out[36..40].copy_from_slice(&call.tag.to_le_bytes());
        out[Self::LEN].copy_from_slice(&self.len.to_le_bytes());
        out
    }

    /// The header in shared memory, written and compared by words: reading bytes that were just
    /// written as a wider register would stall.
    pub fn words(&self) -> HeaderWords {
        let mut words = HeaderWords::default();
        words
            .iter_mut()
            .zip(self.encode().as_chunks().0)
            .for_each(|(word, bytes)| *word = u64::from_ne_bytes(*bytes));
        words
    }

    /// Decodes the header in `words`.
    ///
    /// # Errors
    /// If the words are not a header.
    pub fn from_words(words: &HeaderWords) -> Result<Self> {
        let mut bytes = [0; Self::BYTES];
        bytes
            .chunks_exact_mut(8)
            .zip(words)
            .for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_ne_bytes()));
        Self::decode(&bytes)
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// If the bytes are not a header.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self> {
        let u32_at =
            |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        let garbage = || {
            Error::comm(
                "a message between ranks does not start with a header; another program may be connected",
            )
        };
        if u32_at(0) != MAGIC || u64_at(40) > MAX_PAYLOAD {
            return Err(garbage());
        }
        let op = OPS.get(usize::from(bytes[4])).ok_or_else(garbage)?.0;
        let dtype = *DTYPES.get(usize::from(bytes[5])).ok_or_else(garbage)?;
        let root = Some(u32_at(32)).filter(|root| *root != u32::MAX);
        let reduce = REDUCTIONS.get(usize::from(bytes[6])).copied();
        let call =
            Call { op, seq: u64_at(16), dtype, count: u64_at(24), reduce, root, tag: u32_at(36) };
        Ok(Self { group: u64_at(8), phase: bytes[7], call, len: u64_at(40) })
    }
}

/// An encoded header by words. The last word is the length of the payload; the others are the same
/// for all parts of a call.
pub(crate) type HeaderWords = [u64; Header::BYTES / 8];

/// A received message.
#[derive(Debug)]
pub(crate) struct Message {
    pub header: Header,
    pub payload: Payload,
    /// The place of the bytes, if the sender left them in its heap.
    pub block: Option<Block>,
}

impl Message {
    /// Phase of a point-to-point message whose payload is the place of its bytes in the sender's
    /// heap.
    pub const IN_HEAP: u8 = 1;

    /// A message that arrived with all its bytes.
    pub fn whole(header: Header, payload: Payload) -> Self {
        Self { header, payload, block: None }
    }

    /// A message from world rank `src`, whose heap is part of `arena`.
    ///
    /// # Errors
    /// If it points to an impossible place.
    pub fn new(header: Header, payload: Payload, arena: &Arena, src: usize) -> Result<Self> {
        if header.call.op != Op::SendRecv || header.phase != Self::IN_HEAP {
            return Ok(Self::whole(header, payload));
        }
        let offset =
            payload.as_slice().try_into().ok().map(|bytes| u64::from_le_bytes(bytes) as usize);
        let len = (header.call.count as usize).checked_mul(header.call.dtype.size_in_bytes());
        let block = offset
            .zip(len)
            .and_then(|(offset, len)| Block::open(&arena.heap_memory(src), offset, len));
        let block = block.ok_or_else(|| {
            Error::comm(format!("a {} is outside its sender's memory", header.call))
        })?;
        Ok(Self { header, payload, block: Some(block) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let call = Call {
            op: Op::Reduce,
            seq: 7,
            dtype: DType::BF16,
            count: 9,
            reduce: Some(ReduceOp::Max),
            root: Some(3),
            tag: 5,
        };
        Header { group: u64::MAX - 1, phase: 2, call, len: 18 }
    }

    #[test]
    fn a_header_survives_its_encoding() {
        assert_eq!(Header::decode(&header().encode()).unwrap(), header());
        assert_eq!(Header::from_words(&header().words()).unwrap(), header());
        assert_eq!(header().words().last(), Some(&18_u64.to_le()));
    }

    #[test]
    fn a_header_with_a_wrong_byte_is_refused() {
        for at in [0, 4, 5, 47] {
            let mut bytes = header().encode();
            bytes[at] = 0xee;
            assert!(Header::decode(&bytes).is_err(), "byte {at}");
        }
    }
}
