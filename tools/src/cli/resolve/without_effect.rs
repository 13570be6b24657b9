//! Given settings without effect because of other settings.

use megatron::config::{DecayStyle, Offload, OptimizerKind, PositionEmbedding, RunConfig};

use super::Resolver;
use crate::cli::Gathered;
use crate::cli::from_checkpoint::Recorded;

impl Resolver<'_> {
    /// One line that lists all of them, if there are any. Settings that are certainly a mistake are
    /// refused elsewhere.
    pub(super) fn without_effect(&self, run: &RunConfig, gathered: &Gathered) -> Option<String> {
        // A checkpoint records all settings, so these do not count as given.
        let recorded = gathered.recorded.as_ref().map(Recorded::origin);
        let RunConfig { model, parallel: p, optimizer: o, logging, .. } = run;
        let replicas = p.data_parallel_size * p.context_parallel_size;
        let (sgd, wsd) = (o.kind == OptimizerKind::Sgd, o.decay_style == DecayStyle::Wsd);
        let in_files = [&o.offload, &p.param_offload, &run.training.activation_offload]
            .iter()
            .any(|to| matches!(to, Offload::Nvme(_)));
        let cases: [(bool, &str, &[&str]); 13] = [
            (
                p.tensor_model_parallel_size == 1,
                "tensor_model_parallel_size is 1",
                &["sequence_parallel"],
            ),
            (
                replicas == 1,
                "there is one replica",
                &[
                    "use_distributed_optimizer",
                    "zero_stage",
                    "data_parallel_sharding_strategy",
                    "overlap_grad_reduce",
                ],
            ),
            (p.zero_stage == 0, "nothing is sharded", &["num_distributed_optimizer_instances"]),
            (!in_files, "nothing is kept in files", &["nvme_path"]),
            (p.zero_stage < 3, "weights are not sharded", &["zero_reshard_after_forward"]),
            (
                model.position_embedding != PositionEmbedding::Rope,
                "positions are not rotary",
                &["rotary_base"],
            ),
            (sgd, "the optimizer is SGD", &["adam_beta1", "adam_beta2", "adam_eps"]),
            (!sgd, "the optimizer is Adam", &["sgd_momentum"]),
            (o.decay_style == DecayStyle::Constant, "lr_decay_style is constant", &["min_lr"]),
            (
                !wsd,
                "lr_decay_style is not WSD",
                &["lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"],
            ),
            (logging.prompt.is_none(), "there is no prompt", &["prompt_tokens"]),
            (logging.profile.is_none(), "profile is off", &["profile_dir"]),
            (logging.timing_log_level == 0, "there are no timers", &["timing_log_option"]),
        ];
        let is_given = |key: &str| {
            gathered.origins.get(key).is_some_and(|origin| recorded.as_ref() != Some(origin))
        };
        let given = |key: &&&str| is_given(key);
        let mut idle: Vec<String> = cases
            .iter()
            .filter(|(is_so, ..)| *is_so)
            .filter_map(|(_, why, keys)| {
                let keys: Vec<&str> = keys.iter().filter(given).copied().collect();
                (!keys.is_empty()).then(|| format!("{} ({why})", keys.join(", ")))
            })
            .collect();
        let end = run.training.train_iters;
        let beyond = run.training.iterations_to_skip.iter().filter(|step| **step > end);
        let beyond: Vec<String> = beyond.map(u64::to_string).collect();
        if is_given("iterations_to_skip") && !beyond.is_empty() {
            idle.push(format!(
                "iterations_to_skip {} (the run ends after step {end})",
                beyond.join(" ")
            ));
        }
        (!idle.is_empty())
            .then(|| format!("note: these settings have no effect here: {}", idle.join("; ")))
    }
}
