//! The settings of the run that wrote a checkpoint, as the checkpoint records them.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::state::saved_run;
use crate::Result;
use crate::config::{
    CheckpointConfig, DataConfig, LoggingConfig, ModelConfig, OptimizerConfig, ParallelConfig,
    TrainingConfig,
};

/// The recorded settings by section. An imported checkpoint has only its model, and a checkpoint of
/// an earlier version may lack a section.
#[derive(Clone, Debug)]
pub struct RecordedRun {
    /// The architecture.
    pub model: ModelConfig,
    /// The layout of the run; a resumed run may use another one.
    pub parallel: Option<ParallelConfig>,
    /// The data that the run read.
    pub data: Option<DataConfig>,
    /// Batch, length, seed, precision.
    pub training: Option<TrainingConfig>,
    /// The optimizer and its schedules.
    pub optimizer: Option<OptimizerConfig>,
    /// Where and when the run saved checkpoints.
    pub checkpoint: Option<CheckpointConfig>,
    /// The reports of the run.
    pub logging: Option<LoggingConfig>,
}

impl RecordedRun {
    /// Reads the settings from the state in the manifest of the checkpoint at `path`.
    ///
    /// # Errors
    /// If the state has no model.
    pub fn read(path: &Path, state: &Value) -> Result<Self> {
        let model = saved_run(path, state)?.model;
        Ok(Self {
            model,
            parallel: section(state, "parallel"),
            data: section(state, "data"),
            training: section(state, "training"),
            optimizer: section(state, "optimizer"),
            checkpoint: section(state, "checkpoint"),
            logging: section(state, "logging"),
        })
    }

    /// The sections that the checkpoint lacks.
    pub fn lacks(&self) -> Vec<&'static str> {
        let sections = [
            ("[parallel]", self.parallel.is_none()),
            ("[data]", self.data.is_none()),
            ("[training]", self.training.is_none()),
            ("[optimizer]", self.optimizer.is_none()),
            ("[checkpoint]", self.checkpoint.is_none()),
            ("[logging]", self.logging.is_none()),
        ];
        sections.into_iter().filter_map(|(name, is_missing)| is_missing.then_some(name)).collect()
    }
}

/// Deserializes to the type, so that settings that are newer than the checkpoint get their
/// defaults.
fn section<T: DeserializeOwned>(state: &Value, name: &str) -> Option<T> {
    state.pointer(&format!("/config/{name}")).and_then(|value| T::deserialize(value).ok())
}
