//! fp32 values kept as bf16 weights and what these lack: 16 bits more, so that a master costs 2
//! bytes beside its weight rather than 4, and loses nothing.
//!
//! The high half is the value rounded to bf16, to nearest, ties away from zero; the low half is the
//! value's bits less those of the high half, as a signed number. Adding it to the high half's bits
//! gives the value back. (Ties to even would need 65537 low halves.) Source: NVIDIA Apex,
//! `DistributedFusedAdam`, `store_param_remainders`.

use candle_core::{DType, Tensor};

pub use crate::cpu::remainders::{join_value, split_value};
use crate::tensor::trace;
use crate::tensor::view::{expect_dtype, expect_elements, same_storage};
use crate::{Error, Result, cpu, on_gpu};

/// Writes the halves of f32 `values`: `high`, bf16, and `low`, i16, if anybody wants it; equally
/// long, contiguous, in storages of their own.
///
/// # Errors
/// If lengths or dtypes differ from these, an operand is not contiguous, or two share a storage.
pub fn split(values: &Tensor, high: &Tensor, low: Option<&Tensor>) -> Result<()> {
    const OP: &str = "split";
    let _span = trace::moves("cast", &[values, high]);
    expect_dtype(OP, values, DType::F32)?;
    check(OP, high, low)?;
    expect_elements(OP, "high", high, values.elem_count())?;
    if same_storage(values, high) || low.is_some_and(|low| same_storage(values, low)) {
        return Err(Error::shape(OP, "values share their storage with a half"));
    }
    on_gpu!(high, reduce::split(values, high, low, OP));
    cpu::remainders::split(values, high, low, OP)
}

/// # Errors
/// If `high` and `low` are no halves of as many values.
pub(crate) fn check(op: &'static str, high: &Tensor, low: Option<&Tensor>) -> Result<()> {
    expect_dtype(op, high, DType::BF16)?;
    let Some(low) = low else { return Ok(()) };
    expect_dtype(op, low, DType::I16)?;
    expect_elements(op, "low", low, high.elem_count())?;
    if same_storage(high, low) {
        return Err(Error::shape(op, "high and low share one storage"));
    }
    Ok(())
}
