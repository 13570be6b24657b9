//! Uses a checkpoint in place of a run file: turns its recorded settings into the equivalent run
//! file.

mod text;

use std::path::{Path, PathBuf};

use megatron::checkpoint;
use megatron::config::{CheckpointConfig, ModelConfig, RopeScaling};
use megatron::data::TOKENIZER_FILE;
use megatron::train::RecordedRun;
use models::SavedGpt;

use super::Gathered;
use super::flags::MEGATRON_SCHEDULE;
use super::gather::{is_other_source, ways_to_say};
use super::run_file::{self, Setting};
use crate::error::{Error, Result};
pub use text::quoted;
use text::{Places, text_of};

/// The source of the settings that neither flags nor a run file give.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The checkpoint's folder.
    pub path: PathBuf,
    pub model: ModelConfig,
    /// Sections that the checkpoint does not record.
    pub lacks: Vec<&'static str>,
}

impl Recorded {
    /// The origin that messages cite for its settings.
    pub fn origin(&self) -> String {
        self.path.display().to_string()
    }

    /// Sets the parts of the model that no setting can express.
    pub fn complete(&self, model: &mut ModelConfig, is_given: impl Fn(&str) -> bool) {
        let theirs = &self.model;
        if !is_given("sliding_window") {
            model.sliding_window.clone_from(&theirs.sliding_window);
        }
        let of_scaling =
            ["rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"];
        if matches!(theirs.rope_scaling, RopeScaling::Llama3 { .. })
            && !of_scaling.into_iter().any(is_given)
        {
            model.rope_scaling = theirs.rope_scaling;
        }
    }
}

/// Every run needs at least one setting of each group.
const REQUIRED: [&[&str]; 8] = [
    &["num_layers"],
    &["hidden_size"],
    &["num_attention_heads"],
    &["seq_length"],
    &["data_path", "mock_data"],
    &["micro_batch_size"],
    &["train_iters", "train_samples"],
    // OneCycle and LRRangeTest have rates of their own.
    &["lr", "warmup_max_lr", "cycle_max_lr", "lr_schedule"],
];

/// The layout is taken as a whole: either the run's own or the checkpoint's.
const LAYOUT: [&str; 17] = [
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
    "pipeline_partition",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_extra_warmup",
    "delay_wgrad_compute",
    "sequence_parallel",
    "num_distributed_optimizer_instances",
];

/// The settings of DeepSpeed's schedules.
const DEEPSPEED_SCHEDULE: [&str; 24] = [
    "lr_schedule",
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "warmup_type",
    "total_num_steps",
    "warmup_min_ratio",
    "cos_min_ratio",
    "cycle_min_lr",
    "cycle_max_lr",
    "decay_lr_rate",
    "cycle_first_step_size",
    "cycle_second_step_size",
    "cycle_first_stair_count",
    "cycle_second_stair_count",
    "decay_step_size",
    "cycle_momentum",
    "cycle_min_mom",
    "cycle_max_mom",
    "decay_mom_rate",
    "lr_range_test_min_lr",
    "lr_range_test_step_size",
    "lr_range_test_step_rate",
    "lr_range_test_staircase",
];

/// Settings of a dynamic loss scale.
const DYNAMIC: [&str; 5] = [
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
];

