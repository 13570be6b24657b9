//! Attention with queries side by side in the lanes of vectors, for AVX-512 and what builds on it.
//!
//! Scores are made transposed, `[keys, queries]`, so that maxima, sums, masks and random words of
//! sixteen queries are operations of whole vectors. The output and the gradient of the queries are
//! gathered transposed, too, and turned once they are complete. All products are of blocks of 32 ×
//! 32 that an [`Engine`] computes: by FMA of f32, or of pairs of bf16 with sums in f32. As in other
//! products of bf16, subnormal numbers then count as 0.

mod backward;
mod engine;
mod forward;
mod math;
mod operands;
mod pairs;
mod prefetch;
mod tile;
mod weights;
mod wide;

use candle_core::DType;

use self::engine::Engine;
use self::pairs::{Amx, Dot};
use self::wide::Wide;
use super::Call;
use crate::tensor::element::Elem;
use crate::tensor::simd::Isa;

/// Queries, keys and columns of a block.
const BLOCK: usize = 32;
/// Queries in a vector.
const LANES: usize = 16;

/// What is done once the engine is known.
trait WithEngine {
    /// # Safety
    /// The machine has the engine's instructions, and what `self` points to is of its element type.
    unsafe fn run<K: Engine>(self);
}

/// Runs `what` with the engine for tensors of `E`; false where there is none.
fn with_engine<E: Elem>(what: impl WithEngine) -> bool {
    let isa = Isa::detected();
    if isa < Isa::Avx512 {
        return false;
    }
    // SAFETY: the machine has what was detected, and callers hand in tensors of E.
    unsafe {
        match E::DTYPE {
            DType::F32 => what.run::<Wide<f32>>(),
            DType::F16 => what.run::<Wide<half::f16>>(),
            DType::BF16 if isa == Isa::Amx => what.run::<Amx>(),
            DType::BF16 if isa == Isa::Avx512Bf16 => what.run::<Dot>(),
            DType::BF16 => what.run::<Wide<half::bf16>>(),
            _ => return false,
        }
    }
    true
}

impl Call<'_> {
    /// Columns of a head, rounded up to whole blocks.
    fn width(&self) -> usize {
        self.geometry.shape.head_dim.next_multiple_of(BLOCK)
    }

    /// The first keys that the first `n` queries of a sample see; those behind the sequence's end
    /// see what its last one sees.
    fn first_keys(&self, sample: usize, n: usize) -> Vec<u32> {
        let s = self.geometry.s;
        (0..n).map(|query| self.scores.first_key(s, sample, query.min(s - 1)) as u32).collect()
    }
}

pub(super) use self::backward::{Tensors, backward};
pub(super) use self::forward::forward;
pub(super) use self::weights::{add_rows, inner_product};
