//! The batch: samples of a forward pass, passes of a step, samples of a step.

use super::Resolver;
use crate::error::{Error, Result};

impl Resolver<'_> {
    /// Whether the given sizes say how many samples a forward pass has.
    pub(super) fn has_batch(&self) -> bool {
        let t = &self.flags.training;
        t.micro_batch_size.is_some()
            || t.global_batch_size.is_some() && t.gradient_accumulation_steps.is_some()
    }

    /// MBS and GBS: GBS = MBS · gradient_accumulation_steps · dp.
    ///
    /// # Errors
    /// If three sizes are given that do not fit, or the third is not whole.
    pub(super) fn batch(&mut self, dp: usize) -> Result<(usize, usize)> {
        let t = &self.flags.training;
        let steps = t.gradient_accumulation_steps;
        if let (Some(steps), false) = (steps, t.rampup_batch_size.is_empty()) {
            return Err(Error::usage(format!(
                "{} is fixed, but {} changes the samples of a step; leave one out",
                self.origins.cite("gradient_accumulation_steps", steps),
                self.origins.cite("rampup_batch_size", "given"),
            )));
        }
        let of = |key: &str, value: usize| self.origins.cite(key, value);
        let replicas = of("data_parallel_size", dp);
        match (t.micro_batch_size, t.global_batch_size, steps) {
            (_, _, Some(0)) => Err(Error::usage(format!(
                "{} must be at least 1",
                of("gradient_accumulation_steps", 0)
            ))),
            (Some(mbs), Some(gbs), Some(steps)) => {
                let product = mbs.saturating_mul(steps).saturating_mul(dp);
                if gbs == product {
                    return Ok((mbs, gbs));
                }
                Err(Error::usage(format!(
                    "{} must be {} · {} · {replicas} = {product}; leave one of them out, or change it",
                    of("global_batch_size", gbs),
                    of("micro_batch_size", mbs),
                    of("gradient_accumulation_steps", steps),
                )))
            }
            (Some(mbs), Some(gbs), None) => Ok((mbs, gbs)),
            (Some(mbs), None, steps) => {
                let from = match steps {
                    Some(steps) => format!(
                        "micro_batch_size · {} · data_parallel_size",
                        of("gradient_accumulation_steps", steps)
                    ),
                    None => "micro_batch_size · data_parallel_size".to_string(),
                };
                self.origins.record("global_batch_size", format!("default: {from}"));
                Ok((mbs, mbs.saturating_mul(steps.unwrap_or(1)).saturating_mul(dp)))
            }
            (None, Some(gbs), Some(steps)) => {
                let passes = steps.saturating_mul(dp);
                let (samples, passes_cited) = (
                    of("global_batch_size", gbs),
                    format!("{} · {replicas}", of("gradient_accumulation_steps", steps)),
                );
                if gbs == 0 || passes == 0 || !gbs.is_multiple_of(passes) {
                    return Err(Error::usage(format!(
                        "{samples} must be a multiple of {passes_cited} = {passes}, since \
                         micro_batch_size, which is not given, is the quotient"
                    )));
                }
                let from = format!("{samples} / ({passes_cited})");
                self.origins.record("micro_batch_size", from);
                Ok((gbs / passes, gbs))
            }
            (None, ..) => {
                Err(Error::usage("not set: micro_batch_size under [training]".to_string()))
            }
        }
    }
}
