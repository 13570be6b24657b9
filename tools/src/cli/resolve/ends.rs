//! How a run ends, which checkpoints it leaves, and how its weight decay grows until then.

use megatron::config::{IncreaseStyle, Retention, WeightDecayIncrease};

use super::Resolver;
use crate::cli::flags;
use crate::error::{Error, Result};

impl Resolver<'_> {
    /// Runs always save and stop on signals; turning this off is an error.
    pub(super) fn exit_signal(&self) -> Result<()> {
        if self.flags.training.ends.exit_signal_handler {
            return Ok(());
        }
        Err(Error::usage(format!(
            "{} is not possible: a run always saves before it stops on a signal; leave it out (SIGKILL ends a run at once)",
            self.origins.cite("exit_signal_handler", false)
        )))
    }

    pub(super) fn retention(&self) -> Result<Retention> {
        let c = &self.flags.checkpoint;
        // Megatron-LM's -1 keeps all.
        let most_recent = match c.most_recent_k {
            -1 => None,
            number => Some(u64::try_from(number).map_err(|_| {
                let cited = self.origins.cite("most_recent_k", number);
                Error::usage(format!(
                    "{cited} must be the number of checkpoints to keep, or -1 for all"
                ))
            })?),
        };
        Ok(Retention { interval: c.save_retain_interval, most_recent })
    }

    /// The increase of the weight decay over `samples` samples, if it grows.
    pub(super) fn weight_decay_increase(
        &self,
        samples: u64,
    ) -> Result<Option<WeightDecayIncrease>> {
        let o = &self.flags.optimizer;
        let (start, end) = (o.start_weight_decay, o.end_weight_decay);
        let style = match o.weight_decay_incr_style {
            flags::IncreaseStyle::Constant => {
                let given = [("start_weight_decay", start), ("end_weight_decay", end)];
                return match given.into_iter().find_map(|(key, value)| Some((key, value?))) {
                    Some((key, value)) => Err(Error::usage(format!(
                        "{} is for a weight decay that grows, but weight_decay_incr_style is \
                         constant; set that to linear or cosine, or set weight_decay",
                        self.origins.cite(key, value)
                    ))),
                    None => Ok(None),
                };
            }
            flags::IncreaseStyle::Linear => IncreaseStyle::Linear,
            flags::IncreaseStyle::Cosine => IncreaseStyle::Cosine,
        };
        match (start, end) {
            (Some(start), Some(end)) => {
                Ok(Some(WeightDecayIncrease { start, end, style, samples }))
            }
            _ => Err(Error::usage(format!(
                "{} needs a start and an end; set start_weight_decay and end_weight_decay",
                self.origins.cite(
                    "weight_decay_incr_style",
                    if style == IncreaseStyle::Linear { "linear" } else { "cosine" }
                )
            ))),
        }
    }
}
