//! Attention with queries side by side in the lanes of vectors, for AVX-512 and its extensions.
//!
//! Scores are computed transposed, `[keys, queries]`, so that maxima, sums, masks and random words
//! of sixteen queries are whole-vector operations. The output and the gradient of the queries are
//! accumulated transposed, too, and transposed back once they are complete. All products are of
//! blocks of 32 × 32 that an [`Engine`] computes: by FMA of f32, or of pairs of bf16 with sums in
//! f32. As in other products of bf16, subnormal numbers then count as 0.

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

/// Work that runs once the engine is known.
trait WithEngine {
    /// # Safety
    /// The machine has the engine's instructions, and `self` points to elements of its type.
    unsafe fn run<K: Engine>(self);
}

/// Runs `what` with the engine for tensors of `E`; false if there is none.
fn with_engine<E: Elem>(what: impl WithEngine) -> bool {
    let isa = Isa::detected();
    if isa < Isa::Avx512 {
        return false;
    }
    // SAFETY: the machine has the detected instructions, and callers pass tensors of E.
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

    /// The first key that each of the first `n` queries of a sample sees. Queries beyond the
    /// sequence's end get the value of its last query.
    fn first_keys(&self, sample: usize, n: usize) -> Vec<u32> {
        let s = self.geometry.s;
        (0..n).map(|query| self.scores.first_key(s, sample, query.min(s - 1)) as u32).collect()
    }
}

pub(super) use self::backward::{Tensors, backward};
pub(super) use self::forward::forward;
pub(super) use self::weights::{add_rows, inner_product};
