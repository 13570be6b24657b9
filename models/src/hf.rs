//! Hugging Face weights: which tensors of a file make up each parameter.
//!
//! GPT-2: `transformers` `modeling_gpt2.py` (Conv1D weights are `[in, out]`); Llama: `modeling_llama.py`. Fused QKV rows are
//! grouped here per key/value group, (query heads…, key, value), as in Megatron-LM.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use megatron::config::ModelConfig;
use megatron::params::{ParamStore, Role};
use megatron::{Error, Result};

/// The naming scheme of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Gpt2,
    Llama,
}

/// The tensors of one or more safetensors files, in fp32.
pub struct HfWeights {
    tensors: HashMap<String, Tensor>,
    family: Family,
    origin: std::path::PathBuf,
}

impl HfWeights {
    /// Reads a `model.safetensors`; the family follows from the names in it.
    ///
    /// # Errors
    /// If the file cannot be read or is of no known family.
    pub fn read(path: &Path) -> Result<Self> {
        let tensors = candle_core::safetensors::load(path, &Device::Cpu)
            .map_err(|e| Error::checkpoint(path, format!("not a readable safetensors file: {e}")))?;
        let has = |name: &str| tensors.contains_key(name);
        let family = if has("transformer.wte.weight") || has("wte.weight") {
            Family::Gpt2
        } else if has("model.embed_tokens.weight") {
            Family::Llama
        } else {
            return Err(Error::checkpoint(path, "holds neither GPT-2 nor Llama weights (no wte or embed_tokens)"));
        };
        Ok(Self { tensors, family, origin: path.to_path_buf() })
    }

    pub fn family(&self) -> Family {
        self.family
    }

    fn get(&self, name: &str) -> Result<Tensor> {
        // GPT-2 files are written with and without the prefix.
        let found = self.tensors.get(name).or_else(|| self.tensors.get(name.strip_prefix("transformer.")?));
        let tensor = found.ok_or_else(|| Error::checkpoint(&self.origin, format!("has no tensor {name}")))?;
        Ok(tensor.to_dtype(DType::F32)?)
    }

    /// Rows `[q; k; v]` regrouped per key/value group.
    fn group_qkv(model: &ModelConfig, q: Tensor, k: Tensor, v: Tensor) -> Result<Tensor> {
        let (groups, d) = (model.num_query_groups, model.head_dim);
        let width = q.elem_count() / q.dim(0)?;
        let cut = |t: Tensor| t.reshape((groups, t.elem_count() / (groups * width * d), d, width));
        let grouped = Tensor::cat(&[cut(q)?, cut(k)?, cut(v)?], 1)?;
        let rows = grouped.elem_count() / width;
        let matrix = grouped.reshape((rows, width))?;
        Ok(matrix)
    }

    /// The global value of a parameter, in the parameter's own shape.
    fn value(&self, name: &str, model: &ModelConfig) -> Result<Tensor> {
        match self.family {
            Family::Gpt2 => self.gpt2(name, model),
            Family::Llama => self.llama(name, model),
        }
    }

