//! The description of a run in its checkpoint's manifest.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::progress::Progress;
use crate::checkpoint::Manifest;
use crate::config::{
    ModelConfig, Offload, OptimizerConfig, OptimizerKind, ParallelConfig, Precision, RunConfig,
};
use crate::optim::LossScalerState;
use crate::params::StateKind;
use crate::{Error, Result};

/// Whether the checkpoint in `folder` can be read and was not saved during non-finite steps.
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

/// Key of [`ModelBuilder::architecture`](super::ModelBuilder::architecture) in a state.
const ARCHITECTURE: &str = "architecture";
/// The architecture of checkpoints that do not name one.
pub const GPT: &str = "gpt";

/// Key of a dynamic loss scale in a state.
const LOSS_SCALER: &str = "loss_scaler";

/// The loss scale of the run that wrote the checkpoint at `path`, if it was dynamic.
///
/// # Errors
/// If the state is damaged.
pub fn loss_scaler(path: &Path, state: &Value) -> Result<Option<LossScalerState>> {
    state.get(LOSS_SCALER).map(|_| part(path, state, LOSS_SCALER)).transpose()
}

/// The precision of the run that wrote a checkpoint; `None` for a checkpoint of weights alone.
pub fn precision(state: &Value) -> Option<Precision> {
    let config = state.get("config")?;
    // Checkpoints without this setting predate the other precisions.
    let Some(value) = config.pointer("/training/precision") else { return Some(Precision::Fp32) };
    Precision::deserialize(value).ok()
}

/// The optimizer settings of the run that wrote a checkpoint; `None` for a checkpoint of weights
/// alone.
pub fn optimizer_settings(state: &Value) -> Option<&Map<String, Value>> {
    state.pointer("/config/optimizer")?.as_object()
}

/// Optimizer settings that are not part of the learning-rate scheduler (rate, schedule, weight
/// decay).
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

/// A setting of a checkpoint's optimizer. A checkpoint without `lr_schedule` is older than
/// DeepSpeed's schedules, so its run had none.
pub fn setting_of<'a>(optimizer: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    optimizer.get(key).or((key == "lr_schedule").then_some(&Value::Null))
}

/// `ours` with the learning rate, schedule and weight decay of `theirs`, the optimizer settings of
/// another run.
///
/// # Errors
/// If `theirs` are not valid settings.
pub fn with_schedule(
    ours: &OptimizerConfig,
    theirs: &Map<String, Value>,
) -> serde_json::Result<OptimizerConfig> {
    let mut settings = serde_json::to_value(ours)?;
    for (key, setting) in
        settings.as_object_mut().into_iter().flatten().filter(|(key, _)| is_of_schedule(key))
    {
        // Values that are equal stay bitwise unchanged.
        if let Some(theirs) = setting_of(theirs, key).filter(|theirs| !same(theirs, setting)) {
            *setting = theirs.clone();
        }
    }
    serde_json::from_value(settings)
}

/// The state of a checkpoint with weights alone. Training from it starts at the first step.
///
/// # Errors
/// If the configuration cannot be expressed in JSON.
pub fn weights_only_state(model: &ModelConfig) -> Result<Value> {
    let model = serde_json::to_value(model)
        .map_err(|e| Error::config(format!("cannot describe the model: {e}")))?;
    Ok(serde_json::json!({ "progress": Progress::default(), "model": model }))
}

/// The recorded facts about the run that wrote a checkpoint.
#[derive(Clone, Debug)]
pub struct SavedRun {
    /// Progress of the run.
    pub progress: Progress,
    /// Name of the architecture: [`GPT`], or another name, for which only the tensors are known.
    pub architecture: String,
    /// Settings of the model.
    pub model: ModelConfig,
    /// Layout of the run; `None` if no run wrote the checkpoint.
    pub parallel: Option<ParallelConfig>,
}

