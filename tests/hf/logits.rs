//! Writes the logits of a checkpoint's model for given tokens.
//!
//!     cargo run --release --example logits -- CHECKPOINT TOKENS.safetensors LOGITS.safetensors
//!
//! In: `tokens` [s], integers. Out: `logits` [s, vocabulary], f32.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use megatron::config::Recompute;
use megatron::data::{Documents, MicroBatch, NamedTensors};
use megatron::tensor_parallel::Phase;
use megatron::train::Inference;
use megatron::{Error, Result, checkpoint, comm};
use models::{Gpt, SavedGpt};
use system_tests::{Style, layout, tiny};

fn logits(folder: &Path, tokens: &Tensor) -> Result<Tensor> {
    let (dtype, device) = (DType::F32, Device::Cpu);
    let folder = checkpoint::locate(folder, None)?;
    let config = SavedGpt::open(&folder)?.run.model;
    let model = Gpt::new(&config, 1, false, Recompute::None, dtype, &device)?;
    let parallel = layout(tiny(Style::Gpt2, 0.0), 1, 1, 1).parallel;
    let inference = Inference::new(&config, &model, &parallel, comm::solo(), dtype, &device)?;
    inference.load(&folder)?;
    let length = tokens.elem_count();
    let batch = MicroBatch {
        tokens: tokens.to_dtype(DType::U32)?.reshape((length, 1))?,
        labels: Tensor::zeros((length, 1), DType::U32, &device)?,
        loss_mask: Tensor::zeros((length, 1), DType::F32, &device)?,
        counted: 0.0,
        samples: vec![0],
        step_and_samples: None,
        documents: Documents::default(),
        named: NamedTensors::default(),
    };
    let ctx = inference.stage.ctx(&batch, Phase::Evaluate, None);
    let chunk = &inference.stage.chunks[0];
    let (Some(embedding), Some(head)) = (&chunk.input, &chunk.output) else {
        return Err(Error::config("one process holds both ends of a model"));
    };
    let mut x = embedding.forward(&ctx)?.0;
    for layer in &chunk.layers {
        x = layer.forward(x, &ctx)?.0;
    }
    let rows: Result<Vec<_>> =
        (0..length).map(|row| Ok(head.logits_at(&x, &[row], &ctx)?.flatten_all()?)).collect();
    Ok(Tensor::stack(&rows?, 0)?)
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, tokens, out] = words.as_slice() else {
        return Err(Error::config(
            "usage: logits CHECKPOINT TOKENS.safetensors LOGITS.safetensors",
        ));
    };
    let held = candle_core::safetensors::load(tokens, &Device::Cpu)?;
    let tokens =
        held.get("tokens").ok_or_else(|| Error::config("there is no tensor called tokens"))?;
    let logits = logits(Path::new(folder), tokens)?;
    Ok(candle_core::safetensors::save(&HashMap::from([("logits", logits)]), out)?)
}
