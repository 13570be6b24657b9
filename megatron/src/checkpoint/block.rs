//! Boxes of a tensor: splits flat ranges into boxes, computes overlaps, and checks that a set of
//! boxes covers a tensor.
//!
//! Everything here is arithmetic on indices that were checked to be within the tensor; no
//! allocation depends on an extent.

use std::ops::Range;

/// A full box of a tensor, stored in row-major order from index `start` of some linear data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// First index in each dimension of the tensor.
    pub offset: Vec<usize>,
    /// Extent in each dimension; none is zero.
    pub shape: Vec<usize>,
    /// Index of the first element in the data.
    pub start: usize,
}

/// Elements that two linear data share: `len` elements, from `src` on and from `dst` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub src: usize,
    pub dst: usize,
    pub len: usize,
}

/// The product of a shape, unless it overflows.
pub(super) fn volume(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent))
}

/// The reason why (`offset`, `shape`, `flat`) is not a part of a tensor of shape `global`; `None`
/// if it is.
pub(super) fn misfit(
    global: &[usize],
    offset: &[usize],
    shape: &[usize],
    flat: &Range<usize>,
) -> Option<String> {
    if offset.len() != global.len() || shape.len() != global.len() {
        return Some(format!(
            "a box at {offset:?} of shape {shape:?} has a different number of dimensions than the tensor's {global:?}"
        ));
    }
    let inside = (0..global.len())
        .all(|d| offset[d].checked_add(shape[d]).is_some_and(|end| end <= global[d]));
    if !inside {
        return Some(format!(
            "a box at {offset:?} of shape {shape:?} exceeds the tensor's {global:?}"
        ));
    }
    match volume(shape) {
        Some(volume) if flat.start <= flat.end && flat.end <= volume => None,
        _ => Some(format!(
            "elements {}..{} are not in a box of shape {shape:?}",
            flat.start, flat.end
        )),
    }
}

/// The flat range `flat` of the box at `offset` of shape `shape`, as at most 2·d − 1 full boxes;
/// the range's first element is at `start` in the data.
pub(super) fn blocks(
    offset: &[usize],
    shape: &[usize],
    flat: Range<usize>,
    start: usize,
) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut at = flat.start;
    while at < flat.end {
        // Find the outermost dimension with whole slices that start here and fit into the rest.
        let mut dim = shape.len();
        let mut slice = 1; // elements of a slice along `dim - 1`
        while dim > 1 {
            let next = slice * shape[dim - 1];
            if !at.is_multiple_of(next) || next > flat.end - at {
                break;
            }
            dim -= 1;
            slice = next;
        }
        let mut block = Block {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
            start: start + (at - flat.start),
        };
        let mut len = 1;
        if dim > 0 {
            let mut rest = at / slice;
            let index = rest % shape[dim - 1];
            let count = (shape[dim - 1] - index).min((flat.end - at) / slice);
            block.offset[dim - 1] += index;
            block.shape[dim - 1] = count;
            rest /= shape[dim - 1];
            for d in (0..dim - 1).rev() {
                block.offset[d] += rest % shape[d];
                block.shape[d] = 1;
                rest /= shape[d];
            }
            len = count * slice;
        }
        blocks.push(block);
        at += len;
    }
    blocks
}

impl Block {
    /// Where this block and `other` overlap: offset and shape.
    fn intersection(&self, other: &Block) -> Option<(Vec<usize>, Vec<usize>)> {
        let mut offset = Vec::with_capacity(self.offset.len());
        let mut shape = Vec::with_capacity(self.offset.len());
        for d in 0..self.offset.len() {
            let start = self.offset[d].max(other.offset[d]);
            let end = (self.offset[d] + self.shape[d]).min(other.offset[d] + other.shape[d]);
            if start >= end {
                return None;
            }
            offset.push(start);
            shape.push(end - start);
        }
        Some((offset, shape))
    }

    /// Whether any element of the tensor is in both blocks.
    pub fn overlaps(&self, other: &Block) -> bool {
        let apart = |d: usize| {
            self.offset[d] + self.shape[d] <= other.offset[d]
                || other.offset[d] + other.shape[d] <= self.offset[d]
        };
        !(0..self.offset.len()).any(apart)
    }

    /// How many elements of the tensor are in both blocks.
    pub fn shared(&self, other: &Block) -> usize {
        self.intersection(other).map_or(0, |(_, shape)| shape.iter().product())
    }

