//! Copies to memory that other ranks will read.
//!
//! Writing a cache line that another core has read costs far more than writing an own one. The cost
//! depends on the machine, and on some machines on the two cores. A non-temporal store costs the
//! same everywhere, but the reader must then fetch the data from memory. Copies are therefore
//! timed, the faster way is used, and the other one is tried from time to time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use kernels::tensor::nontemporal;

/// Minimum bytes of a copy for non-temporal stores. Smaller copies are too often read from caches.
const FROM: usize = 16 << 10;
/// One in this many copies uses the way that seems slower.
const PROBE: u32 = 64;
/// The usual way may take this many times longer before it is avoided, because it is better for the
/// reader.
const PATIENCE: f32 = 1.5;

/// Recent times of the two ways, in nanoseconds per KiB.
struct CopyTimes {
    usual: AtomicU32,
    past_caches: AtomicU32,
    copies: AtomicU32,
}

/// One value per process: its ranks and peers run on the same machine.
static COPY_TIMES: CopyTimes = CopyTimes::new();

impl CopyTimes {
    /// Without measurements, each way is tried by the first copies.
    const fn new() -> Self {
        Self { usual: AtomicU32::new(0), past_caches: AtomicU32::new(0), copies: AtomicU32::new(0) }
    }

    /// Whether the next copy uses non-temporal stores.
    fn next(&self) -> bool {
        let [usual, past] =
            [&self.usual, &self.past_caches].map(|way| f32::from_bits(way.load(Ordering::Relaxed)));
        let is_better = usual > PATIENCE * past;
        let probes = self.copies.fetch_add(1, Ordering::Relaxed) % PROBE == PROBE - 1;
        if past == 0. { usual > 0. } else { is_better != probes }
    }

    /// Records the time of a copy, in nanoseconds per KiB.
    fn note(&self, past_caches: bool, nanoseconds: f32) {
        let way = if past_caches { &self.past_caches } else { &self.usual };
        let before = f32::from_bits(way.load(Ordering::Relaxed));
        let mean = if before == 0. { nanoseconds } else { f32::midpoint(before, nanoseconds) };
        // With ranks that are threads, a concurrent measurement may be lost; the next one replaces
        // it.
        way.store(mean.to_bits(), Ordering::Relaxed);
    }
}

/// Copies bytes that other ranks will read, and this rank seldom, to shared memory. A reader that
/// sees a later store sees the complete copy.
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

    /// How many of `copies` use non-temporal stores when a KiB takes `usual` and `past` nanoseconds
    /// in the two ways.
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
        // The cores move apart: after all but a few probes, the copies use the other way.
        assert!(past_caches(&times, 640, (400., 40.)) > 640 - 2 * PROBE as usize);
        assert_eq!(past_caches(&times, 640, (400., 40.)), 630);
        // And back together again.
        past_caches(&times, 8 * PROBE as usize, (20., 40.));
        assert_eq!(past_caches(&times, 640, (20., 40.)), 10);
    }

    #[test]
    fn every_byte_is_copied() {
        let bytes: Vec<u8> = (0..FROM + 13).map(|i| ((i * 31) >> 3) as u8).collect();
        for len in [0, 1, FROM - 1, FROM, FROM + 12] {
            // Both ways occur within this many copies.
            for _ in 0..=PROBE {
                let mut copied = vec![0; len];
                copy_out(&mut copied, &bytes[1..=len]);
                assert!(copied == bytes[1..=len], "{len}");
            }
        }
    }
}
