//! Detects divergence: too many consecutive steps with non-finite results, or a non-finite
//! parameter. No checkpoint holds a non-finite parameter.
//!
//! Every rank reaches the same verdict: all ranks have the same loss and gradient norm, and they
//! exchange what they find in their parameters.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::Tensor;
use kernels::ops::reduce::sums_of_squares;

use super::metrics::StepMetrics;
use super::state;
use super::trainer::Trainer;
use crate::config::{LossScaling, Precision, Takes};
use crate::params::{Elements, LocalPart, ShardRef, StateKind};
use crate::{Error, Result, checkpoint};

/// Adds the step number to `error` if it reports divergence.
pub(super) fn at_step(iteration: u64, error: Error) -> Error {
    match error {
        Error::Diverged(what) => Error::Diverged(format!("step {iteration}: {what}")),
        error => error,
    }
}

impl Trainer {
    /// The error that ends the run if `step` exceeds the allowed number of consecutive steps with a
    /// non-finite loss or gradient.
    pub(super) fn divergence(&self, step: &StepMetrics) -> Option<Error> {
        let (limit, in_a_row) = (self.config.training.max_nonfinite_steps, step.nonfinite_in_a_row);
        if limit == 0 || in_a_row < limit {
            return None;
        }
        let first = step.iteration + 1 - in_a_row;
        let steps = if in_a_row == 1 {
            format!("step {first} is not finite")
        } else {
            format!("{in_a_row} steps in a row were not finite, from step {first} on")
        };
        Some(Error::Diverged(format!(
            "training diverged: {steps} (max_nonfinite_steps = {limit}); step {}: loss {}, gradient norm {}. {}",
            step.iteration,
            step.lm_loss,
            step.grad_norm,
            self.what_to_try(first)
        )))
    }

    /// Advice for a run in which step `first` was the first non-finite one.
    fn what_to_try(&self, first: u64) -> String {
        let config = &self.config.checkpoint;
        // A checkpoint loaded for its weights alone is not continued; the run started new from it.
        let loaded =
            checkpoint::to_load(config).ok().flatten().filter(|_| config.takes != Takes::Weights);
        let around = loaded.and_then(|folder| checkpoint::checkpoints_folder(&folder).ok());
        let saved = config.save.clone().into_iter().chain(around).find_map(|dir| {
            let is_good = |iteration: &u64| {
                *iteration < first
                    && state::is_healthy(&checkpoint::iteration_dir(&dir, *iteration))
            };
            let before = checkpoint::iterations(&dir).ok()?.into_iter().rfind(is_good)?;
            Some(format!(
                "Continue from an earlier checkpoint (--load {} --ckpt-step {before})",
                dir.display()
            ))
        });
        let scale = match self.config.training.precision {
            Precision::Fp16(LossScaling::Static(_)) => ", a smaller --loss-scale",
            _ => "",
        };
        let clip = match self.config.optimizer.clip_grad {
            0.0 => "clipped gradients (--clip-grad 1)",
            _ => "a smaller --clip-grad",
        };
        format!(
            "{} with a lower --lr, a longer warm-up{scale} or {clip}: with the same settings it diverges again",
            saved.unwrap_or_else(|| "Start again".into())
        )
    }

    /// Whether the last steps were not finite. A checkpoint of this state would replace the last
    /// good checkpoint as the latest.
    pub(super) fn is_amid_nonfinite_steps(&self) -> bool {
        self.progress.nonfinite_in_a_row > 0
    }

    /// The message that no checkpoint is saved in `dir` for this reason.
    pub(super) fn not_saved(&self, dir: &Path) -> String {
        let latest = match checkpoint::latest(dir) {
            Ok(Some(latest)) => format!("the latest is still that of step {}", latest.iteration),
            _ => "there is none yet".into(),
        };
        format!(
            "step {}: no checkpoint is saved while steps are not finite; {latest}",
            self.progress.iteration
        )
    }

