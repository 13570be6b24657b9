//! What a checkpoint's manifest says of the run that wrote it.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::progress::Progress;
use crate::checkpoint::Manifest;
use crate::config::{
    ModelConfig, OptimizerConfig, OptimizerKind, OptimizerOffload, ParallelConfig, Precision,
    RunConfig,
};
use crate::optim::LossScalerState;
use crate::params::StateKind;
use crate::{Error, Result};

/// Whether the checkpoint in `folder` can be read and was not saved amid steps that were not
/// finite.
pub fn is_healthy(folder: &Path) -> bool {
    Manifest::read(folder).is_ok_and(|manifest| {
        manifest.state.pointer("/progress/nonfinite_in_a_row").and_then(Value::as_u64).unwrap_or(0)
            == 0
    })
}

/// The state of a run as stored in a manifest.
///
/// # Errors
/// If the configuration cannot be expressed in JSON.
pub fn to_json(
    progress: &Progress,
    config: &RunConfig,
    loss_scaler: Option<&LossScalerState>,
    data_fingerprint: &str,
    architecture: &str,
) -> Result<Value> {
    let value = |v: serde_json::Result<Value>| {
        v.map_err(|e| Error::config(format!("cannot describe the run: {e}")))
    };
    let mut state = Map::new();
    state.insert("progress".into(), value(serde_json::to_value(progress))?);
    state.insert(ARCHITECTURE.into(), architecture.into());
    state.insert("model".into(), value(serde_json::to_value(&config.model))?);
    state.insert("data_fingerprint".into(), data_fingerprint.into());
    if let Some(scaler) = loss_scaler {
        state.insert(LOSS_SCALER.into(), value(serde_json::to_value(scaler))?);
    }
    state.insert("config".into(), value(serde_json::to_value(config))?);
    Ok(state.into())
}

/// Where a state has what [`ModelBuilder::architecture`](super::ModelBuilder::architecture) says.
const ARCHITECTURE: &str = "architecture";
/// That of checkpoints which do not say it.
pub const GPT: &str = "gpt";

/// Where a state has the loss scale, if it adapts itself.
const LOSS_SCALER: &str = "loss_scaler";

/// The loss scale of the run that wrote the checkpoint at `path`, if it adapted itself.
///
/// # Errors
/// If the state is damaged.
pub fn loss_scaler(path: &Path, state: &Value) -> Result<Option<LossScalerState>> {
    state.get(LOSS_SCALER).map(|_| part(path, state, LOSS_SCALER)).transpose()
}

/// The precision of the run that wrote a checkpoint; none for weights alone.
pub fn precision(state: &Value) -> Option<Precision> {
    let config = state.get("config")?;
    // Checkpoints that do not say it are from before there was another.
    let Some(value) = config.pointer("/training/precision") else { return Some(Precision::Fp32) };
    Precision::deserialize(value).ok()
}

/// The settings of the optimizer of the run that wrote a checkpoint; none for weights alone.
pub fn optimizer_settings(state: &Value) -> Option<&Map<String, Value>> {
    state.pointer("/config/optimizer")?.as_object()
}

/// Settings of the optimizer that are no part of what a learning-rate scheduler says: rate,
/// schedule, weight decay.
const NO_SCHEDULE: [&str; 9] = [
    "kind",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "offload",
    "sgd_momentum",
    "clip_grad",
];

/// Whether a setting of the optimizer is part of the schedule.
pub fn is_of_schedule(key: &str) -> bool {
    !NO_SCHEDULE.contains(&key)
}

/// `ours` with the learning rate, schedule and weight decay of `theirs`, the settings of another
/// run.
///
/// # Errors
/// If they are none.
pub fn with_schedule(
    ours: &OptimizerConfig,
    theirs: &Map<String, Value>,
) -> serde_json::Result<OptimizerConfig> {
    let mut settings = serde_json::to_value(ours)?;
    for (key, setting) in
        settings.as_object_mut().into_iter().flatten().filter(|(key, _)| is_of_schedule(key))
    {
        // Equal values stay as they are, to the bit.
        if let Some(theirs) = theirs.get(key).filter(|theirs| !same(theirs, setting)) {
            *setting = theirs.clone();
        }
    }
    serde_json::from_value(settings)
}

