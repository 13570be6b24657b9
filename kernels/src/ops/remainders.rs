//! fp32 master values stored as bf16 weights and 16-bit remainders. In addition to its weight, a
//! master then costs 2 bytes rather than 4, and loses nothing.
//!
//! The high half is the value rounded to bf16, to nearest, ties away from zero. The low half is the
//! value's bits minus those of the high half, as a signed number. Adding the low half to the bits
//! of the high half restores the value. (Ties to even would need 65537 low halves.) Source: NVIDIA
//! Apex, `DistributedFusedAdam`, `store_param_remainders`.

use candle_core::{DType, Tensor};

pub use crate::cpu::remainders::{join_value, split_value};
use crate::tensor::trace;
use crate::tensor::view::{expect_dtype, expect_elements, same_storage};
use crate::{Error, Result, cpu, on_gpu};

/// Splits f32 `values` into `high`, bf16, and, if given, `low`, i16. All are equally long,
/// contiguous, and in storages of their own.
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
/// If `high` and `low` are not halves of the same number of values.
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
