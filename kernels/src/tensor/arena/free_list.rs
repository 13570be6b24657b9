//! The free ranges of an arena.

use std::collections::BTreeMap;

/// Free ranges, in offsets from the arena's beginning. No two touch.
#[derive(Debug)]
pub struct FreeList {
    /// Lengths by begin. The last range reaches the arena's end, unless the arena is full up to its
    /// end.
    by_begin: BTreeMap<usize, usize>,
    /// Everything beyond has never been lent.
    lent_up_to: usize,
}

/// A range that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub begin: usize,
    /// Length of the part, from its beginning, that was lent before.
    pub used: usize,
}

impl FreeList {
    pub const fn new() -> Self {
        Self { by_begin: BTreeMap::new(), lent_up_to: 0 }
    }

    /// Takes the first `len` of the first hole that is large enough; none if there is no such hole.
    pub fn take_first(&mut self, len: usize) -> Option<Place> {
        let (&begin, &hole) = self.by_begin.iter().find(|&(_, &hole)| hole >= len)?;
        self.by_begin.remove(&begin);
        self.insert(begin + len, hole - len);
        Some(self.lend(begin, len))
    }

    /// Takes the last `len` of the last hole between blocks that is large enough, or else the first
    /// `len` after all blocks.
    pub fn take_last(&mut self, len: usize) -> Option<Place> {
        let between = self.by_begin.iter().rev().skip(1).find(|&(_, &hole)| hole >= len);
        let Some((&begin, &hole)) = between else { return self.take_first(len) };
        self.by_begin.remove(&begin);
        self.insert(begin, hole - len);
        Some(self.lend(begin + hole - len, len))
    }

    /// Gives back a range that was taken, or a part of one.
    pub fn give(&mut self, mut begin: usize, mut len: usize) {
        if let Some((&before, &its_len)) = self.by_begin.range(..begin).next_back()
            && before + its_len == begin
        {
            self.by_begin.remove(&before);
            (begin, len) = (before, its_len + len);
        }
        if let Some(its_len) = self.by_begin.remove(&(begin + len)) {
            len += its_len;
        }
        self.insert(begin, len);
    }

    /// Takes `more` directly after `end`; none if that much is not free there.
    pub fn extend(&mut self, end: usize, more: usize) -> Option<Place> {
        let hole = *self.by_begin.get(&end)?;
        let rest = hole.checked_sub(more)?;
        self.by_begin.remove(&end);
        self.insert(end + more, rest);
        Some(self.lend(end, more))
    }

    fn lend(&mut self, begin: usize, len: usize) -> Place {
        let used = self.lent_up_to.saturating_sub(begin).min(len);
        self.lent_up_to = self.lent_up_to.max(begin + len);
        Place { begin, used }
    }

    fn insert(&mut self, begin: usize, len: usize) {
        if len > 0 {
            self.by_begin.insert(begin, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_list(len: usize) -> FreeList {
        let mut free = FreeList::new();
        free.give(0, len);
        free
    }

    fn begin(place: Option<Place>) -> Option<usize> {
        place.map(|place| place.begin)
    }

    /// Blocks of 100, 10, 50, 10, 70, 10. The first, third and fifth were given back.
    fn fragmented() -> FreeList {
        let mut free = free_list(1000);
        let blocks =
            [100, 10, 50, 10, 70, 10].map(|len| (free.take_first(len).unwrap().begin, len));
        for (begin, len) in [blocks[0], blocks[2], blocks[4]] {
            free.give(begin, len);
        }
        free
    }

    #[test]
    fn from_the_beginning_the_first_hole_that_is_large_enough_is_taken() {
        let mut free = fragmented();
        assert_eq!(begin(free.take_first(60)), Some(0), "of 100");
        assert_eq!(begin(free.take_first(60)), Some(170), "of 70");
        assert_eq!(begin(free.take_first(40)), Some(60), "what was left of 100");
        assert_eq!(begin(free.take_first(700)), Some(250), "behind all");
        assert_eq!(free.take_first(60), None);
    }

    #[test]
    fn from_the_end_the_last_hole_that_is_large_enough_is_taken_at_its_end() {
        let mut free = fragmented();
        assert_eq!(begin(free.take_last(60)), Some(180), "of 70");
        assert_eq!(begin(free.take_last(60)), Some(40), "of 100");
        assert_eq!(begin(free.take_last(10)), Some(170), "what was left of 70");
        assert_eq!(begin(free.take_last(60)), Some(250), "behind all");
        assert_eq!(begin(free.take_last(690)), Some(310), "all that is behind");
        assert_eq!(begin(free.take_last(50)), Some(110));
        assert_eq!(free.take_last(60), None);
        assert_eq!(begin(free.take_last(40)), Some(0), "the only one");
    }

    #[test]
    fn holes_beside_each_other_become_one() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut free = free_list(35);
            let blocks = [10, 10, 10].map(|len| free.take_first(len).unwrap().begin);
            order.into_iter().for_each(|i| free.give(blocks[i], 10));
            assert_eq!(begin(free.take_first(35)), Some(0), "{order:?}");
        }
    }

    #[test]
    fn a_block_grows_into_the_hole_behind_it() {
        let mut free = free_list(30);
        assert_eq!(begin(free.take_first(10)), Some(0));
        assert_eq!(free.extend(10, 21), None);
        assert_eq!(free.extend(10, 15), Some(Place { begin: 10, used: 0 }));
        assert_eq!(begin(free.take_first(5)), Some(25));
        assert_eq!(free.extend(25, 1), None);
    }

    #[test]
    fn what_was_never_lent_is_known() {
        let mut free = free_list(100);
        assert_eq!(free.take_first(20), Some(Place { begin: 0, used: 0 }));
        free.give(0, 20);
        assert_eq!(free.take_first(50), Some(Place { begin: 0, used: 20 }));
        assert_eq!(free.take_first(10), Some(Place { begin: 50, used: 0 }));
        free.give(50, 10);
        assert_eq!(free.extend(50, 30), Some(Place { begin: 50, used: 10 }));
    }
}