/// The state of a checkpoint that holds weights alone: training starts at its first step.
///
/// # Errors
/// If the configuration cannot be expressed in JSON.
pub fn weights_only_state(model: &ModelConfig) -> Result<Value> {
    let model = serde_json::to_value(model)
        .map_err(|e| Error::config(format!("cannot describe the model: {e}")))?;
    Ok(serde_json::json!({ "progress": Progress::default(), "model": model }))
}

/// What is known of the run that wrote a checkpoint.
#[derive(Clone, Debug)]
pub struct SavedRun {
    /// How far the run was.
    pub progress: Progress,
    /// What its program calls the model: [`GPT`], or another of which tensors alone are known.
    pub architecture: String,
    /// The architecture.
    pub model: ModelConfig,
    /// The layout it was written under, if it was written by a run.
    pub parallel: Option<ParallelConfig>,
}

/// Reads the state of the checkpoint at `path`.
///
/// # Errors
/// If it is not a training run's.
pub fn saved_run(path: &Path, state: &Value) -> Result<SavedRun> {
    let model: ModelConfig = part(path, state, "model")?;
    let progress = progress(path, state, &model)?;
    let parallel =
        state.pointer(PARALLEL).and_then(|value| serde_json::from_value(value.clone()).ok());
    let architecture = architecture(state).unwrap_or(GPT).to_string();
    Ok(SavedRun { progress, architecture, model, parallel })
}

/// What the state calls its model, if it says so.
fn architecture(state: &Value) -> Option<&str> {
    state.get(ARCHITECTURE)?.as_str()
}

/// The same state under another layout.
///
/// # Errors
/// If the layout cannot be expressed in JSON.
pub fn with_parallel(state: &Value, parallel: &ParallelConfig) -> Result<Value> {
    let mut state = state.clone();
    if let Some(there) = state.pointer_mut(PARALLEL) {
        *there = serde_json::to_value(parallel)
            .map_err(|e| Error::config(format!("cannot describe the layout: {e}")))?;
    }
    Ok(state)
}

/// Where a state has the layout.
const PARALLEL: &str = "/config/parallel";

/// One part of a state.
fn part<T: DeserializeOwned>(path: &Path, state: &Value, key: &str) -> Result<T> {
    // Through the type, so that settings that are newer than the checkpoint have their defaults.
    let value = state.get(key).and_then(|value| T::deserialize(value).ok());
    value.ok_or_else(|| Error::checkpoint(path, format!("its manifest's state has no valid {key}")))
}

/// Settings of a model that may change between runs without changing what its parameters mean.
const FREE: [&str; 4] =
    ["attention_dropout", "hidden_dropout", "make_vocab_size_divisible_by", "init_method_std"];

/// Reads the progress of the checkpoint at `path` and checks that its model is this run's.
///
/// # Errors
/// If the state is damaged, or the architecture is another; the message names every setting that
/// differs.
pub fn from_json(
    path: &Path,
    state: &Value,
    config: &RunConfig,
    model: Option<&str>,
) -> Result<Progress> {
    if let Some(theirs) = architecture(state)
        && let Some(ours) = model.filter(|ours| *ours != theirs)
    {
        return Err(Error::checkpoint(
            path,
            format!("it holds a model that its program calls '{theirs}', but this one is '{ours}'"),
        ));
    }
    let damaged =
        |what: &str| Error::checkpoint(path, format!("its manifest's state has no valid {what}"));
    let theirs: ModelConfig = part(path, state, "model")?;
    let progress = progress(path, state, &theirs)?;
    let theirs = serde_json::to_value(&theirs).map_err(|_| damaged("model"))?;
    let theirs = theirs.as_object().ok_or_else(|| damaged("model"))?;
    let ours = serde_json::to_value(&config.model).map_err(|_| damaged("model"))?;
    let mut differences = Vec::new();
    for (key, value) in
        ours.as_object().into_iter().flatten().filter(|(key, _)| !FREE.contains(&key.as_str()))
    {
        let other = theirs.get(key).unwrap_or(&Value::Null);
        // A run may use shorter or longer sequences where positions are not learned.
        let relative =
            key == "seq_length" || (key == "max_position_embeddings" && !learned(theirs));
        if !same(other, value) && !relative {
            differences.push(format!("{key} is {other} there and {value} here"));
        }
    }
    if !differences.is_empty() {
        return Err(Error::checkpoint(
            path,
            format!(
                "it holds another architecture: {}; use its settings or another checkpoint",
                differences.join(", ")
            ),
        ));
    }
    Ok(progress)
}

