//! A work-stealing queue of numbers.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The numbers 0..n, shared by some threads. Each thread first draws the numbers of its own part,
/// in order, and then steals the remaining numbers of other parts.
///
/// Parts depend only on n and the number of threads. While all threads are equally fast, a thread
/// gets the same rows in consecutive operations. It finds in its caches what it wrote before, and
/// writes lines that no other core has read (which takes several times as long where cores share no
/// cache).
pub struct WorkQueue {
    n: usize,
    /// For every part, how many numbers were drawn, or more.
    drawn: Box<[Line]>,
}

/// Alone on a pair of cache lines, because processors fetch lines in pairs.
#[repr(align(128))]
struct Line(AtomicUsize);

impl WorkQueue {
    pub fn new(n: usize, threads: usize) -> Self {
        Self { n, drawn: (0..threads.max(1)).map(|_| Line(AtomicUsize::new(0))).collect() }
    }

    /// The next number for a thread; `None` once all are drawn.
    pub fn take(&self, thread: usize) -> Option<usize> {
        let parts = self.drawn.len();
        (thread..thread + parts).find_map(|part| {
            let part = part % parts;
            let (Line(drawn), range) = (&self.drawn[part], self.part(part));
            if drawn.load(Ordering::Relaxed) >= range.len() {
                return None;
            }
            let next = range.start + drawn.fetch_add(1, Ordering::Relaxed);
            (next < range.end).then_some(next)
        })
    }

    /// Calls `f` with numbers until none are left.
    pub fn take_all(&self, thread: usize, mut f: impl FnMut(usize)) {
        while let Some(i) = self.take(thread) {
            f(i);
        }
    }

    /// Whether every number was drawn.
    pub fn is_empty(&self) -> bool {
        (0..self.drawn.len())
            .all(|part| self.drawn[part].0.load(Ordering::Relaxed) >= self.part(part).len())
    }

    fn part(&self, part: usize) -> Range<usize> {
        let parts = self.drawn.len();
        part * self.n / parts..(part + 1) * self.n / parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_drawn_once_whoever_draws() {
        for (n, threads) in [(0, 1), (1, 4), (7, 2), (64, 3), (1000, 7)] {
            let (queue, counts) = (
                WorkQueue::new(n, threads),
                (0..n).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>(),
            );
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let (queue, counts) = (&queue, &counts);
                    scope.spawn(move || {
                        queue.take_all(thread, |i| {
                            counts[i].fetch_add(1, Ordering::Relaxed);
                        })
                    });
                }
            });
            assert!(
                queue.is_empty() && counts.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                "{n}, {threads}"
            );
        }
    }

    #[test]
    fn a_thread_keeps_to_its_part_until_that_is_drawn() {
        let queue = WorkQueue::new(10, 3);
        let drawn = |thread, n| (0..n).map(|_| queue.take(thread).unwrap()).collect::<Vec<_>>();
        assert_eq!(drawn(1, 3), [3, 4, 5]);
        assert_eq!(drawn(0, 1), [0]);
        assert!(!queue.is_empty());
        // Then it steals numbers that other threads have not drawn yet, from the next part first.
        assert_eq!(drawn(1, 5), [6, 7, 8, 9, 1]);
        assert!(!queue.is_empty());
        assert_eq!(drawn(1, 1), [2]);
        assert!(queue.is_empty() && (0..3).all(|thread| queue.take(thread).is_none()));
        // A thread without a part of its own takes from other parts.
        assert_eq!(WorkQueue::new(2, 2).take(5), Some(1));
    }
}
