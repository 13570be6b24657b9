//! The training loop, and what it reports.

mod agreement;
mod communicators;
mod flops;
mod footprint;
mod generate;
mod inference;
mod memory;
mod memory_limit;
pub mod metrics;
mod model;
mod out_of_memory;
mod profile;
mod records;
pub mod report;
mod run;
mod saving;
mod schedules;
mod state;
mod tensorboard;
mod trainer;

pub use agreement::require as require_alike;
pub use communicators::most_communicators;
pub use flops::step_flops;
pub use footprint::Footprint;
pub use generate::{Length, Sampling};
pub use inference::{Inference, checkpoint_model};
pub use memory::{Peak, RanksHere, peak_memory, peak_memory_of, require_memory};
pub use metrics::{EvalMetrics, MetricsWriter, StepMetrics};
pub use model::{Ends, LayerKept, Layout, ModelBuilder};
pub use profile::{Ceilings, Profile, Profiler, SpanGroup, Summary, Total};
pub use report::Reporter;
pub use run::{Outcome, preflight};
pub use state::{SavedRun, saved_run, weights_only_state, with_parallel};
pub use trainer::{Progress, Sources, Trainer};