/// The progress of a state; those that do not count tokens are from before the length of sequences
/// could change.
fn progress(path: &Path, state: &Value, model: &ModelConfig) -> Result<Progress> {
    let mut progress: Progress = part(path, state, "progress")?;
    if state.pointer("/progress/consumed_tokens").is_none() {
        progress.consumed_tokens =
            progress.consumed_samples.saturating_mul(model.seq_length as u64);
    }
    Ok(progress)
}

/// Checks that the checkpoint holds the state of `optimizer`, or weights alone.
///
/// # Errors
/// If it is another optimizer's; the message names both.
pub fn require_optimizer(manifest: &Manifest, optimizer: OptimizerKind) -> Result<()> {
    let theirs = manifest.tensors.iter().find_map(|tensor| match tensor.kind {
        StateKind::Param => None,
        StateKind::ExpAvg | StateKind::ExpAvgSq => Some(OptimizerKind::Adam),
        StateKind::Momentum => Some(OptimizerKind::Sgd),
    });
    let Some(theirs) = theirs.filter(|&theirs| theirs != optimizer) else { return Ok(()) };
    let name = |kind| match kind {
        OptimizerKind::Adam => "adam",
        OptimizerKind::Sgd => "sgd",
    };
    let (theirs, ours) = (name(theirs), name(optimizer));
    Err(Error::checkpoint(
        manifest.folder(),
        format!(
            "it holds the state of the optimizer {theirs}, but this run uses {ours}; resume it \
             with --optimizer {theirs}, or take only its weights with --no-load-optim (continue) \
             or --finetune (start at step 1)"
        ),
    ))
}

/// Checks that the paths of a run that saves can be recorded: manifests are JSON, which is UTF-8.
///
/// # Errors
/// If one is not UTF-8, by its flag.
pub fn require_utf8(config: &RunConfig) -> Result<()> {
    let RunConfig { checkpoint, logging, data, .. } = config;
    let offload = match &config.optimizer.offload {
        OptimizerOffload::Nvme(folder) => Some(folder.as_path()),
        OptimizerOffload::None | OptimizerOffload::Cpu => None,
    };
    let paths = [
        ("--save", checkpoint.save.as_deref()),
        ("--load", checkpoint.load.as_deref()),
        ("--init-from-hf", checkpoint.init_from_hf.as_deref()),
        ("--metrics", logging.metrics.as_deref()),
        (
            "--tensorboard-dir",
            logging.tensorboard.as_ref().map(|tensorboard| tensorboard.dir.as_path()),
        ),
        ("--profile-dir", logging.profile.as_ref().map(|profile| profile.dir.as_path())),
        ("--cache-dir", Some(data.cache_dir.as_path())),
        ("--offload-optimizer-nvme-path", offload),
    ];
    let mut given = paths.into_iter().filter_map(|(flag, path)| Some((flag, path?)));
    match given.find(|(_, path)| path.to_str().is_none()) {
        Some((flag, path)) => Err(Error::config(format!(
            "{flag} {}: the path is not UTF-8, but checkpoints record it; give another path, such as a link to it",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// What identified the data of the run that wrote a manifest.
pub fn data_fingerprint(state: &Value) -> Option<&str> {
    state.get("data_fingerprint").and_then(Value::as_str).filter(|text| !text.is_empty())
}

/// Equality of settings; JSON may move a float by a unit in its last place.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-12 * a.abs().max(b.abs()),
        _ => a == b,
    }
}

fn learned(model: &Map<String, Value>) -> bool {
    model.get("position_embedding").is_some_and(|v| v == "learned_absolute")
}
