//! A stream of bytes from one rank to another through shared memory.
//!
//! A single-producer, single-consumer ring (Lamport 1983): each side publishes its own position and
//! only reads the other's.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::ring_position::RingPosition;
use super::segment::Segment;

/// The ring from `src` to `dst`. At any time at most one thread of `src` writes and one of `dst`
/// reads.
pub struct Ring {
    segment: Arc<Segment>,
    src: usize,
    dst: usize,
}

impl Ring {
    pub fn new(segment: Arc<Segment>, src: usize, dst: usize) -> Self {
        Self { segment, src, dst }
    }

    fn positions(&self) -> (&RingPosition, &RingPosition) {
        self.segment.ring_positions(self.src, self.dst)
    }

    /// Number of bytes in the ring.
    fn used(&self) -> usize {
        let (writer, reader) = self.positions();
        let used = writer
            .position
            .load(Ordering::Acquire)
            .wrapping_sub(reader.position.load(Ordering::Acquire));
        (used as usize).min(self.segment.ring_bytes())
    }

    pub fn is_empty(&self) -> bool {
        self.used() == 0
    }

    /// The one or two ranges of memory that `len` bytes from `position` on occupy.
    fn runs(&self, position: u32, len: usize) -> [(*mut u8, usize); 2] {
        let (data, capacity) =
            (self.segment.ring_data(self.src, self.dst), self.segment.ring_bytes());
        let start = position as usize & (capacity - 1);
        let first = len.min(capacity - start);
        // SAFETY: `start` < capacity, so the pointer stays within the ring's data.
        [(unsafe { data.add(start) }, first), (data, len - first)]
    }

    /// Writes as many of `bytes` as fit and returns their number.
    pub fn write(&self, bytes: &[u8]) -> usize {
        let (writer, _) = self.positions();
        let len = bytes.len().min(self.segment.ring_bytes() - self.used());
        if len == 0 {
            return 0;
        }
        let position = writer.position.load(Ordering::Relaxed);
        let mut rest = bytes;
        for (to, len) in self.runs(position, len) {
            // SAFETY: `to` has `len` bytes in the ring that the reader has released and will not
            // touch before the position below is published; `rest` has as many.
            unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), to, len) };
            rest = &rest[len..];
        }
        writer.publish(position.wrapping_add(len as u32));
        len
    }

    /// Appends at most `want` bytes to `out` and returns their number.
    pub fn read(&self, out: &mut Vec<u8>, want: usize) -> usize {
        let (_, reader) = self.positions();
        // In steps, so that the writer can refill one part while the reader copies another.
        let len = want.min(self.used()).min(self.segment.ring_bytes() / 4);
        if len == 0 {
            return 0;
        }
        let position = reader.position.load(Ordering::Relaxed);
        for (from, len) in self.runs(position, len) {
            // SAFETY: `from` has `len` bytes that the writer has published and will not touch
            // before they are released below; the slice does not outlive this statement.
            out.extend_from_slice(unsafe { std::slice::from_raw_parts(from, len) });
        }
        reader.publish(position.wrapping_add(len as u32));
        len
    }

    /// Waits until there is something to read.
    pub fn wait_readable(&self, patience: Duration, alone: bool) -> bool {
        let ready = || !self.is_empty();
        (!patience.is_zero() && RingPosition::spin(alone, ready))
            || self.positions().0.wait(patience, ready)
    }

    /// Waits until there is room to write.
    pub fn wait_writable(&self, patience: Duration) -> bool {
        self.positions().1.wait(patience, || self.used() < self.segment.ring_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring whose two ends map the memory separately, as two processes do.
    fn ends() -> (Ring, Ring) {
        let first = Segment::create(2, 7).unwrap();
        let second = Segment::join(std::process::id(), first.fd().unwrap(), 1, 2, 7).unwrap();
        (Ring::new(Arc::new(first), 0, 1), Ring::new(Arc::new(second), 0, 1))
    }

    #[test]
    fn a_stream_longer_than_the_ring_arrives_whole() {
        let (writer, reader) = ends();
        let sent: Vec<u8> = (0..5_000_003u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        let mut received = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rest = &sent[..];
                // Uneven pieces, so that positions wrap in the middle of them.
                while !rest.is_empty() {
                    rest = &rest[writer.write(&rest[..rest.len().min(77_777)])..];
                    writer.wait_writable(Duration::from_secs(1));
                }
            });
            while received.len() < sent.len() {
                reader.wait_readable(Duration::from_secs(1), false);
                reader.read(&mut received, 33_333);
            }
        });
        assert!(received == sent);
    }

    #[test]
    fn a_full_ring_takes_no_more() {
        let (writer, reader) = ends();
        let much = vec![1; 8 << 20];
        let taken = writer.write(&much);
        assert!(taken < much.len());
        assert_eq!(writer.write(&much), 0);
        assert!(!writer.wait_writable(Duration::from_millis(10)));
        assert_eq!(reader.read(&mut Vec::new(), 5), 5);
        assert_eq!(writer.write(&much), 5);
    }

    #[test]
    fn memory_of_another_run_is_refused() {
        let first = Segment::create(2, 7).unwrap();
        let join =
            |size, nonce| Segment::join(std::process::id(), first.fd().unwrap(), 1, size, nonce);
        assert!(join(2, 8).err().unwrap().to_string().contains("another run"));
        assert!(join(3, 7).err().unwrap().to_string().contains("world of 3"));
    }
}
