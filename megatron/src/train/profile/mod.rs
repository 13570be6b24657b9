//! `--profile`: records what each rank does in a few steps, as traces for Chrome's viewer or
//! Perfetto and as a table.

mod ceilings;
mod summary;
mod trace_file;

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::DType;
use kernels::tensor::trace::{Entered, Recorder};

pub use self::ceilings::Ceilings;
pub use self::summary::{SpanGroup, Summary, Total};
use super::trainer::Trainer;
use crate::comm::Group;
use crate::config::ProfileConfig;
use crate::topology::ProcessGroups;
use crate::{Error, Result, files};

/// The profile of all recorded ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Folder of the traces, one file per rank.
    pub dir: PathBuf,
    /// Summary of each rank; empty if the run had none of the requested steps.
    pub ranks: Vec<(usize, Summary)>,
    /// The ceilings of rank 0.
    pub ceilings: Ceilings,
    /// Dtype of the model's weights; the ceilings are measured in it.
    pub dtype: DType,
    /// Errors of ranks that could not write their traces.
    pub failures: Vec<String>,
}

/// Records the steps that a run's settings name.
pub struct Profiler {
    /// `None` once nothing more is to be recorded.
    config: Option<ProfileConfig>,
    /// Only on profiled ranks, from their first recorded step on.
    recorder: Option<Recorder>,
    entered: Option<Entered>,
    steps: u64,
}

impl Profiler {
    /// Records the steps that `config` names, or nothing without `config`.
    pub fn new(config: Option<&ProfileConfig>) -> Self {
        Self { config: config.cloned(), recorder: None, entered: None, steps: 0 }
    }

    /// Whether step `iteration`, counted from 1, is recorded on some rank.
    pub fn records(&self, iteration: u64) -> bool {
        self.config.as_ref().is_some_and(|c| (c.step_start..c.step_end).contains(&iteration))
    }

    /// Whether step `iteration` is the last recorded one.
    pub fn ends_with(&self, iteration: u64) -> bool {
        self.config.as_ref().is_some_and(|c| c.step_end == iteration + 1)
    }

    /// Call it before the trainer's next step. On a GPU it records the times of the GPU's work.
    ///
    /// # Errors
    /// If the device fails.
    pub fn before(&mut self, trainer: &Trainer) -> Result<()> {
        let rank = trainer.groups.world.rank();
        let mine = |c: &ProfileConfig| c.ranks.is_empty() || c.ranks.contains(&rank);
        if self.records(trainer.progress.iteration + 1) && self.config.as_ref().is_some_and(mine) {
            self.entered = Some(
                self.recorder.get_or_insert_default().enter_on(MAIN, &trainer.stage().device)?,
            );
            self.steps += 1;
        }
        Ok(())
    }

    /// Call it after the step.
    pub fn after(&mut self) {
        self.entered = None;
    }

    /// Writes this rank's trace. Returns the profiles of all ranks on rank 0, unless nothing was to
    /// be recorded or the profile was already returned. Collective over the world.
    ///
    /// # Errors
    /// If a peer or the device fails. A file that cannot be written is no error; the profile lists
    /// it.
    pub fn finish(&mut self, trainer: &Trainer) -> Result<Option<Profile>> {
        let Some(config) = self.config.take() else { return Ok(None) };
        let (groups, stage) = (&trainer.groups, trainer.stage());
        let rank = groups.world.rank();
        let mine = self.recorder.take().map(|recorder| {
            let events = recorder.take();
            let path = config.dir.join(format!("trace_rank_{rank:05}.json"));
            let written = trace_file::write(&path, rank, &label(groups), &recorder, &events);
            (Summary::of(&events, self.steps), written.err().map(|error| error.to_string()))
        });
        // All ranks measure at the same time, because they also compute at the same time.
        groups.world.barrier()?;
        let ceilings = Ceilings::measure(stage.dtype, &stage.device)?;
        let (mut ranks, mut failures) = (Vec::new(), Vec::new());
        for (rank, (summary, failure)) in gather(&groups.world, &mine)? {
            ranks.push((rank, summary));
            failures.extend(failure);
        }
        Ok((rank == 0).then_some(Profile {
            dir: config.dir,
            ranks,
            ceilings,
            dtype: stage.dtype,
            failures,
        }))
    }
}

/// The name of the thread that runs the steps.
const MAIN: &str = "main";

/// The rank's place in the layout, for readers of traces.
fn label(groups: &ProcessGroups) -> String {
    let (tp, pp, dp) = (groups.tp.rank(), groups.pp.rank(), groups.dp_rank());
    let cp =
        if groups.cp.size() > 1 { format!(" · cp {}", groups.cp.rank()) } else { String::new() };
    format!("rank {} (tp {tp}{cp} · pp {pp} · dp {dp})", groups.world.rank())
}

/// A rank's profile, and the error if its trace could not be written.
type Told = (Summary, Option<String>);

/// Collects the profiles of the ranks that recorded something.
fn gather(world: &Group, mine: &Option<Told>) -> Result<Vec<(usize, Told)>> {
    let bytes = serde_json::to_vec(mine)
        .map_err(|e| Error::config(format!("cannot describe a profile: {e}")))?;
    let mut all = Vec::new();
    for (rank, bytes) in world.all_gather_bytes(&bytes)?.iter().enumerate() {
        let theirs: Option<Told> = serde_json::from_slice(bytes).map_err(|e| {
            Error::comm(format!("rank {rank} sent a profile that cannot be read: {e}"))
        })?;
        all.extend(theirs.map(|told| (rank, told)));
    }
    Ok(all)
}

/// Writes `text` to `path`, and creates its folder.
fn write_file(path: &Path, text: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    }
    let file =
        files::open_to_write(path, OpenOptions::new().write(true).create(true).truncate(true));
    file.and_then(|mut file| file.write_all(text)).map_err(|e| Error::io("write", path, e))
}
