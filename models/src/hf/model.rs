//! A Hugging Face folder as a model's parameters, read one at a time.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use megatron::checkpoint::Float;
use megatron::config::ModelConfig;
use megatron::params::{ParamStore, Role, initial_values_of};
use megatron::{Error, Result};

use super::config::HfConfig;
use super::files::HfFiles;
use crate::Gpt;
use crate::bounds::bounded;
use crate::families::{LM_HEAD, OUTPUT_LAYER, Plan, Planned, QkvShape, WORD_EMBEDDINGS};

/// Up to this extent a message names the mismatching tensor.
const SMALL_EXTENT: usize = 1 << 20;

/// A parameter's value: global, unpadded, in the dtype of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Raw {
    /// Dtype of the elements in the file.
    pub dtype: Float,
    /// Global shape, without padding.
    pub shape: Vec<usize>,
    /// Elements in row-major order, little-endian.
    pub bytes: Vec<u8>,
}

/// The model in a folder. Every tensor of the files belongs to a parameter, and every parameter has
/// all its tensors.
pub struct HfModel {
    /// The content of `config.json`.
    pub config: HfConfig,
    files: HfFiles,
    parameters: Vec<Planned>,
    qkv: QkvShape,
}

impl HfModel {
    /// Opens a folder with `config.json` and safetensors files. Weights are not read yet.
    ///
    /// # Errors
    /// If the architecture is unknown, or the files do not hold exactly its tensors; messages name
    /// what is wrong.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::with(HfConfig::read(folder)?, HfFiles::open(folder)?)
    }

    /// The model that `config` describes, in `files`; see [`HfModel::open`].
    ///
    /// # Errors
    /// As [`HfModel::open`].
    pub fn with(config: HfConfig, files: HfFiles) -> Result<Self> {
        let plan = plan(&config, &files)?;
        if let Some(words) = plan.tied_head
            && files.read(LM_HEAD)? != files.read(&words)?
        {
            return Err(Error::checkpoint(
                files.folder(),
                format!(
                    "{LM_HEAD} differs from {words}, although config.json ties them; set tie_word_embeddings to false"
                ),
            ));
        }
        let qkv = QkvShape::of(&config.model);
        Ok(Self { config, files, parameters: plan.parameters, qkv })
    }

    /// Checks, from the headers alone, that `files` hold the model that `config` describes.
    ///
    /// # Errors
    /// As [`HfModel::open`], except for a repeated matrix with different values.
    pub fn check(config: &HfConfig, files: &HfFiles) -> Result<()> {
        plan(config, files).map(drop)
    }

    /// Reads all weights to find errors in them.
    ///
    /// # Errors
    /// As [`HfModel::read`].
    pub fn verify(&self) -> Result<()> {
        (0..self.parameters.len()).try_for_each(|at| self.read(at).map(drop))
    }

    /// Names, shapes and dtypes of the parameters, in forward order.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &[usize], Float)> {
        self.parameters.iter().map(|parameter| {
            let dtype = parameter.theirs.first().and_then(|name| self.files.tensors().get(name)?.0);
            (
                parameter.spec.name.as_str(),
                parameter.spec.shape.as_slice(),
                dtype.unwrap_or(Float::F32),
            )
        })
    }

    /// Reads the parameter at `index` of [`HfModel::parameters`].
    ///
    /// # Errors
    /// If a file cannot be read, or a tensor holds NaN or infinity.
    pub fn read(&self, index: usize) -> Result<Raw> {
        let Planned { spec, theirs, transform } = &self.parameters[index];
        let read = |name: &String| {
            let tensor = self.files.read(name)?;
            match tensor.dtype.non_number(&tensor.bytes) {
                None => Ok(tensor),
                Some(what) => Err(Error::checkpoint(
                    self.files.folder(),
                    format!(
                        "{name} holds {what}: training diverged, or the file is damaged; use another version of the model"
                    ),
                )),
            }
        };
        let tensors = theirs.iter().map(read).collect::<Result<Vec<_>>>()?;
        let dtype = tensors.first().map_or(Float::F32, |tensor| tensor.dtype);
        let parts = tensors.into_iter().map(|tensor| tensor.bytes).collect();
        let bytes = transform.to_ours(parts, &spec.shape, dtype.size(), &self.qkv);
        Ok(Raw { dtype, shape: spec.shape.clone(), bytes })
    }

    /// Fills the parameters that a rank holds. Reads only those, one at a time.
    ///
    /// # Errors
    /// If `store` has a parameter that the folder lacks or has in another shape, a file cannot be
    /// read, or a tensor holds NaN or infinity.
    pub fn load_into(&self, store: &ParamStore) -> Result<()> {
        self.fill(store, None)
    }

    /// As [`HfModel::load_into`], for a model whose vocabulary may have another size. Extra rows of
    /// the folder are dropped. Rows that the folder lacks get the initial values of a run with this
    /// `seed`, which are the same on every layout.
    ///
    /// # Errors
    /// As [`HfModel::load_into`].
    pub fn load_resized_into(&self, store: &ParamStore, seed: u64) -> Result<()> {
        self.fill(store, Some(seed))
    }

    fn fill(&self, store: &ParamStore, resized: Option<u64>) -> Result<()> {
        let index: HashMap<&str, usize> =
            self.parameters().enumerate().map(|(at, (name, ..))| (name, at)).collect();
        for (_, param) in store.iter().filter(|(_, p)| !matches!(p.role, Role::TiedUse(_))) {
            let spec = &param.spec;
            let refuse = |message: String| Error::checkpoint(self.files.folder(), message);
            let at = *index
                .get(spec.name.as_str())
                .ok_or_else(|| refuse(format!("has no tensor for {}", spec.name)))?;
            let Raw { dtype, shape, bytes } = self.read(at)?;
            let resized =
                resized.filter(|_| [WORD_EMBEDDINGS, OUTPUT_LAYER].contains(&spec.name.as_str()));
            if shape != spec.shape && (resized.is_none() || shape[1..] != spec.shape[1..]) {
                return Err(refuse(format!(
                    "{} has shape {shape:?} there and {:?} here",
                    spec.name, spec.shape
                )));
            }
            let value = Tensor::from_raw_buffer(&bytes, candle_dtype(dtype), &shape, &Device::Cpu)?;
            drop(bytes);
            let mut local = match resized {
                Some(seed) if shape[0] < spec.shape[0] => {
                    initial_values_of(spec, &param.pieces, param.numel, seed)
                }
                _ => vec![0f32; param.numel],
            };
            for piece in param.pieces.iter().filter(|piece| piece.offset[0] < shape[0]) {
                let mut cut = value.clone();
                for (dim, (start, len)) in piece.offset.iter().zip(&piece.shape).enumerate() {
                    // Missing rows are the last ones.
                    cut = cut.narrow(dim, *start, (*len).min(shape[dim] - start))?;
                }
                let values = cut.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                let held = piece.flat.start..piece.flat.end.min(values.len());
                local[piece.local..piece.local + held.len()].copy_from_slice(&values[held]);
            }
            store.assign(param, local)?;
        }
        Ok(())
    }

    /// Settings of the model.
    pub fn model(&self) -> &ModelConfig {
        &self.config.model
    }
}

/// Assigns tensors to parameters.
fn plan(config: &HfConfig, files: &HfFiles) -> Result<Plan> {
    let (model, held) = (&config.model, files.tensors());
    let refuse = |why: String| Error::checkpoint(files.folder(), why);
    let largest =
        held.values().filter(|(_, shape)| !shape.contains(&0)).flat_map(|(_, shape)| shape).max();
    let largest = largest.map_or(SMALL_EXTENT, |&extent| extent.max(SMALL_EXTENT));
    bounded(model, largest, held.len()).map_err(|why| {
        refuse(format!("config.json describes a model that does not match the files: {why}"))
    })?;
    let plan = config.family.plan_file(&Gpt::specs(model)?, &QkvShape::of(model), held);
    plan.map_err(refuse)
}

pub(super) fn candle_dtype(dtype: Float) -> DType {
    match dtype {
        Float::F32 => DType::F32,
        Float::Bf16 => DType::BF16,
        Float::F16 => DType::F16,
        Float::F64 => DType::F64,
    }
}