    /// The position in the data of the element at `index` of the tensor.
    fn place(&self, index: &[usize]) -> usize {
        let within =
            (0..index.len()).fold(0, |at, d| at * self.shape[d] + (index[d] - self.offset[d]));
        self.start + within
    }

    /// Calls `f` with the longest contiguous runs shared by this block (as source) and `other` (as
    /// destination).
    pub fn for_each_run(&self, other: &Block, mut f: impl FnMut(Run)) {
        let Some((offset, shape)) = self.intersection(other) else { return };
        // Trailing dimensions that both blocks hold completely are contiguous in both, and so is
        // the dimension before them.
        let mut inner = shape.len();
        while inner > 0
            && shape[inner - 1] == self.shape[inner - 1]
            && shape[inner - 1] == other.shape[inner - 1]
        {
            inner -= 1;
        }
        let outer = inner.saturating_sub(1);
        let len = shape[outer..].iter().product();
        let mut index = offset.clone();
        loop {
            f(Run { src: self.place(&index), dst: other.place(&index), len });
            let Some(d) = (0..outer).rev().find(|&d| index[d] + 1 < offset[d] + shape[d]) else {
                return;
            };
            index[d] += 1;
            index[d + 1..outer].copy_from_slice(&offset[d + 1..outer]);
        }
    }
}

