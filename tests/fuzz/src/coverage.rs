//! Coverage of the program's edges: counters that instrumented code increments (clang's
//! SanitizerCoverage, inline 8-bit counters).
//!
//! Without instrumentation there are no counters, and fuzzing has no feedback.
#![allow(unsafe_code)]

use std::sync::Mutex;

/// Sections of counters, one per instrumented object: address and length.
static SECTIONS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Called by every instrumented object when the program starts.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    let (start, len) = (start as usize, stop as usize - start as usize);
    if let Ok(mut sections) = SECTIONS.lock()
        && len > 0
        && !sections.contains(&(start, len))
    {
        sections.push((start, len));
    }
}

/// The counts seen so far: for each counter, one bit per order of magnitude.
#[derive(Default)]
pub struct Coverage(Vec<u8>);

impl Coverage {
    /// Number of edges that ran at all.
    pub fn edges(&self) -> usize {
        self.0.iter().filter(|&&seen| seen != 0).count()
    }

    /// Sets all counters to zero.
    pub fn reset() {
        for_each(|counters| counters.fill(0));
    }

    /// Adds the counters. Returns whether any shows something new.
    pub fn add(&mut self) -> bool {
        let (mut first, mut new) = (0, false);
        for_each(|counters| {
            let end = first + counters.len();
            if self.0.len() < end {
                self.0.resize(end, 0);
            }
            // Most counters are 0, so check several at once.
            for (counters, seen) in counters.chunks(WORD).zip(self.0[first..end].chunks_mut(WORD)) {
                if counters.iter().all(|&counter| counter == 0) {
                    continue;
                }
                for (counter, seen) in counters.iter().zip(seen) {
                    let bit = magnitude(*counter);
                    new |= *seen & bit != bit;
                    *seen |= bit;
                }
            }
            first = end;
        });
        new
    }
}

/// Number of counters that are checked together.
const WORD: usize = 64;

/// The bit for the order of magnitude of a count.
fn magnitude(count: u8) -> u8 {
    match count {
        0 => 0,
        1 => 1,
        2 => 2,
        3 => 4,
        4..8 => 8,
        8..16 => 16,
        16..32 => 32,
        32..128 => 64,
        128.. => 128,
    }
}

fn for_each(mut f: impl FnMut(&mut [u8])) {
    let Ok(sections) = SECTIONS.lock() else { return };
    for &(start, len) in sections.iter() {
        // SAFETY: the section is static memory of bytes that only instrumented code writes, each as
        // a byte. Other threads may count at the same time; a lost count is harmless.
        f(unsafe { std::slice::from_raw_parts_mut(start as *mut u8, len) });
    }
}