/// Reads the state of the checkpoint at `path`.
///
/// # Errors
/// If it is not the state of a training run.
pub fn saved_run(path: &Path, state: &Value) -> Result<SavedRun> {
    let model: ModelConfig = part(path, state, "model")?;
    let progress = progress(path, state, &model)?;
    let parallel =
        state.pointer(PARALLEL).and_then(|value| serde_json::from_value(value.clone()).ok());
    let architecture = architecture(state).unwrap_or(GPT).to_string();
    Ok(SavedRun { progress, architecture, model, parallel })
}

/// The architecture that the state names, if any.
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

/// Pointer to the layout in a state.
const PARALLEL: &str = "/config/parallel";

/// One part of a state.
fn part<T: DeserializeOwned>(path: &Path, state: &Value, key: &str) -> Result<T> {
    // Deserializes to the type, so that settings that are newer than the checkpoint get their
    // defaults.
    let value = state.get(key).and_then(|value| T::deserialize(value).ok());
    value.ok_or_else(|| Error::checkpoint(path, format!("its manifest's state has no valid {key}")))
}

/// Model settings that may change between runs, because they do not change the meaning of
/// parameters.
const FREE: [&str; 4] =
    ["attention_dropout", "hidden_dropout", "make_vocab_size_divisible_by", "init_method_std"];

/// Reads the progress of the checkpoint at `path` and checks that its model matches this run's.
///
/// # Errors
/// If the state is damaged or the architecture differs; the message names every setting that
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
        // A run may change the sequence length unless positions are learned.
        let relative =
            key == "seq_length" || (key == "max_position_embeddings" && !learned(theirs));
        if !same(other, value) && !relative {
            differences.push(format!("{key} is {other} there and {value} here"));
        }
    }
    if !differences.is_empty() {
        let mut advice = "use its settings or another checkpoint".to_string();
        if let Some(positions) = theirs.get("max_position_embeddings").and_then(Value::as_u64)
            && matches!(&differences[..], [only] if only.starts_with("max_position_embeddings"))
        {
            advice = match config.model.seq_length as u64 <= positions {
                true => format!("for shorter samples add --max-position-embeddings {positions}"),
                false => format!("it has learned {positions} positions, the longest --seq-length"),
            };
        }
        return Err(Error::checkpoint(
            path,
            format!("it holds another architecture: {}; {advice}", differences.join(", ")),
        ));
    }
    Ok(progress)
}

/// The progress of a state. A state without a token count predates changes of the sequence length.
fn progress(path: &Path, state: &Value, model: &ModelConfig) -> Result<Progress> {
    let mut progress: Progress = part(path, state, "progress")?;
    if state.pointer("/progress/consumed_tokens").is_none() {
        progress.consumed_tokens =
            progress.consumed_samples.saturating_mul(model.seq_length as u64);
    }
    Ok(progress)
}

/// Checks that the checkpoint holds the state of `optimizer`, or only weights.
///
/// # Errors
/// If it holds the state of another optimizer; the message names both.
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

/// Checks that the paths of a run that saves can be recorded in manifests, which are JSON and thus
/// UTF-8.
///
/// # Errors
/// If a path is not UTF-8; the message names its flag.
pub fn require_utf8(config: &RunConfig) -> Result<()> {
    let RunConfig { checkpoint, logging, data, .. } = config;
    let offload = [
        &config.optimizer.offload,
        &config.parallel.param_offload,
        &config.training.activation_offload,
    ];
    let offload = offload.into_iter().find_map(|offload| match offload {
        Offload::Nvme(folder) => Some(folder.as_path()),
        Offload::None | Offload::Cpu => None,
    });
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
        ("--nvme-path", offload),
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

/// The fingerprint of the data that the run read.
pub fn data_fingerprint(state: &Value) -> Option<&str> {
    state.get("data_fingerprint").and_then(Value::as_str).filter(|text| !text.is_empty())
}

/// Equality of settings. JSON may change the last digit of a float.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-12 * a.abs().max(b.abs()),
        _ => match (a, b) {
            (Value::Object(a), Value::Object(b)) => {
                a.len() == b.len()
                    && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
            }
            _ => a == b,
        },
    }
}

fn learned(model: &Map<String, Value>) -> bool {
    model.get("position_embedding").is_some_and(|v| v == "learned_absolute")
}
