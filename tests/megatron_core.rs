//! Checkpoints of Megatron-LM, as Megatron-Core wrote them under its layouts, on several of ours, against Megatron's logits; what is refused.
//!
//! Fixtures: `fixtures/make_megatron_core.py`.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use megatron::checkpoint;
use megatron::config::{ModelConfig, RunConfig};
use models::megatron_core::{MegatronModel, Vocabulary, import};
use system_tests::logits::{LAYOUTS, assert_logits};
use system_tests::{Style, layout, tiny};

const MODELS: [&str; 3] = ["llama-tp2-pp2", "gpt2-tp2", "qwen2-bf16"];
const VOCABULARY: usize = 101;
const PADDED: usize = 104;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/megatron-core").join(name)
}

fn expected(name: &str) -> (Vec<u32>, Vec<f32>) {
    let expected = candle_core::safetensors::load(fixture(name).join("expected.safetensors"), &Device::Cpu).unwrap();
    let tokens = expected["tokens"].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    (tokens, expected["logits"].flatten_all().unwrap().to_vec1().unwrap())
}

/// A run of `model`, cut as dp · tp · pp.
fn run(model: &ModelConfig, (dp, tp, pp): (usize, usize, usize)) -> RunConfig {
    let mut config = layout(tiny(Style::Gpt2, 0.0), dp, tp, pp);
    config.model = model.clone();
    config
}

#[test]
fn an_imported_checkpoint_gives_megatrons_logits_on_every_layout() {
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let (tokens, logits) = expected(name);
        let imported = import(&fixture(name), dir.path(), Some(VOCABULARY), |_, _| ()).unwrap();
        checkpoint::verify(&imported.path).unwrap();
        let model = MegatronModel::open(&fixture(name), Some(VOCABULARY)).unwrap().model().clone();
        for cut in LAYOUTS {
            let what = format!("{name} {cut:?}");
            assert_logits(&what, &run(&model, cut), &tokens, &logits, &|trainer| trainer.load(&imported.path));
        }
    }
}
