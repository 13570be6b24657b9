//! A trainer's checkpoints: saved synchronously or while training continues, and loaded.

use std::path::{Path, PathBuf};

use kernels::tensor::trace::{Kind, span};

use super::progress::Progress;
use super::state;
use super::trainer::Trainer;
use crate::checkpoint::FolderLock;
use crate::config::{SchedulerOf, Takes};
use crate::optim::LrSchedule;
use crate::params::{ShardRef, StateKind};
use crate::{Error, Result, checkpoint};

impl Trainer {
    /// This rank's share of weights and optimizer state. Over all ranks every logical element
    /// occurs exactly once.
    ///
    /// # Errors
    /// If a view cannot be created.
    pub fn owned_shards(&self) -> Result<Vec<ShardRef>> {
        self.optimizer.shards(&self.stage.params, true)
    }

    /// Writes a checkpoint of the current state. Collective over the world.
    ///
    /// # Errors
    /// If any rank cannot write, a parameter is not finite, the results of the last step were not
    /// read, or another checkpoint is still being written. In these cases nothing is overwritten.
    pub fn save(&self, dir: &Path) -> Result<PathBuf> {
        self.require_folder(dir)?;
        let (shards, state) = self.to_save(dir)?;
        checkpoint::save(dir, self.progress.iteration, &shards, &state, &self.groups.world)?;
        Ok(checkpoint::iteration_dir(dir, self.progress.iteration))
    }

    /// Begins to write a checkpoint of the current state while training continues.
    /// [`Trainer::finish_save`] completes it. Collective over the world.
    ///
    /// # Errors
    /// As [`Trainer::save`].
    pub fn begin_save(&mut self, dir: &Path) -> Result<()> {
        self.require_folder(dir)?;
        let (shards, state) = self.to_save(dir)?;
        let _span = span("copy the state", Kind::Phase);
        let saving =
            checkpoint::begin(dir, self.progress.iteration, &shards, state, &self.groups.world)?;
        self.saving = Some(saving);
        Ok(())
    }

    /// Whether this rank still writes the checkpoint of [`Trainer::begin_save`], so that
    /// [`Trainer::finish_save`] would wait.
    pub fn is_saving(&self) -> bool {
        self.saving.as_ref().is_some_and(|saving| !saving.is_written())
    }

    /// Waits for the checkpoint that is being written, if any, and publishes it. Returns its
    /// iteration. Collective over the world.
    ///
    /// # Errors
    /// If any rank cannot write. Earlier checkpoints then stay unchanged.
    pub fn finish_save(&mut self) -> Result<Option<u64>> {
        let Some(saving) = self.saving.take() else { return Ok(None) };
        let iteration = saving.iteration();
        saving.finish(&self.groups.world)?;
        Ok(Some(iteration))
    }

    /// From now on, saves only to the folder of `folder_lock`. The trainer holds the lock until it
    /// is dropped.
    pub fn hold(&mut self, folder_lock: FolderLock) {
        self.folder_lock = Some(folder_lock);
    }

    /// Fails if the locked folder was replaced. Collective over the world.
    fn require_folder(&self, dir: &Path) -> Result<()> {
        match self.folder_lock.as_ref().filter(|folder_lock| folder_lock.is_of(dir)) {
            Some(folder_lock) => folder_lock.require_in_place(&self.groups.world),
            None => Ok(()),
        }
    }

    /// The content of a checkpoint of the current state in `dir`. Collective over the world.
    fn to_save(&self, dir: &Path) -> Result<(Vec<ShardRef>, serde_json::Value)> {
        if self.in_flight.is_some() {
            return Err(Error::config(
                "internal error: a checkpoint of a step whose results were not read",
            ));
        }
        if self.saving.is_some() {
            return Err(Error::config(
                "internal error: a checkpoint while another one is being written",
            ));
        }
        let scaler = self.loss_scaler.state();
        let state = state::to_json(
            &self.progress,
            &self.config,
            scaler.as_ref(),
            &self.fingerprint,
            &self.architecture,
        )?;
        let shards = self.owned_shards()?;
        self.require_finite(&shards, dir)?;
        Ok((shards, state))
    }

    /// Continues from the checkpoint in folder `path` (one `iter_…`), whatever layout and precision
    /// wrote it. The configuration selects what is taken from it.
    ///
    /// # Errors
    /// If the checkpoint is damaged or of another architecture or, if optimizer state is taken, of
    /// another optimizer.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let manifest = checkpoint::Manifest::read(path)?;
        let theirs =
            state::from_json(path, &manifest.state, &self.config, Some(&self.architecture))?;
        let progress = match self.config.checkpoint.takes {
            Takes::All => theirs,
            Takes::WithoutOptimizer => Progress { updates: 0, ..theirs },
            Takes::Weights => Progress::default(),
        };
        if self.config.checkpoint.scheduler == SchedulerOf::Checkpoint
            && self.config.checkpoint.takes != Takes::Weights
            && let Some(theirs) = state::optimizer_settings(&manifest.state)
        {
            let damaged = |e: serde_json::Error| {
                Error::checkpoint(path, format!("its learning-rate schedule is unusable: {e}"))
            };
            self.config.optimizer =
                state::with_schedule(&self.config.optimizer, theirs).map_err(damaged)?;
            self.config.validate_lr_schedule()?;
            self.lr = LrSchedule::new(&self.config.optimizer)?;
            self.optimizer.set_weight_decay(self.config.optimizer.weight_decay);
        }
        let takes_all = self.config.checkpoint.takes == Takes::All;
        if takes_all {
            state::require_optimizer(&manifest, self.config.optimizer.kind)?;
            if let Some(scaler) = state::loss_scaler(path, &manifest.state)? {
                self.loss_scaler
                    .restore(&scaler)
                    .map_err(|e| Error::checkpoint(path, e.to_string()))?;
            }
        }
        let mut shards = self.optimizer.shards(&self.stage.params, false)?;
        if !takes_all || manifest.tensors.iter().all(|tensor| tensor.kind == StateKind::Param) {
            // Imported checkpoints also contain only weights; the optimizer then starts from zero.
            shards.retain(|shard| shard.kind == StateKind::Param);
        }
        manifest.load(&shards)?;
        self.optimizer.set_steps(progress.updates);
        (self.in_flight, self.ahead) = (None, None);
        self.progress = progress;
        Ok(())
    }
}
