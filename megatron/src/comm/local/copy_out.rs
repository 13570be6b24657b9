//! Storing what other ranks will read.
//!
//! A cache line that another core has read costs its writer far more than one of its own, how much
//! more depends on the machine, and on some machines on which cores the two run on. Storing past
//! the caches costs the same everywhere, but has the reader fetch from memory. So copies are timed,
//! and now and then made the other way.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use kernels::tensor::nontemporal;

/// Bytes of a copy from which on it may be stored past the caches. What is smaller the reader finds
/// in caches too often.
const FROM: usize = 16 << 10;
/// One copy in so many is made the way that seems slower.
const PROBE: u32 = 64;
/// How many times as long the usual way may take, since the reader gains by it.
const PATIENCE: f32 = 1.5;

/// What the two ways took lately: nanoseconds for each KiB.
struct CopyTimes {
    usual: AtomicU32,
    past_caches: AtomicU32,
    copies: AtomicU32,
}

/// Of this process, whose ranks and peers run on the same machine.
static COPY_TIMES: CopyTimes = CopyTimes::new();

impl CopyTimes {
    /// Nothing is known: the first copies go either way.
    const fn new() -> Self {
        Self { usual: AtomicU32::new(0), past_caches: AtomicU32::new(0), copies: AtomicU32::new(0) }
    }

    /// Whether the next copy is to be stored past the caches.
    fn next(&self) -> bool {
        let [usual, past] =
            [&self.usual, &self.past_caches].map(|way| f32::from_bits(way.load(Ordering::Relaxed)));
        let is_better = usual > PATIENCE * past;
        let probes = self.copies.fetch_add(1, Ordering::Relaxed) % PROBE == PROBE - 1;
        if past == 0. { usual > 0. } else { is_better != probes }
    }

    /// A copy went that way and took `nanoseconds` a KiB.
    fn note(&self, past_caches: bool, nanoseconds: f32) {
        let way = if past_caches { &self.past_caches } else { &self.usual };
        let before = f32::from_bits(way.load(Ordering::Relaxed));
        let mean = if before == 0. { nanoseconds } else { f32::midpoint(before, nanoseconds) };
        // Of ranks that are threads one's figure may be lost, which the next replaces.
        way.store(mean.to_bits(), Ordering::Relaxed);
    }
}

/// Copies what others will read, and this rank seldom, to where they see it. It is complete once
/// they see a later store.
pub fn copy_out(to: &mut [u8], from: &[u8]) {
    if from.len() < FROM {
        to.copy_from_slice(from);
        return;
    }
    let (past_caches, start) = (COPY_TIMES.next(), Instant::now());
    if past_caches {
        nontemporal::copy(to, from);
    } else {
        to.copy_from_slice(from);
    }
    COPY_TIMES.note(past_caches, start.elapsed().as_nanos() as f32 / (from.len() as f32 / 1024.));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `copies` go past the caches where a KiB takes so many nanoseconds in the usual
    /// way and past the caches.
    fn past_caches(times: &CopyTimes, copies: usize, (usual, past): (f32, f32)) -> usize {
        let one = |_: &usize| {
            let way = times.next();
            times.note(way, if way { past } else { usual });
            way
        };
        (0..copies).filter(one).count()
    }

    #[test]
    fn the_way_that_was_faster_is_taken_and_the_other_tried_now_and_then() {
        let times = CopyTimes::new();
        assert_eq!(
            past_caches(&times, 640, (20., 40.)),
            10 + 1,
            "where lines are cheap, but for the first and the probes"
        );
        // Cores move apart: found within the copies to the next but few probes.
        assert!(past_caches(&times, 640, (400., 40.)) > 640 - 2 * PROBE as usize);
        assert_eq!(past_caches(&times, 640, (400., 40.)), 630);
        // And together again.
        past_caches(&times, 8 * PROBE as usize, (20., 40.));
        assert_eq!(past_caches(&times, 640, (20., 40.)), 10);
    }

    #[test]
    fn every_byte_is_copied() {
        let bytes: Vec<u8> = (0..FROM + 13).map(|i| ((i * 31) >> 3) as u8).collect();
        for len in [0, 1, FROM - 1, FROM, FROM + 12] {
            // Either way comes within as many copies.
            for _ in 0..=PROBE {
                let mut copied = vec![0; len];
                copy_out(&mut copied, &bytes[1..=len]);
                assert!(copied == bytes[1..=len], "{len}");
            }
        }
    }
}
