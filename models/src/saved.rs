//! A GPT's checkpoint without its ranks: its model, the layouts that fit it, and conversion to
//! another layout.

use std::path::Path;

use megatron::checkpoint::{self, Manifest};
use megatron::config::{Origins, ParallelConfig};
use megatron::params::StateKind;
use megatron::train::{GPT, Layout, SavedRun, saved_run, with_parallel};
use megatron::{Error, Result};

use crate::Gpt;
use crate::bounds::bounded;
use crate::hf::{ORIGIN_CONFIG, SIDECAR_FILES};

/// A larger number is considered a mistake.
const MOST_RANKS: usize = 1 << 16;

/// A checkpoint that holds exactly the tensors of the model it names.
///
/// ```
/// use megatron::checkpoint::locate;
/// use megatron::config::{ParallelConfig, Origins};
/// use models::SavedGpt;
/// # use candle_core::Device;
/// # use megatron::comm::solo;
/// # use megatron::config::{ModelConfig, RunConfig};
/// # use megatron::data::SampleSource;
/// # use megatron::train::{Sources, Trainer};
/// # use models::Gpt;
/// # struct Zeros;
/// # impl SampleSource for Zeros {
/// #     fn seq_length(&self) -> usize {
/// #         8
/// #     }
/// #     fn num_samples(&self) -> u64 {
/// #         1
/// #     }
/// # }
/// # fn main() -> megatron::Result<()> {
/// # let model = ModelConfig {
/// #     hidden_size: 16,
/// #     head_dim: 8,
/// #     num_attention_heads: 2,
/// #     num_query_groups: 2,
/// #     ffn_hidden_size: 64,
/// #     seq_length: 8,
/// #     max_position_embeddings: 8,
/// #     vocab_size: 32,
/// #     ..Default::default()
/// # };
/// # let run = RunConfig { model, ..Default::default() };
/// # let (gpt, cpu) = (Gpt::of(&run, &Device::Cpu)?, Device::Cpu);
/// # let mut trainer = Trainer::new(&run, &gpt, solo(), &Sources::of(Zeros), &cpu)?;
/// # trainer.step()?;
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// trainer.save(folder)?;
///
/// let saved = SavedGpt::open(&locate(folder, None)?)?;
/// assert_eq!((saved.run.model.vocab_size, saved.run.progress.iteration), (32, 1));
/// let tp = |size| ParallelConfig { tensor_model_parallel_size: size, ..Default::default() };
/// assert!(saved.fits(&tp(2), &Origins::default()).is_ok());
/// assert!(saved.fits(&tp(3), &Origins::default()).is_err(), "2 heads do not divide by 3");
/// # Ok(())
/// # }
/// ```
pub struct SavedGpt {
    /// The description of the files.
    pub manifest: Manifest,
    /// The recorded facts about the run that wrote it.
    pub run: SavedRun,
}

impl SavedGpt {
    /// Reads the description of the checkpoint in folder `path` (`…/iter_0000100`), but no tensors.
    /// It allocates nothing of a size that the manifest only claims, so this is the safe way to a
    /// checkpoint's model.
    ///
    /// # Errors
    /// If it is damaged, not from a training run, or does not hold the model that it names.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(Manifest::read(path)?)
    }

    /// The checkpoint with this manifest.
    ///
    /// # Errors
    /// If it is not from a training run, or does not hold the model that it names.
    pub fn new(manifest: Manifest) -> Result<Self> {
        let path = manifest.folder();
        let run = saved_run(path, &manifest.state)?;
        if run.architecture != GPT {
            return Err(Error::checkpoint(
                path,
                format!(
                    "holds a model of another program, which calls it '{}'; `inspect` and \
                     `reshard` work on its tensors, but only that program can run it",
                    run.architecture
                ),
            ));
        }
        let model = &run.model;
        let params = manifest
            .tensors
            .iter()
            .filter(|tensor| tensor.kind == StateKind::Param && tensor.numel() > 0);
        let largest = params.clone().flat_map(|tensor| &tensor.shape).max().copied().unwrap_or(0);
        bounded(model, largest, params.count()).map_err(|why| {
            Error::checkpoint(
                path,
                format!("its manifest names a model that is too large for its tensors: {why}"),
            )
        })?;
        ParallelConfig::default().validate_with(model, &Origins::default()).map_err(|e| {
            Error::checkpoint(path, format!("its manifest names an impossible model: {e}"))
        })?;
        let specs = Gpt::specs(model)?;
        manifest.check_matches(
            specs.iter().map(|spec| (spec.name.as_str(), StateKind::Param, spec.shape.as_slice())),
        )?;
        Ok(Self { manifest, run })
    }

    /// Checks that a run under `parallel` could load it. `origins` gives the sources of the
    /// numbers.
    ///
    /// # Errors
    /// If it could not; the message has the equations that the layout violates.
    pub fn fits(&self, parallel: &ParallelConfig, origins: &Origins) -> Result<()> {
        parallel.validate_with(&self.run.model, origins)?;
        let world = parallel.world_size();
        if world > MOST_RANKS {
            return Err(Error::config(format!(
                "{world} ranks are more than the {MOST_RANKS} that a layout can have"
            )));
        }
        Ok(())
    }

    /// Writes it as `dir/iter_…`, as a run under `parallel` would, with its sidecar files such as
    /// the tokenizer; see [`checkpoint::reshard`].
    ///
    /// # Errors
    /// If the layout does not fit, `dir` holds a checkpoint, this checkpoint is damaged, or the
    /// system refuses.
    pub fn reshard(
        &self,
        dir: &Path,
        parallel: &ParallelConfig,
        origins: &Origins,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool> {
        self.fits(parallel, origins)?;
        let model = Gpt::outline(&self.run.model, parallel.tensor_model_parallel_size)?;
        let layout = Layout::new(parallel, &model)?;
        let ranks = (0..layout.world_size()).map(|rank| layout.written(rank)).collect();
        let state = with_parallel(&self.manifest.state, parallel)?;
        let sidecars: Vec<&str> = SIDECAR_FILES.into_iter().chain([ORIGIN_CONFIG]).collect();
        checkpoint::reshard(&self.manifest, dir, &state, ranks, &sidecars, progress)
    }

    /// The tensor parallel sizes that split the model evenly.
    pub fn tensor_parallel_sizes(&self) -> Vec<usize> {
        let fits = |tp: &usize| {
            let layout = ParallelConfig { tensor_model_parallel_size: *tp, ..Default::default() };
            self.fits(&layout, &Origins::default()).is_ok()
        };
        (1..=self.run.model.num_query_groups).filter(fits).collect()
    }
}