    fn gpt2(&self, name: &str, model: &ModelConfig) -> Result<Tensor> {
        let ends = [
            ("embedding.word_embeddings.weight", "wte.weight"),
            ("embedding.position_embeddings.weight", "wpe.weight"),
            ("decoder.final_layernorm.weight", "ln_f.weight"),
            ("decoder.final_layernorm.bias", "ln_f.bias"),
        ];
        if let Some((_, hf)) = ends.iter().find(|(ours, _)| *ours == name) {
            return self.get(&format!("transformer.{hf}"));
        }
        let (layer, part) = split_layer(name).ok_or_else(|| self.unknown(name))?;
        let (module, kind) = part.rsplit_once('.').ok_or_else(|| self.unknown(name))?;
        let hf = match module {
            "input_layernorm" => "ln_1",
            "self_attention.linear_qkv" => "attn.c_attn",
            "self_attention.linear_proj" => "attn.c_proj",
            "pre_mlp_layernorm" => "ln_2",
            "mlp.linear_fc1" => "mlp.c_fc",
            "mlp.linear_fc2" => "mlp.c_proj",
            _ => return Err(self.unknown(name)),
        };
        let tensor = self.get(&format!("transformer.h.{layer}.{hf}.{kind}"))?;
        // Conv1D keeps [in, out].
        let tensor = if tensor.rank() == 2 { tensor.t()?.contiguous()? } else { tensor };
        if module != "self_attention.linear_qkv" {
            return Ok(tensor);
        }
        let width = model.num_attention_heads * model.head_dim;
        let part = |at: usize| tensor.narrow(0, at * width, width)?.contiguous();
        let grouped = Self::group_qkv(model, part(0)?, part(1)?, part(2)?)?;
        Ok(grouped.reshape(tensor.shape())?)
    }

    fn llama(&self, name: &str, model: &ModelConfig) -> Result<Tensor> {
        let ends = [
            ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            ("decoder.final_layernorm.weight", "model.norm.weight"),
            ("output_layer.weight", "lm_head.weight"),
        ];
        if let Some((_, hf)) = ends.iter().find(|(ours, _)| *ours == name) {
            return self.get(hf);
        }
        let (layer, part) = split_layer(name).ok_or_else(|| self.unknown(name))?;
        let get = |hf: &str| self.get(&format!("model.layers.{layer}.{hf}"));
        match part {
            "input_layernorm.weight" => get("input_layernorm.weight"),
            "pre_mlp_layernorm.weight" => get("post_attention_layernorm.weight"),
            "self_attention.linear_proj.weight" => get("self_attn.o_proj.weight"),
            "mlp.linear_fc2.weight" => get("mlp.down_proj.weight"),
            "mlp.linear_fc1.weight" => Ok(Tensor::cat(&[get("mlp.gate_proj.weight")?, get("mlp.up_proj.weight")?], 0)?),
            "self_attention.linear_qkv.weight" => Self::group_qkv(
                model,
                get("self_attn.q_proj.weight")?,
                get("self_attn.k_proj.weight")?,
                get("self_attn.v_proj.weight")?,
            ),
            _ => Err(self.unknown(name)),
        }
    }

    fn unknown(&self, name: &str) -> Error {
        Error::checkpoint(
            &self.origin,
            format!(
                "holds {:?} weights, which have nothing for parameter {name}; the model's settings differ",
                self.family
            ),
        )
    }

    /// Fills the parameters that a rank holds.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape than the model's settings say.
    pub fn load_into(&self, store: &ParamStore, model: &ModelConfig) -> Result<()> {
        for (_, param) in store.iter().filter(|(_, p)| !matches!(p.role, Role::TiedUse(_))) {
            let spec = &param.spec;
            let value = self.value(&spec.name, model)?;
            if value.dims() != spec.shape {
                return Err(Error::checkpoint(
                    &self.origin,
                    format!(
                        "{} has shape {:?} there, the model's settings say {:?}",
                        spec.name,
                        value.dims(),
                        spec.shape
                    ),
                ));
            }
            let mut local = vec![0f32; param.numel];
            for piece in &param.pieces {
                let mut cut = value.clone();
                for (dim, (start, len)) in piece.offset.iter().zip(&piece.shape).enumerate() {
                    cut = cut.narrow(dim, *start, *len)?;
                }
                let values = cut.flatten_all()?.to_vec1::<f32>()?;
                local[piece.local..piece.local + piece.flat.len()].copy_from_slice(&values[piece.flat.clone()]);
            }
            store.assign(param, local)?;
        }
        Ok(())
    }
}

/// `decoder.layers.3.mlp.linear_fc1.weight` → (3, `mlp.linear_fc1.weight`)
fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("decoder.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}
