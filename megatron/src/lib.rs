//! The parallel runtime: everything between one rank's kernels and a whole training run.
//!
//! | folder | what it holds |
//! |---|---|
//! | [`topology`] | rank arithmetic: which rank sits where on tp × cp × ep × dp × pp |
//! | [`comm`] | communicators between ranks, rendezvous, watchdog |
//! | [`config`] | what a run is made of, resolved and validated |
//! | [`params`] | what a parameter is regardless of layout; initial values; flat buffers |
//! | [`tensor_parallel`] | layers cut over tp, and the layouts of their activations |
//! | [`context_parallel`] | sequences cut over cp: tokens exchanged for heads around attention |
//! | [`pipeline`] | schedules as data, their simulator, the engine that runs them |
//! | [`data_parallel`] | reduction of gradients over dp (and cp) |
//! | [`optim`] | optimizers, clipping, learning-rate schedules |
//! | [`checkpoint`] | one logical state on disk, whatever the layout |
//! | [`data`] | text, tokens, datasets, samplers |
//! | [`train`] | the training loop |

#![warn(missing_docs)]

pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod context_parallel;
pub mod data;
pub mod data_parallel;
pub mod error;
#[doc(hidden)] // Opens files safely for the sibling crates; no part of training.
pub mod files;
pub mod optim;
pub mod params;
pub mod pipeline;
#[doc(hidden)] // Folders of the user's alone, for the sibling crates; no part of training.
pub mod private;
pub mod tensor_parallel;
#[doc(hidden)] // Cleans text that others wrote, for the sibling crates; no part of training.
pub mod text;
pub mod topology;
pub mod train;

pub use error::{Error, Result};