/// If one of the first settings is given, the second ones are not taken from the checkpoint.
const TOGETHER: [(&[&str], &[&str]); 18] = [
    (&LAYOUT, &LAYOUT),
    (&LAYOUT, &["distribute_saved_activations"]),
    (&["gradient_accumulation_steps"], &["global_batch_size"]),
    (&MEGATRON_SCHEDULE, &DEEPSPEED_SCHEDULE),
    (&["lr_schedule"], &MEGATRON_SCHEDULE),
    (&["lr_schedule"], &DEEPSPEED_SCHEDULE),
    (&["warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"], &["lr"]),
    (
        &["bf16", "fp16"],
        &["bf16", "fp16", "loss_scale", "grad_reduce_in_bf16", "grad_reduce_in_fp16"],
    ),
    (&["bf16", "fp16", "loss_scale"], &DYNAMIC),
    (&DYNAMIC, &["loss_scale"]),
    (
        &["recompute_granularity"],
        &[
            "recompute_method",
            "recompute_num_layers",
            "distribute_saved_activations",
            "offload_activations",
        ],
    ),
    (&["weight_decay_incr_style"], &["start_weight_decay", "end_weight_decay"]),
    (
        &["rotary_seq_len_interpolation_factor", "use_rope_scaling"],
        &["rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"],
    ),
    (
        &["check_for_nan_in_loss_and_grad", "no_check_for_nan_in_loss_and_grad"],
        &["max_nonfinite_steps"],
    ),
    (
        &["tokenizer", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"],
        &["tokenizer", "vocab_file", "merge_file"],
    ),
    (&["use_distributed_optimizer", "data_parallel_sharding_strategy"], &["zero_stage"]),
    (&["optimizer_cpu_offload"], &["offload_optimizer"]),
    (&["offload_optimizer_nvme_path"], &["offload_optimizer", "nvme_path"]),
];

/// The checkpoint's settings for what `gathered` leaves open. The checkpoint is read only with
/// --use-checkpoint-args, or without a run file if a required setting is missing. `has_world`: a
/// launcher created the world, which determines the number of replicas.
///
/// # Errors
/// If a checkpoint exists but cannot be read.
pub fn beneath(
    gathered: &Gathered,
    has_run_file: bool,
    has_world: bool,
) -> Result<Option<(Recorded, Vec<Setting>)>> {
    let flags = &gathered.flags.checkpoint;
    let given = |key: &str| gathered.origins.contains_key(key);
    let is_missing = REQUIRED.iter().any(|keys| !keys.iter().any(|key| given(key)));
    let restarts = !has_run_file && is_missing && flags.init_from_hf.is_none();
    if flags.use_checkpoint_args && flags.load.is_none() {
        return Err(Error::usage(format!(
            "use_checkpoint_args ({}) has no effect without load; name a checkpoint's folder with --load",
            gathered.origins.get("use_checkpoint_args").map_or("default", String::as_str)
        )));
    }
    let Some(load) = flags.load.as_deref().filter(|_| flags.use_checkpoint_args || restarts) else {
        return Ok(None);
    };
    let source = CheckpointConfig {
        load: flags.load.clone(),
        ckpt_step: flags.ckpt_step,
        ..Default::default()
    };
    let Some(path) = checkpoint::to_load(&source)? else { return Ok(None) };
    let run = RecordedRun::read(&path, &SavedGpt::open(&path)?.manifest.state)?;
    let save = save_folder(gathered, load, &path);
    let saves = save.is_some() || flags.save.is_some();
    let tokenizer = checkpoint::checkpoints_folder(&path)?.join(TOKENIZER_FILE);
    let tokenizer = Some(tokenizer.as_path()).filter(|file| file.exists());
    let places = Places { save, saves, continues: !flags.finetune, tokenizer };
    let unusable = |(_, message): run_file::Problem| {
        megatron::Error::checkpoint(
            &path,
            format!("its recorded settings cannot be used: {message}"),
        )
    };
    let file = run_file::parse(&text_of(&run, &places)?).map_err(unusable)?;
    if let Some(problem) = file.problems.into_iter().next() {
        return Err(unusable(problem).into());
    }
    let mut settings = file.settings;
    settings.retain(|setting| {
        let key = setting.key.as_str();
        let is_said = ways_to_say(key).iter().any(|other| given(other)) || given(key);
        let goes_with = TOGETHER
            .iter()
            .any(|(those, these)| these.contains(&key) && those.iter().any(|key| given(key)));
        let of_hf =
            flags.init_from_hf.is_some() && setting.section == "model" && key != "seq_length";
        let is_of_world = has_world && key == "data_parallel_size";
        !(is_said || goes_with || is_other_source(key, &gathered.flags) || of_hf || is_of_world)
    });
    Ok(Some((Recorded { path, lacks: run.lacks(), model: run.model }, settings)))
}

/// The folder where a run without --save saves: the folder of its checkpoints. A run that takes
/// only weights, or that loads one named checkpoint, must name the folder itself.
fn save_folder<'a>(gathered: &Gathered, load: &'a Path, path: &Path) -> Option<&'a Path> {
    let checkpoint = &gathered.flags.checkpoint;
    (checkpoint.save.is_none() && !checkpoint.finetune && load != path).then_some(load)
}

#[cfg(test)]
mod tests;