/// Checks that `blocks` cover a tensor of `numel` elements exactly once, `owner(i)` naming the i-th
/// block's origin.
///
/// # Errors
/// A sentence that says what overlaps, or how many elements are not covered.
pub(super) fn check_cover(
    numel: usize,
    blocks: &[Block],
    owner: impl Fn(usize) -> String,
) -> Result<(), String> {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by(|&a, &b| blocks[a].offset.cmp(&blocks[b].offset));
    let mut open: Vec<usize> = Vec::new(); // blocks that reach the current index of dimension 0
    let mut covered = 0usize;
    for &i in &order {
        let first = blocks[i].offset.first().copied().unwrap_or(0);
        open.retain(|&j| {
            blocks[j].offset.first().map_or(1, |offset| offset + blocks[j].shape[0]) > first
        });
        if let Some(&j) = open.iter().find(|&&j| blocks[i].intersection(&blocks[j]).is_some()) {
            let (offset, shape) = blocks[i].intersection(&blocks[j]).unwrap_or_default();
            let (a, b) = (owner(j.min(i)), owner(j.max(i)));
            return Err(format!(
                "the elements at {offset:?} of shape {shape:?} are in both {a} and {b}"
            ));
        }
        open.push(i);
        covered = covered.saturating_add(volume(&blocks[i].shape).unwrap_or(usize::MAX));
    }
    match numel.checked_sub(covered) {
        Some(0) => Ok(()),
        Some(missing) => Err(format!("nothing holds {missing} of its {numel} elements")),
        None => Err(format!("{covered} of its {numel} elements are held")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Random;
    use super::*;

    /// Row-major index in a tensor of shape `global` of every element of a block, in the block's
    /// order.
    fn elements(global: &[usize], block: &Block) -> Vec<usize> {
        (0..volume(&block.shape).unwrap())
            .map(|flat| {
                let (mut rest, mut index, mut stride) = (flat, 0, 1);
                for d in (0..global.len()).rev() {
                    index += (block.offset[d] + rest % block.shape[d]) * stride;
                    rest /= block.shape[d];
                    stride *= global[d];
                }
                index
            })
            .collect()
    }

    fn random_shape(random: &mut Random) -> Vec<usize> {
        (0..random.below(5)).map(|_| 1 + random.below(5)).collect()
    }

    /// A box of more than half of each extent in most cases, so that two of them share several
    /// indices of several dimensions.
    fn random_box(random: &mut Random, global: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let cut = |random: &mut Random, extent: usize| {
            random.below(extent).min(random.below(extent)).min(extent / 2)
        };
        let offset: Vec<usize> = global.iter().map(|&extent| cut(random, extent)).collect();
        let shape = offset
            .iter()
            .zip(global)
            .map(|(&o, &extent)| extent - o - cut(random, extent - o))
            .collect();
        (offset, shape)
    }

    #[test]
    fn a_flat_range_decomposes_into_few_boxes_with_the_same_elements_in_order() {
        let mut random = Random::new(1);
        for _ in 0..500 {
            let global = random_shape(&mut random);
            let (offset, shape) = random_box(&mut random, &global);
            let whole = Block { offset: offset.clone(), shape: shape.clone(), start: 0 };
            let len = volume(&shape).unwrap();
            let from = random.below(len + 1);
            let to = from + random.below(len - from + 1);
            let blocks = blocks(&offset, &shape, from..to, 7);
            assert!(blocks.len() <= (2 * global.len()).saturating_sub(1).max(1));
            let mut seen = Vec::new();
            for block in &blocks {
                assert_eq!(block.start, 7 + seen.len());
                seen.extend(elements(&global, block));
            }
            assert_eq!(seen, elements(&global, &whole)[from..to]);
        }
    }

    #[test]
    fn runs_pair_the_same_elements_of_both_blocks_and_miss_none() {
        let mut random = Random::new(2);
        for _ in 0..500 {
            let global = random_shape(&mut random);
            let mut block = |start| {
                let (offset, shape) = random_box(&mut random, &global);
                Block { offset, shape, start }
            };
            let (a, b) = (block(3), block(11));
            let (in_a, in_b) = (elements(&global, &a), elements(&global, &b));
            let mut shared = 0;
            a.for_each_run(&b, |run| {
                for i in 0..run.len {
                    assert_eq!(in_a[run.src - 3 + i], in_b[run.dst - 11 + i]);
                }
                shared += run.len;
            });
            assert_eq!(shared, in_a.iter().filter(|e| in_b.contains(e)).count());
        }
    }

    #[test]
    fn equal_blocks_share_one_run() {
        let a = Block { offset: vec![1, 0, 2], shape: vec![2, 3, 4], start: 0 };
        let mut runs = Vec::new();
        a.for_each_run(&a, |run| runs.push(run));
        assert_eq!(runs, [Run { src: 0, dst: 0, len: 24 }]);
    }

    #[test]
    fn a_partition_covers_and_a_hole_or_an_overlap_is_named() {
        let owner = |i: usize| format!("block {i}");
        let rows = |from: usize, to: usize| Block {
            offset: vec![from, 0],
            shape: vec![to - from, 3],
            start: 0,
        };
        assert_eq!(check_cover(12, &[rows(2, 4), rows(0, 2)], owner), Ok(()));
        let hole = check_cover(12, &[rows(0, 1), rows(2, 4)], owner).unwrap_err();
        assert!(hole.contains("nothing holds 3 of its 12"), "{hole}");
        let overlap = check_cover(12, &[rows(0, 3), rows(2, 4)], owner).unwrap_err();
        assert!(overlap.contains("[2, 0]") && overlap.contains("block 0 and block 1"), "{overlap}");
        // as many elements as the tensor has
        let both = check_cover(12, &[rows(0, 2), rows(1, 3)], owner);
        assert!(both.is_err());
    }

    #[test]
    fn a_scalar_is_covered_by_one_block_and_not_by_two() {
        let scalar = blocks(&[], &[], 0..1, 0);
        assert_eq!(scalar.len(), 1);
        assert_eq!(check_cover(1, &scalar, |i| i.to_string()), Ok(()));
        let twice = [scalar[0].clone(), scalar[0].clone()];
        assert!(check_cover(1, &twice, |i| i.to_string()).unwrap_err().contains("both"));
    }

    #[test]
    fn parts_outside_the_tensor_are_misfits_even_where_sums_overflow() {
        assert_eq!(misfit(&[4, 3], &[1, 0], &[3, 3], &(2..9)), None);
        assert!(misfit(&[4, 3], &[2, 0], &[3, 3], &(0..9)).unwrap().contains("exceeds"));
        assert!(misfit(&[4, 3], &[usize::MAX, 0], &[2, 3], &(0..6)).unwrap().contains("exceeds"));
        assert!(misfit(&[4, 3], &[0], &[4], &(0..4)).unwrap().contains("number of dimensions"));
        assert!(misfit(&[4, 3], &[0, 0], &[4, 3], &(0..13)).unwrap().contains("0..13"));
        let backwards = Range { start: 5, end: 2 };
        assert!(misfit(&[4, 3], &[0, 0], &[4, 3], &backwards).is_some());
        let huge = [usize::MAX, usize::MAX];
        assert!(misfit(&huge, &[0, 0], &huge, &(0..1)).is_some());
    }
}
