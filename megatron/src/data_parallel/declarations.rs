//! Checks the declarations of parameters: a parameter that every tp rank holds whole must have the
//! same gradient on all of them.
//!
//! A layer may use such a parameter on a part of the tokens, as under sequence parallelism, without
//! declaring its gradient partial. Its replicas would then drift apart, and the only symptom would
//! be a worse loss.

use candle_core::{DType, Device, Tensor};

use crate::comm::Group;
use crate::params::{ParamStore, Partition, overlap};
use crate::{Error, Result};

/// Relative tolerance. Rounding in kernels causes small differences between ranks; parts of a sum
/// differ by about their own size.
const TOLERANCE: f64 = 1e-3;

/// Compares the final gradients of replicated parameters over tp, as far as this rank has them.
pub(super) fn check(tp: &Group, store: &ParamStore) -> Result<()> {
    if tp.size() == 1 {
        return Ok(());
    }
    let (mut names, mut marks) = (Vec::new(), Vec::new());
    for bucket in store.buckets() {
        let options = store.options();
        let part = options.replica.range(bucket.len, options.placements.optimizer);
        for id in &bucket.params {
            let param = store.param(*id);
            let held = overlap(param.range(), &part);
            if param.spec.partition != Partition::Replicated || held.is_empty() {
                continue;
            }
            names.push(param.spec.name.as_str());
            marks.extend(mark(&bucket.reduced(&held)?)?);
        }
    }
    if names.is_empty() {
        return Ok(());
    }
    let own = Tensor::new(marks, &Device::Cpu)?;
    let all = Tensor::zeros(own.elem_count() * tp.size(), DType::F64, &Device::Cpu)?;
    tp.all_gather(&own, &all)?.wait()?;
    let all = all.reshape((tp.size(), names.len(), 2))?.to_vec3::<f64>()?;
    for (index, name) in names.iter().enumerate() {
        let [first, norm] = all[0][index][..] else { continue };
        for (rank, of_rank) in all.iter().enumerate().skip(1) {
            let [other, other_norm] = of_rank[index][..] else { continue };
            let distance = (first - other).abs().max((norm - other_norm).abs());
            // A gradient that overflowed cannot be compared.
            if distance.is_finite() && distance > TOLERANCE * norm.max(other_norm) {
                return Err(Error::config(format!(
                    "parameter {name} is declared whole on every tp rank, but its gradient on tp rank 0 (norm {norm:.4e}) is not that on \
                     tp rank {rank} (norm {other_norm:.4e}): a layer that uses it on a part of the tokens (sequence parallelism) or of the \
                     features declares `grad_partial_over_tp: true`, so that the parts are summed"
                )));
            }
        }
    }
    Ok(())
}

/// The sum of a gradient's elements, each with a sign that depends on its position, and its norm.
fn mark(grad: &Tensor) -> Result<[f64; 2]> {
    let values = grad.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let (mut sum, mut squares) = (0.0, 0.0);
    for (i, value) in values.iter().enumerate() {
        // The top bit of a multiplicative hash (Knuth, TAOCP 3, 6.4).
        let negative = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63 == 1;
        sum += if negative { -value } else { *value };
        squares += value * value;
    }
    Ok([sum, squares.sqrt()])
}
