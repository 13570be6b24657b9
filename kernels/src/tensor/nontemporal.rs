//! Non-temporal stores, which bypass the caches: for data that this core does not read again soon.
//!
//! An ordinary store first fetches its cache line, and takes it from another core that has read it.
//! A non-temporal store does neither.
#![allow(unsafe_code)]

use crate::tensor::element::{Elem, Float};

/// As `fill` with zeros.
pub(crate) fn zeros<E: Elem>(to: &mut [E]) {
    let zero = E::store(<E::Acc as Float>::ZERO);
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
        // SAFETY: E is a plain number, and zero bytes are the number 0; SSE2 is part of x86-64.
        unsafe {
            let (first, lines, last) = to.align_to_mut::<__m128i>();
            first.fill(zero);
            lines.iter_mut().for_each(|line| _mm_stream_si128(line, _mm_setzero_si128()));
            last.fill(zero);
            // Only a fence orders non-temporal stores.
            _mm_sfence();
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.fill(zero);
}

/// As `copy_from_slice`. Other cores see the copied bytes once they see a later store.
///
/// # Panics
/// If the lengths differ.
pub fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy of as many bytes");
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        const WIDTH: usize = size_of::<__m128i>();
        // SAFETY: any bytes are a value of both types; SSE2 is part of x86-64. Each load reads one
        // vector's bytes of `from`; loads may be unaligned.
        unsafe {
            let (first, vectors, last) = to.align_to_mut::<__m128i>();
            let (head, rest) = from.split_at(first.len());
            let (body, tail) = rest.split_at(vectors.len() * WIDTH);
            first.copy_from_slice(head);
            for (to, from) in vectors.iter_mut().zip(body.chunks_exact(WIDTH)) {
                _mm_stream_si128(to, _mm_loadu_si128(from.as_ptr().cast()));
            }
            last.copy_from_slice(tail);
            _mm_sfence();
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_reaches_every_byte_and_no_other() {
        let from: Vec<u8> = (0..300).map(|i| (i * 7) as u8 | 1).collect();
        for start in 0..20 {
            for len in [0, 1, 15, 16, 17, 64, 100, 255] {
                let mut to = vec![0; 300];
                copy(&mut to[start..start + len], &from[start / 2..start / 2 + len]);
                assert_eq!(to[start..start + len], from[start / 2..start / 2 + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn zeros_reach_every_element_and_no_other() {
        for (start, len) in [(0, 40), (1, 0), (1, 3), (2, 33), (5, 16)] {
            let mut to = [1_f32; 64];
            zeros(&mut to[start..start + len]);
            assert!(
                (0..64).all(|i| (to[i] == 0.) == (start..start + len).contains(&i)),
                "{start} {len}"
            );
        }
    }
}