    /// Checks that a checkpoint of `shards`, to be written to `dir`, holds only finite parameters.
    /// Collective over the world.
    ///
    /// # Errors
    /// [`Error::Diverged`] on every rank, naming the first non-finite parameter.
    pub(super) fn require_finite(&self, shards: &[ShardRef], dir: &Path) -> Result<()> {
        let mine = nonfinite(shards)?.unwrap_or_default();
        let found = self.groups.world.all_gather_bytes(mine.as_bytes())?;
        let Some(name) = found.iter().find(|name| !name.is_empty()) else { return Ok(()) };
        let iteration = self.progress.iteration;
        let earlier = match checkpoint::latest(dir) {
            Ok(Some(latest)) => format!("the latest is still that of step {}", latest.iteration),
            _ => "there is no earlier one".into(),
        };
        Err(Error::Diverged(format!(
            "training diverged: after step {iteration} the parameter {} holds NaN or infinity. {} is not written, {earlier}. {}",
            String::from_utf8_lossy(name),
            checkpoint::iteration_dir(dir, iteration).display(),
            self.what_to_try(iteration + 1 - self.progress.nonfinite_in_a_row.min(iteration))
        )))
    }
}

/// The name of the first non-finite parameter in `shards`, in fp32 as they are saved. For bf16
/// weights with a low half, checking the high half suffices.
fn nonfinite(shards: &[ShardRef]) -> Result<Option<&str>> {
    let mut alike: BTreeMap<&str, (Vec<usize>, Vec<Tensor>)> = BTreeMap::new();
    let mut first: Option<usize> = None;
    for (at, shard) in shards.iter().enumerate().filter(|(_, shard)| shard.kind == StateKind::Param)
    {
        let in_files = |part: LocalPart| -> Result<bool> {
            let values = part.all_on_host()?;
            Ok(sums_of_squares(&[&values])?.iter().all(|sum| sum.is_finite()))
        };
        let values = match &shard.data {
            Elements::Tensor(values) => values.clone(),
            Elements::Halves { high, .. } => match high.in_memory() {
                Some(values) => values.clone(),
                None if in_files(high.clone())? => continue,
                None => {
                    first = first.or(Some(at));
                    continue;
                }
            },
            // One at a time, since each is a copy.
            Elements::FileBacked(files) => {
                if !in_files(LocalPart::Files(files.clone()))? {
                    first = first.or(Some(at));
                }
                continue;
            }
        };
        let (places, tensors) = alike.entry(values.dtype().as_str()).or_default();
        places.push(at);
        tensors.push(values);
    }
    // One pass over the values of each dtype. f64 holds the square of any fp32 value.
    for (places, tensors) in alike.values() {
        let sums = sums_of_squares(&tensors.iter().collect::<Vec<_>>())?;
        let found = places.iter().zip(&sums).find(|(_, sum)| !sum.is_finite()).map(|(at, _)| *at);
        first = first.into_iter().chain(found).min();
    }
    Ok(first.map(|at| shards[at].name.as_str()))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use half::{bf16, f16};

    use super::*;

    fn shard(name: &str, kind: StateKind, data: Elements) -> ShardRef {
        ShardRef {
            name: name.into(),
            kind,
            global_shape: vec![2],
            partition: None,
            pieces: vec![],
            data,
        }
    }

    fn of<T: candle_core::WithDType>(values: [T; 2]) -> Elements {
        Tensor::new(&values, &Device::Cpu).unwrap().into()
    }

    #[test]
    fn the_first_parameter_that_is_not_finite_is_found_whatever_it_is_kept_in() {
        let halves = |high: bf16| Elements::Halves {
            high: Tensor::new(&[bf16::ONE, high], &Device::Cpu).unwrap().into(),
            low: None,
        };
        let fine = || {
            vec![
                shard("largest", StateKind::Param, of([f32::MAX, f32::MIN])),
                shard("moment", StateKind::ExpAvg, of([f32::NAN, 0.0])),
                shard("halves", StateKind::Param, halves(bf16::ONE)),
            ]
        };
        assert_eq!(nonfinite(&fine()).unwrap(), None);
        for broken in [
            of([0.0, f32::NAN]),
            of([f32::NEG_INFINITY, 0.0]),
            of([f64::INFINITY, 0.0]),
            of([f16::ONE, f16::NAN]),
            halves(bf16::INFINITY),
        ] {
            let mut shards = fine();
            shards.push(shard("broken", StateKind::Param, broken));
            shards.push(shard("later", StateKind::Param, of([f32::NAN, 0.0])));
            assert_eq!(nonfinite(&shards).unwrap(), Some("broken"));
        }
    }
}
