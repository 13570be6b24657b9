//! `--profile`: what each rank does in a few steps, as traces for Chrome's viewer or Perfetto and as a table.

mod ceilings;
mod summary;
mod trace_file;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use kernels::trace::{Entered, Recorder};

pub use self::ceilings::Ceilings;
pub use self::summary::{SpanGroup, Summary, Total};
use super::report::Reporter;
use crate::comm::Group;
use crate::config::ProfileConfig;
use crate::topology::ProcessGroups;
use crate::{Error, Result};

/// What all profiled ranks did.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Where the traces are, a file a rank.
    pub dir: PathBuf,
    /// By rank; empty if the run had none of the steps asked for.
    pub ranks: Vec<(usize, Summary)>,
    /// Of rank 0.
    pub ceilings: Ceilings,
    pub dtype: DType,
}

/// Records the steps of a run that its settings name.
pub(super) struct Profiler {
    config: Option<ProfileConfig>,
    /// Of ranks that are profiled, from the first such step on.
    recorder: Option<Recorder>,
    entered: Option<Entered>,
    steps: u64,
}

impl Profiler {
    pub fn new(config: Option<&ProfileConfig>) -> Self {
        Self { config: config.cloned(), recorder: None, entered: None, steps: 0 }
    }

    /// Called before step `iteration` (from 1) of rank `rank`, which computes on `device`: on a GPU its times are recorded.
    ///
    /// # Errors
    /// If the device fails.
    pub fn before(&mut self, iteration: u64, rank: usize, device: &Device) -> Result<()> {
        let wanted = |c: &ProfileConfig| {
            (c.step_start..c.step_end).contains(&iteration) && (c.ranks.is_empty() || c.ranks.contains(&rank))
        };
        if self.config.as_ref().is_some_and(wanted) {
            self.entered = Some(self.recorder.get_or_insert_default().enter_on(MAIN, device)?);
            self.steps += 1;
        }
        Ok(())
    }

    /// Called after the step.
    pub fn after(&mut self) {
        self.entered = None;
    }

    /// Writes this rank's trace and, on rank 0, reports the profiles of all. Collective over the world.
    ///
    /// # Errors
    /// If a file cannot be written or a peer fails.
    pub fn finish(
        &mut self,
        groups: &ProcessGroups,
        dtype: DType,
        device: &Device,
        reporter: &mut dyn Reporter,
    ) -> Result<()> {
        let Some(config) = &self.config else { return Ok(()) };
        let rank = groups.world.rank();
        let mine = match self.recorder.take() {
            Some(recorder) => {
                let events = recorder.take();
                let path = config.dir.join(format!("trace_rank_{rank:05}.json"));
                trace_file::write(&path, rank, &label(groups), &recorder, &events)?;
                Some(Summary::of(&events, self.steps))
            }
            None => None,
        };
        // Every rank measures while the others do, as every rank computes while the others do.
        groups.world.barrier()?;
        let ceilings = Ceilings::measure(dtype, device)?;
        let ranks = gather(&groups.world, &mine)?;
        if rank == 0 {
            reporter.profile(&Profile { dir: config.dir.clone(), ranks, ceilings, dtype });
        }
        Ok(())
    }
}

/// The name of the thread that runs the steps.
const MAIN: &str = "main";

/// Where a rank lies, for readers of traces.
fn label(groups: &ProcessGroups) -> String {
    let (tp, pp, dp) = (groups.tp.rank(), groups.pp.rank(), groups.dp.rank());
    format!("rank {} (tp {tp} · pp {pp} · dp {dp})", groups.world.rank())
}

/// The summaries of the ranks that have one.
fn gather(world: &Group, mine: &Option<Summary>) -> Result<Vec<(usize, Summary)>> {
    let bytes = serde_json::to_vec(mine).map_err(|e| Error::config(format!("cannot describe a profile: {e}")))?;
    let mut all = Vec::new();
    for (rank, bytes) in world.all_gather_bytes(&bytes)?.iter().enumerate() {
        let theirs: Option<Summary> = serde_json::from_slice(bytes)
            .map_err(|e| Error::comm(format!("rank {rank} sent a profile that cannot be read: {e}")))?;
        all.extend(theirs.map(|summary| (rank, summary)));
    }
    Ok(all)
}

/// Writes `text` to `path` and its folder.
fn write_file(path: &Path, text: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    }
    std::fs::write(path, text).map_err(|e| Error::io("write", path, e))
}
