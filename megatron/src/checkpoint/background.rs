//! Saving while training continues (Megatron-LM's `--async-save`): the state is copied, and a
//! thread of each rank writes the copy.
//!
//! The training threads do all synchronization between ranks, at points where they meet anyway:
//! before writing, that everything is ready; after all have written, that the checkpoint is
//! complete. It then appears in the same way as with [`super::save`]. Until then, only earlier
//! checkpoints are visible.

use std::path::Path;
use std::thread::{self, JoinHandle};

use super::folder::Names;
use super::rank_file::Written;
use super::save::{complete, prepare, verdict, write};
use crate::comm::Group;
use crate::params::{ShardRef, snapshot};
use crate::{Error, Result};

/// A checkpoint that is being written. If dropped, it waits until this rank has written, and no
/// checkpoint appears.
pub struct Saving {
    names: Names,
    iteration: u64,
    state: serde_json::Value,
    /// None after it was joined.
    writer: Option<Result<JoinHandle<Result<Written>>>>,
}

/// Starts to save a checkpoint like [`super::save`]. When it returns, `shards` may change.
/// Collective over `world`.
///
/// # Errors
/// As [`super::save`], if the checkpoint cannot be started. [`Saving::finish`] reports later
/// failures to all ranks.
pub fn begin(
    dir: &Path,
    iteration: u64,
    shards: &[ShardRef],
    state: serde_json::Value,
    world: &Group,
) -> Result<Saving> {
    let names = Names::new(dir, iteration);
    let plan = verdict(prepare(&names, shards, world), &names, world)?;
    let writer = snapshot(shards).and_then(|copies| {
        let folder = names.temp.clone();
        let writing = thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || write(plan, &copies, &folder));
        writing.map_err(|source| Error::io("start a thread to write", &names.target, source))
    });
    Ok(Saving { names, iteration, state, writer: Some(writer) })
}

impl Saving {
    /// The iteration of the checkpoint.
    pub fn iteration(&self) -> u64 {
        self.iteration
    }

    /// Whether this rank has nothing left to write, so that [`Saving::finish`] does not wait for
    /// it.
    pub fn is_written(&self) -> bool {
        self.writer
            .as_ref()
            .is_none_or(|writer| writer.as_ref().map_or(true, JoinHandle::is_finished))
    }

    /// Waits until every rank has written, then makes the checkpoint appear. Collective over
    /// `world`.
    ///
    /// # Errors
    /// As [`super::save`].
    pub fn finish(mut self, world: &Group) -> Result<()> {
        let written = self.wait();
        verdict(
            complete(&self.names, self.iteration, &self.state, written, world),
            &self.names,
            world,
        )
    }

    fn wait(&mut self) -> Result<Written> {
        let internal =
            |what: &str| Error::checkpoint(&self.names.target, format!("internal error: {what}"));
        match self.writer.take() {
            Some(Ok(writer)) => {
                writer.join().unwrap_or_else(|_| Err(internal("the thread that wrote it panicked")))
            }
            Some(Err(error)) => Err(error),
            None => Err(internal("it was finished twice")),
        }
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        // The lock on the folder must last as long as something is written to it.
        if self.writer.is_some() {
            let _ = self.wait();
        }
    }
}
