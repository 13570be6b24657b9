//! Checks of weight decay, constant or growing.

use super::{Check, OptimizerConfig};

impl Check<'_> {
    pub(super) fn weight_decay(&mut self, o: &OptimizerConfig) {
        self.non_negative("weight_decay", o.weight_decay);
        let Some(increase) = &o.weight_decay_increase else { return };
        self.non_negative("start_weight_decay", increase.start);
        self.non_negative("end_weight_decay", increase.end);
        // As in Megatron-LM, weight decay can only increase.
        self.require(
            increase.start <= increase.end || increase.start.is_nan() || increase.end.is_nan(),
            |c| {
                format!(
                    "{} exceeds {}, but weight decay can only grow",
                    c.cite("start_weight_decay", increase.start),
                    c.cite("end_weight_decay", increase.end)
                )
            },
        );
    }
}
