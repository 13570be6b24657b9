//! Optimizer steps, block by block over a thread pool.

mod place;
mod rules;
mod run;

use candle_core::DType;

use self::rules::SgdRule;
use self::run::{step_f32, step_f64};
use crate::Result;
use crate::tensor::arguments::optimizer::{AdamRule, AdamW, Operands, Segment, Sgd};

/// An AdamW step on one segment.
pub fn adamw(of: &Operands, segment: &Segment, h: &AdamW, op: &'static str) -> Result<()> {
    match of.g.dtype() {
        DType::F64 => step_f64(op, of, segment, &AdamRule::new(h, segment)),
        _ => step_f32(op, of, segment, &AdamRule::new(h, segment)),
    }
}

/// An SGD step on one segment.
pub fn sgd(of: &Operands, segment: &Segment, h: &Sgd, op: &'static str) -> Result<()> {
    match of.g.dtype() {
        DType::F64 => step_f64(op, of, segment, &SgdRule::new(h, segment)),
        _ => step_f32(op, of, segment, &SgdRule::new(h, segment)),
    }
}
