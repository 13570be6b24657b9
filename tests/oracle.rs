//! Compares twenty AdamW steps with PyTorch + Hugging Face transformers, step by step, on several
//! layouts.
//!
//! Fixtures: `fixtures/make_oracle.py`.

use std::path::{Path, PathBuf};

use megatron::config::{DecayStyle, RunConfig};
use megatron::data::IndexedDataset;
use models::hf::HfModel;
use serde_json::Value;
use system_tests::{Style, Tokens, layout, on_ranks, sources, tiny, trainer};

/// Allowed relative difference of every loss and gradient norm.
const TOLERANCE: f64 = 1e-4;
/// Allowed absolute difference of every final weight.
const WEIGHT_TOLERANCE: f32 = 2e-4;

fn folder(style: Style) -> PathBuf {
    let name = if style == Style::Gpt2 { "gpt2-tiny" } else { "llama-tiny" };
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn expected(style: Style) -> Value {
    serde_json::from_slice(&std::fs::read(folder(style).join("expected.json")).unwrap()).unwrap()
}

/// The run that `expected.json` describes.
fn config(style: Style, settings: &Value) -> RunConfig {
    let int = |key: &str| settings[key].as_u64().unwrap() as usize;
    let float = |key: &str| settings[key].as_f64().unwrap();
    let mut config = tiny(style, 0.0);
    let model = &mut config.model;
    model.num_layers = int("L");
    model.hidden_size = int("H");
    model.ffn_hidden_size = if style == Style::Gpt2 { 4 * int("H") } else { 176 };
    model.num_attention_heads = int("A");
    model.num_query_groups = int("KV");
    model.head_dim = int("H") / int("A");
    model.seq_length = int("S");
    model.max_position_embeddings = int("S");
    model.norm_epsilon = if style == Style::Gpt2 { 1e-5 } else { 1e-6 };
    model.vocab_size = int("V");
    model.make_vocab_size_divisible_by = 128;
    config.training.micro_batch_size = 2;
    config.training.global_batch_size = int("GBS");
    let optimizer = &mut config.optimizer;
    optimizer.lr = float("lr");
    optimizer.min_lr = 0.0;
    optimizer.decay_style = DecayStyle::Constant;
    optimizer.warmup_samples = 0;
    optimizer.weight_decay = float("wd");
    optimizer.adam_beta1 = float("b1");
    optimizer.adam_beta2 = float("b2");
    optimizer.adam_eps = float("eps");
    optimizer.clip_grad = float("clip");
    config
}

fn follows_pytorch(style: Style, dp: usize, tp: usize, pp: usize) {
    let expected = expected(style);
    let config = layout(config(style, &expected["settings"]), dp, tp, pp);
    let dataset = IndexedDataset::open(folder(style).join("data_text_document")).unwrap();
    let stream =
        Tokens { tokens: dataset.read_sequence(0).unwrap(), seq_length: config.model.seq_length };
    let data = sources(stream);
    let initial = HfModel::open(&folder(style)).unwrap();
    let last = HfModel::open(&folder(style).join("final")).unwrap();
    let steps = expected["steps"].as_array().unwrap();
    on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = trainer(&config, world, &data)?;
        initial.load_into(&trainer.stage().params)?;
        for step in steps {
            let ours = trainer.step()?;
            for (what, ours, theirs) in [
                ("loss", ours.lm_loss, step["lm_loss"].as_f64().unwrap()),
                ("gradient norm", ours.grad_norm, step["grad_norm"].as_f64().unwrap()),
            ] {
                let difference = ((ours - theirs) / theirs).abs();
                assert!(
                    difference < TOLERANCE,
                    "{style:?} {dp}·{tp}·{pp} step {}: {what} {ours} here, {theirs} in PyTorch ({difference:e})",
                    step["iteration"]
                );
            }
        }
        let trained: Vec<Vec<f32>> = weights(&trainer)?;
        last.load_into(&trainer.stage().params)?;
        for (ours, theirs) in trained.iter().zip(weights(&trainer)?) {
            let worst = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst < WEIGHT_TOLERANCE, "{style:?} {dp}·{tp}·{pp}: a final weight differs by {worst}");
        }
        Ok(())
    })
    .unwrap();
}

fn weights(trainer: &megatron::train::Trainer) -> megatron::Result<Vec<Vec<f32>>> {
    trainer
        .stage()
        .params
        .iter()
        .map(|(id, _)| Ok(trainer.stage().params.weight(id)?.flatten_all()?.to_vec1::<f32>()?))
        .collect()
}

#[test]
fn gpt2_in_one_process() {
    follows_pytorch(Style::Gpt2, 1, 1, 1);
}

#[test]
fn gpt2_under_tensor_and_pipeline_parallelism() {
    follows_pytorch(Style::Gpt2, 1, 2, 2);
}

#[test]
fn gpt2_under_data_and_tensor_parallelism() {
    follows_pytorch(Style::Gpt2, 2, 2, 1);
}

#[test]
fn llama_in_one_process() {
    follows_pytorch(Style::Llama, 1, 1, 1);
}

#[test]
fn llama_under_tensor_and_pipeline_parallelism() {
    follows_pytorch(Style::Llama, 1, 2, 2);
}

#[test]
fn llama_under_data_and_tensor_parallelism() {
    follows_pytorch(Style::Llama, 2, 2, 1);
}
