//! `[parallel]`: how the model and the batch are split over ranks.

use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use serde::{Deserialize, Deserializer, Serialize};

use super::Offload;

/// The order of forward and backward passes on a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019).
    Gpipe,
    /// One forward, one backward (PipeDream-flush, Narayanan et al. 2021).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B over several chunks per stage (Narayanan et al. 2021, §2.2).
    Interleaved,
}

/// How layers are distributed over (virtual) stages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartitionMethod {
    /// Equally many layers; the first stages take one more if the number does not divide evenly.
    Uniform,
    /// Balanced by parameter count, embedding and output matrix included.
    Parameters,
    /// Balanced by the operations of a step: layers and the output matrix; embedding lookups do not
    /// count.
    Flops,
    /// Equally many layers of types whose name matches this regular expression, as DeepSpeed's
    /// `type:REGEX`. Upper and lower case are the same.
    Type(String),
    /// Layers of each virtual stage, in order.
    Explicit(Vec<usize>),
}

/// The layout of a run over ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParallelConfig {
    /// tp: ranks that share each layer.
    pub tensor_model_parallel_size: usize,
    /// pp: stages of the pipeline.
    pub pipeline_model_parallel_size: usize,
    /// cp: ranks that share each sequence.
    pub context_parallel_size: usize,
    /// dp: replicas.
    pub data_parallel_size: usize,
    /// v: virtual stages (chunks) per stage; 1 unless interleaved.
    pub virtual_pipeline_size: usize,
    /// The order of passes of a pipeline stage.
    pub schedule: ScheduleKind,
    /// Stages compute weight gradients while they would otherwise wait (Qi et al. 2023).
    pub delay_wgrad_compute: bool,
    /// Extra forward passes that the first stage runs before its first backward, beyond 1F1B's;
    /// later stages run fewer, the last none.
    #[serde(default)]
    pub extra_warmup: usize,
    /// Which layers a pipeline stage holds.
    pub partition: PartitionMethod,
    /// Activations between tensor-parallel regions are split along the sequence (Korthikanti et al.
    /// 2022).
    pub sequence_parallel: bool,
    /// Stage of ZeRO, 0 to 3: what replicas shard among them. 1: optimizer state; 2: gradients,
    /// too; 3: weights, too.
    #[serde(alias = "use_distributed_optimizer", deserialize_with = "stage_or_bool")]
    pub zero_stage: u8,
    /// Hybrid sharding: copies of all shards, each over as many of the replicas.
    #[serde(default = "one")]
    pub num_distributed_optimizer_instances: usize,
    /// ZeRO-3: weights are freed behind every pass and gathered again, rather than kept from their
    /// first use in a step to its end.
    #[serde(default = "yes")]
    pub zero_reshard_after_forward: bool,
    /// ZeRO-3: where weights are kept between their uses.
    #[serde(default)]
    pub param_offload: Offload,
    /// Gradient buckets are reduced while backward is still running.
    pub overlap_grad_reduce: bool,
    /// Minimum elements per gradient bucket.
    pub bucket_size: usize,
}

/// One rank.
impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            tensor_model_parallel_size: 1,
            pipeline_model_parallel_size: 1,
            context_parallel_size: 1,
            data_parallel_size: 1,
            virtual_pipeline_size: 1,
            schedule: ScheduleKind::OneFOneB,
            delay_wgrad_compute: false,
            extra_warmup: 0,
            partition: PartitionMethod::Uniform,
            sequence_parallel: false,
            zero_stage: 0,
            num_distributed_optimizer_instances: 1,
            zero_reshard_after_forward: true,
            param_offload: Offload::None,
            overlap_grad_reduce: false,
            bucket_size: 40_000_000,
        }
    }
}

fn one() -> usize {
    1
}

fn yes() -> bool {
    true
}

/// Reads a stage, or what checkpoints said before there were stages 2 and 3: whether it is 1.
fn stage_or_bool<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Is(bool),
        Stage(u8),
    }
    Ok(match Either::deserialize(deserializer)? {
        Either::Is(is) => is.into(),
        Either::Stage(stage) => stage,
    })
}

impl ParallelConfig {
    /// Ranks that hold the same parameters: dp · cp.
    pub fn num_replicas(&self) -> usize {
        self.data_parallel_size.saturating_mul(self.context_parallel_size)
    }

    /// Ranks that shard a buffer among them: the replicas of one copy.
    pub fn num_shards(&self) -> usize {
        self.num_replicas() / self.num_distributed_optimizer_instances.max(1)
    }

    /// Ranks in the run.
    pub fn world_size(&self) -> usize {
        self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
            * self.pipeline_model_parallel_size
    }
}

/// The expression of [`PartitionMethod::Type`]; like Python's `re.compile(…, re.IGNORECASE)`.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn type_regex(pattern: &str) -> std::result::Result<Regex, String> {
    let ignoring_case = syntax::Config::new().case_insensitive(true);
    Regex::builder().syntax(ignoring_case).build(pattern).map_err(|error| {
        let text = error.syntax_error().map_or_else(|| error.to_string(), ToString::to_string);
        // The lines before it show the expression.
        let last = text.lines().last().unwrap_or_default();
        last.trim_start_matches("error: ").to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::validate::tests::valid;

    #[test]
    fn a_layout_written_before_extra_warm_up_existed_is_read_as_without_it() {
        let parallel = valid().parallel;
        let mut written = serde_json::to_value(&parallel).unwrap();
        written.as_object_mut().unwrap().remove("extra_warmup").unwrap();
        assert_eq!(serde_json::from_value::<ParallelConfig>(written).unwrap(), parallel);
    }

    #[test]
    fn a_layout_written_before_zero_had_stages_is_stage_1_or_0() {
        for is in [true, false] {
            let parallel = ParallelConfig { zero_stage: is.into(), ..ParallelConfig::default() };
            let mut written = serde_json::to_value(&parallel).unwrap();
            let keys = written.as_object_mut().unwrap();
            keys.remove("zero_stage").unwrap();
            keys.remove("num_distributed_optimizer_instances").unwrap();
            keys.remove("zero_reshard_after_forward").unwrap();
            keys.remove("param_offload").unwrap();
            keys.insert("use_distributed_optimizer".into(), is.into());
            assert_eq!(serde_json::from_value::<ParallelConfig>(written).unwrap(), parallel);
        }
    }
}
