//! Loads Megatron-LM checkpoints, written by Megatron-Core under its layouts, on several layouts of
//! ours and compares the logits with Megatron's; tests refusals.
//!
//! Fixtures: `fixtures/make_megatron_core.py`.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use megatron::checkpoint::{self, Float};
use megatron::config::{ModelConfig, RunConfig};
use models::families::Family;
use models::hf::{ExportOptions, export};
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
    let expected =
        candle_core::safetensors::load(fixture(name).join("expected.safetensors"), &Device::Cpu)
            .unwrap();
    let tokens = expected["tokens"].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    (tokens, expected["logits"].flatten_all().unwrap().to_vec1().unwrap())
}

/// A run of `model`, with layout dp · tp · pp.
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
            assert_logits(&what, &run(&model, cut), &tokens, &logits, &|trainer| {
                trainer.load(&imported.path)
            });
        }
    }
}

#[test]
fn tensors_keep_their_dtype_and_a_vocabulary_its_unpadded_size() {
    let opened = |name, size| MegatronModel::open(&fixture(name), size).unwrap();
    assert!(opened("qwen2-bf16", None).parameters().all(|(.., dtype)| dtype == Float::Bf16));
    assert!(opened("llama-tp2-pp2", None).parameters().all(|(.., dtype)| dtype == Float::F32));
    let padded = opened("llama-tp2-pp2", None);
    assert_eq!(
        (padded.vocabulary(), padded.model().vocab_size),
        (Vocabulary::Padded(PADDED), PADDED)
    );
    assert_eq!(opened("gpt2-tp2", None).vocabulary(), Vocabulary::Recorded(VOCABULARY));
    let given = opened("llama-tp2-pp2", Some(VOCABULARY));
    assert_eq!(given.vocabulary(), Vocabulary::Given(VOCABULARY));
    let words = given.read(0).unwrap();
    assert_eq!(words.len(), VOCABULARY * 16 * 4);
    assert_eq!(words, padded.read(0).unwrap()[..words.len()]);
    assert!(opened("gpt2-tp2", None).has_optimizer() && !given.has_optimizer());
}

#[test]
fn an_imported_model_is_exported_to_hugging_face() {
    for (name, family) in [
        ("llama-tp2-pp2", Family::Llama),
        ("gpt2-tp2", Family::Gpt2),
        ("qwen2-bf16", Family::Qwen2),
    ] {
        let dir = tempfile::tempdir().unwrap();
        import(&fixture(name), &dir.path().join("imported"), None, |_, _| ()).unwrap();
        let options = ExportOptions { max_shard_size: u64::MAX, dtype: None };
        let exported =
            export(&dir.path().join("imported"), &dir.path().join("hf"), &options).unwrap();
        assert_eq!(exported.family, family);
    }
}

