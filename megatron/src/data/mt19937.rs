//! The Mersenne Twister, and the random orders that numpy and PyTorch derive from it.
//!
//! Matsumoto & Nishimura 1998, "Mersenne Twister". Megatron orders documents and samples with
//! `numpy.random.RandomState.shuffle` and epochs with `torch.randperm`; both seed with Knuth's
//! recurrence (`init_genrand`).

use rand_mt::Mt;

/// MT19937.
#[derive(Clone)]
pub(super) struct Mt19937(Mt);

impl Mt19937 {
    /// Seeded like `RandomState(seed)` and `torch.Generator().manual_seed(seed)`.
    pub fn new(seed: u32) -> Self {
        Self(Mt::new(seed))
    }

    pub fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// Uniform in 0..=`max`, by rejection with the smallest mask that covers `max` (numpy's
    /// `random_interval`).
    fn interval(&mut self, max: u64) -> u64 {
        if max == 0 {
            return 0;
        }
        let mask = u64::MAX >> max.leading_zeros();
        loop {
            let value = match max <= u64::from(u32::MAX) {
                true => u64::from(self.next_u32()),
                false => u64::from(self.next_u32()) << 32 | u64::from(self.next_u32()),
            } & mask;
            if value <= max {
                return value;
            }
        }
    }

    /// `RandomState.shuffle` of a one-dimensional array: Fisher-Yates from the end.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.interval(i as u64) as usize);
        }
    }
}

/// Number of elements from which PyTorch uses another algorithm for permutations.
pub(super) const TORCH_PERMUTATION_LIMIT: u64 = u32::MAX as u64 / 20;

/// `torch.randperm(n)` on the CPU after `manual_seed(seed)`, for `n` below
/// [`TORCH_PERMUTATION_LIMIT`].
pub(super) fn torch_permutation(n: u32, seed: u32) -> Vec<u32> {
    debug_assert!(u64::from(n) < TORCH_PERMUTATION_LIMIT);
    let mut random = Mt19937::new(seed);
    let mut order: Vec<u32> = (0..n).collect();
    for i in 0..n.saturating_sub(1) {
        order.swap(i as usize, (i + random.next_u32() % (n - i)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.random.RandomState(5489).randint(0, 2**32, dtype='uint32')` gives the numbers of the
    /// published program.
    #[test]
    fn numbers_are_those_of_the_published_program() {
        let mut random = Mt19937::new(5489);
        let first: Vec<u32> = (0..3).map(|_| random.next_u32()).collect();
        assert_eq!(first, [3_499_211_612, 581_869_302, 3_890_346_734]);
        // C++11 specifies the 10,000th number.
        let last = (3..10_000).map(|_| random.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    /// `r = numpy.random.RandomState(1234); a = numpy.arange(10); r.shuffle(a); print(a);
    /// r.shuffle(a); print(a)`
    #[test]
    fn shuffles_are_numpys_and_go_on_from_one_another() {
        let mut random = Mt19937::new(1234);
        let mut values: Vec<u32> = (0..10).collect();
        random.shuffle(&mut values);
        assert_eq!(values, [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]);
        random.shuffle(&mut values);
        assert_eq!(values, [5, 1, 8, 2, 0, 6, 7, 9, 4, 3]);
    }

    /// More than 32 bits take two draws, the high half first.
    #[test]
    fn wide_intervals_draw_the_high_half_first() {
        let (mut wide, mut narrow) = (Mt19937::new(7), Mt19937::new(7));
        let halves = [narrow.next_u32(), narrow.next_u32()].map(u64::from);
        assert_eq!(wide.interval(u64::MAX), halves[0] << 32 | halves[1]);
    }

    #[test]
    fn nothing_and_one_are_not_shuffled() {
        let mut random = Mt19937::new(0);
        random.shuffle::<u8>(&mut []);
        random.shuffle(&mut [1]);
        assert_eq!(random.next_u32(), Mt19937::new(0).next_u32());
    }
}