/// Copies the checkpoint of a fixture.
fn copied(name: &str, to: &Path) -> PathBuf {
    let (from, to) = (fixture(name).join("iter_0000005"), to.join("iter_0000005"));
    std::fs::create_dir_all(&to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    to
}

/// The result of opening a checkpoint and reading all of it.
fn read_all(folder: &Path) -> Result<Vec<Vec<u8>>, String> {
    let model = MegatronModel::open(folder, None).map_err(|e| e.to_string())?;
    (0..model.parameters().count()).map(|at| model.read(at).map_err(|e| e.to_string())).collect()
}

/// The error for a copy of a fixture that `damage` has changed.
fn refusal(name: &str, damage: impl FnOnce(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let folder = copied(name, dir.path());
    damage(&folder);
    read_all(&folder).err().unwrap_or_default()
}

/// Replaces every occurrence of `old` by `new`, which has the same length.
fn replace(path: &Path, old: &str, new: &str) {
    assert_eq!(old.len(), new.len());
    let mut bytes = std::fs::read(path).unwrap();
    let places: Vec<usize> =
        (0..bytes.len()).filter(|&at| bytes[at..].starts_with(old.as_bytes())).collect();
    assert!(!places.is_empty(), "{old}");
    places.iter().for_each(|&at| bytes[at..at + new.len()].copy_from_slice(new.as_bytes()));
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn files_that_are_missing_cut_off_or_damaged_are_named() {
    let gone = refusal("llama-tp2-pp2", |folder| {
        std::fs::remove_file(folder.join("__1_0.distcp")).unwrap()
    });
    assert!(gone.contains("__1_0.distcp") && gone.contains("cannot find"), "{gone}");
    let cut = refusal("llama-tp2-pp2", |folder| {
        let file = std::fs::File::options().write(true).open(folder.join("__2_0.distcp")).unwrap();
        file.set_len(20_000).unwrap();
    });
    assert!(
        cut.contains("__2_0.distcp") && cut.contains("20000 bytes") && cut.contains("truncated"),
        "{cut}"
    );
    for file in [".metadata", "common.pt"] {
        let gone = refusal("gpt2-tp2", |folder| std::fs::remove_file(folder.join(file)).unwrap());
        assert!(gone.contains(file), "{gone}");
        let empty = refusal("gpt2-tp2", |folder| std::fs::write(folder.join(file), "").unwrap());
        assert!(empty.contains(file), "{empty}");
    }
}

#[test]
fn no_flipped_bit_of_data_changes_a_weight_unnoticed() {
    let dir = tempfile::tempdir().unwrap();
    let folder = copied("gpt2-tp2", dir.path());
    let whole = read_all(&folder).unwrap();
    let path = folder.join("__1_0.distcp");
    let good = std::fs::read(&path).unwrap();
    let mut noticed = 0;
    for at in (0..good.len()).step_by(61) {
        let mut damaged = good.clone();
        damaged[at] ^= 1 << (at % 8);
        std::fs::write(&path, damaged).unwrap();
        match read_all(&folder) {
            Ok(read) => assert!(read == whole, "byte {at}"),
            Err(why) => {
                assert!(
                    why.contains("__1_0.distcp") && why.contains("its piece of"),
                    "byte {at}: {why}"
                );
                noticed += 1;
            }
        }
    }
    assert!(noticed > 100, "{noticed}");
}

#[test]
fn a_flipped_byte_of_metadata_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let folder = copied("llama-tp2-pp2", dir.path());
    let whole = read_all(&folder).unwrap();
    let path = folder.join(".metadata");
    let good = std::fs::read(&path).unwrap();
    let mut refused = 0;
    for (at, mask) in (0..good.len()).step_by(17).zip([0x01, 0x80, 0xff, 0x20].into_iter().cycle())
    {
        let mut damaged = good.clone();
        damaged[at] ^= mask;
        std::fs::write(&path, damaged).unwrap();
        match read_all(&folder) {
            Ok(read) => assert_eq!(
                read.iter().map(Vec::len).sum::<usize>(),
                whole.iter().map(Vec::len).sum::<usize>()
            ),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 300, "{refused}");
}

#[test]
fn tensors_that_are_missing_left_over_or_of_another_dtype_are_named() {
    let renamed = |old: &'static str, new: &'static str| {
        refusal("llama-tp2-pp2", |folder| replace(&folder.join(".metadata"), old, new))
    };
    let why = renamed("output_layer.weight", "output_layer.weighs");
    assert!(why.contains("output_layer.weight is missing"), "{why}");
    assert!(why.contains("output_layer.weighs belongs to no parameter"), "{why}");
    let why = renamed("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_weighs");
    assert!(why.contains("(for decoder.layers.0.pre_mlp_layernorm.weight)"), "{why}");
    let why = renamed("embedding.word_embeddings.weight", "embedding.word_embeddings.weighs");
    assert!(why.contains("embedding.word_embeddings.weight is missing"), "{why}");
    let why = renamed("float32", "float64");
    assert!(why.contains("dtype other than float32, bfloat16, float16"), "{why}");
    let why = renamed("__3_0.distcp", "../_0.distcp");
    assert!(why.contains("own folder"), "{why}");
    // Pieces with the dtype of another tensor.
    let why =
        refusal("qwen2-bf16", |folder| replace(&folder.join(".metadata"), "bfloat16", "float32."));
    assert!(why.contains("dtype"), "{why}");
}

/// Replaces the pickle in `common.pt`.
fn recommon(folder: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let path = folder.join("common.pt");
    let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
    let mut pickle = Vec::new();
    archive.by_name("common/data.pkl").unwrap().read_to_end(&mut pickle).unwrap();
    change(&mut pickle);
    let mut writer = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
    writer.start_file("common/data.pkl", zip::write::SimpleFileOptions::default()).unwrap();
    writer.write_all(&pickle).unwrap();
    writer.finish().unwrap();
}

#[test]
fn arguments_that_are_missing_or_not_available_or_of_another_model_are_refused() {
    let why = refusal("llama-tp2-pp2", |folder| {
        recommon(folder, |pickle| *pickle = b"\x80\x02}.".to_vec())
    });
    assert!(
        why.contains("common.pt") && why.contains("has no args") && why.contains("NeMo"),
        "{why}"
    );
    let why = refusal("llama-tp2-pp2", |folder| {
        recommon(folder, |pickle| {
            let at = pickle.windows(12).position(|part| part == b"qk_layernorm").unwrap();
            // After the name comes an opcode that remembers it, and then the value.
            let value = at + pickle[at..].iter().position(|&byte| byte == 0x89).unwrap();
            pickle[value] = 0x88;
        });
    });
    assert!(why.contains("qk_layernorm = True"), "{why}");
    let why = refusal("llama-tp2-pp2", |folder| {
        std::fs::copy(
            fixture("qwen2-bf16").join("iter_0000005/common.pt"),
            folder.join("common.pt"),
        )
        .unwrap();
    });
    assert!(why.contains("its args make it"), "{why}");
}

#[test]
fn other_formats_are_refused_with_what_to_do() {
    let other = |format: &str| {
        refusal("gpt2-tp2", |folder| {
            std::fs::write(
                folder.join("metadata.json"),
                format!(r#"{{"sharded_backend": "{format}"}}"#),
            )
            .unwrap();
        })
    };
    assert_eq!(other("torch_dist"), "");
    assert!(
        other("zarr").contains("format zarr")
            && other("zarr").contains("--ckpt-convert-format torch_dist")
    );
    let none =
        refusal("gpt2-tp2", |folder| std::fs::remove_file(folder.join("metadata.json")).unwrap());
    assert!(none.contains("torch_dcp") && none.contains("--ckpt-convert-format"), "{none}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("iter_0000100/mp_rank_00")).unwrap();
    let pointer = dir.path().join("latest_checkpointed_iteration.txt");
    std::fs::write(&pointer, "100").unwrap();
    let legacy = read_all(dir.path()).unwrap_err();
    assert!(legacy.contains("iter_0000100") && legacy.contains("model_optim_rng.pt"), "{legacy}");
    assert!(legacy.contains("--ckpt-convert-format torch_dist"), "{legacy}");
    std::fs::write(&pointer, "../elsewhere").unwrap();
    let lost = read_all(dir.path()).unwrap_err();
    assert!(lost.contains("neither an iteration nor `release`"), "{lost}");
    let mine = tempfile::tempdir().unwrap();
    import(&fixture("gpt2-tp2"), mine.path(), None, |_, _| ()).unwrap();
    assert!(read_all(mine.path()).unwrap_err().contains("checkpoint of this program"));
}

#[test]
fn an_import_that_fails_leaves_nothing_and_one_into_its_own_source_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = copied("gpt2-tp2", dir.path());
    let path = folder.join("__0_0.distcp");
    let good = std::fs::read(&path).unwrap();
    // In the data of the first file.
    let mut damaged = good.clone();
    let last = damaged.len() / 2;
    damaged[last] ^= 1;
    for byte in (last..last + 3000).step_by(50) {
        damaged[byte] ^= 1;
    }
    std::fs::write(&path, damaged).unwrap();
    let to = dir.path().join("to");
    import(&folder, &to, None, |_, _| ()).unwrap_err();
    assert_eq!(std::fs::read_dir(&to).map_or(0, Iterator::count), 0);
    std::fs::write(&path, good).unwrap();
    let into = import(&folder, &folder, None, |_, _| ()).unwrap_err().to_string();
    assert!(into.contains("Megatron-LM") && into.contains("give another"), "{into}");
}
