//! Compares models in Hugging Face folders, on several layouts, with the logits of transformers;
//! tests import and export.
//!
//! Fixtures: `fixtures/make_families.py`, `fixtures/make_oracle.py`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use megatron::checkpoint;
use megatron::config::RunConfig;
use megatron::train::Trainer;
use models::hf::{CONFIG, ExportOptions, HfConfig, HfModel, copy_sidecar_files, export, import};
use system_tests::logits::{LAYOUTS, assert_logits, logits};
use system_tests::{Style, Tokens, layout, on_ranks, sources, tiny, trainer};

const FAMILIES: [&str; 10] = [
    "gpt2",
    "gpt2-fp16",
    "llama2",
    "llama3-bf16",
    "llama-linear-biased",
    "mistral-sharded",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "bloom",
];
const WHOLE: ExportOptions = ExportOptions { max_shard_size: u64::MAX, dtype: None };

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn family(name: &str) -> PathBuf {
    fixtures().join("families").join(name)
}

/// A run of the model in `folder`, with layout dp · tp · pp.
fn run(folder: &Path, seq_length: usize, (dp, tp, pp): (usize, usize, usize)) -> RunConfig {
    let mut config = layout(tiny(Style::Gpt2, 0.0), dp, tp, pp);
    config.model = HfConfig::read(folder).unwrap().model;
    config.model.make_vocab_size_divisible_by = 8;
    config.model.seq_length = seq_length;
    (config.model.attention_dropout, config.model.hidden_dropout) = (0.0, 0.0);
    config
}

fn tensors(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

/// Checks the logits of the model in `folder` on every layout; `load` fills its weights.
fn gives(
    folder: &Path,
    tokens: &[u32],
    expected: &[f32],
    load: impl Fn(&mut Trainer) -> megatron::Result<()> + Sync,
) {
    for cut in LAYOUTS {
        assert_logits(
            &format!("{} {cut:?}", folder.display()),
            &run(folder, tokens.len(), cut),
            tokens,
            expected,
            &load,
        );
    }
}

fn expected(name: &str) -> (Vec<u32>, Vec<f32>) {
    let expected = tensors(&family(name).join("expected.safetensors"));
    let tokens = expected["tokens"].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    (tokens, expected["logits"].flatten_all().unwrap().to_vec1().unwrap())
}

/// The tensors in all files of a folder: dtype, shape and bytes.
fn contents(folder: &Path) -> HashMap<String, (String, Vec<usize>, Vec<u8>)> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut all = HashMap::new();
    for path in files.filter(|p| {
        p.to_string_lossy().ends_with(".safetensors") && !p.ends_with("expected.safetensors")
    }) {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in file.tensors() {
            let tensor =
                (format!("{:?}", view.dtype()), view.shape().to_vec(), view.data().to_vec());
            assert!(all.insert(name, tensor).is_none());
        }
    }
    all
}

#[test]
fn every_family_gives_the_logits_of_transformers_on_every_layout() {
    for name in FAMILIES {
        let (tokens, logits) = expected(name);
        let model = HfModel::open(&family(name)).unwrap();
        gives(&family(name), &tokens, &logits, |trainer| model.load_into(&trainer.stage().params));
    }
}

#[test]
fn the_oracle_models_give_the_logits_of_transformers_on_every_layout() {
    for name in ["gpt2-tiny", "llama-tiny"] {
        let folder = fixtures().join(name);
        let logits = tensors(&folder.join("logits.safetensors"))["logits"]
            .flatten_all()
            .unwrap()
            .to_vec1()
            .unwrap();
        let dataset =
            megatron::data::IndexedDataset::open(folder.join("data_text_document")).unwrap();
        let tokens = &dataset.read_sequence(0).unwrap()[..64];
        let model = HfModel::open(&folder).unwrap();
        gives(&folder, tokens, &logits, |trainer| model.load_into(&trainer.stage().params));
    }
}

#[test]
fn an_imported_checkpoint_loads_on_every_layout() {
    for name in ["gpt2-fp16", "mistral-sharded"] {
        let dir = tempfile::tempdir().unwrap();
        let imported = import(&family(name), dir.path(), |_, _| ()).unwrap();
        checkpoint::verify(&imported.path).unwrap();
        let (tokens, logits) = expected(name);
        gives(&family(name), &tokens, &logits, |trainer| trainer.load(&imported.path));
    }
}

#[test]
fn import_and_export_return_every_byte_of_every_tensor() {
    for name in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        import(&family(name), &dir.path().join("checkpoint"), |_, _| ()).unwrap();
        let original = contents(&family(name));
        for (out, max_shard_size) in [("whole", u64::MAX), ("shards", 20_000)] {
            let out = dir.path().join(out);
            let options = ExportOptions { max_shard_size, dtype: None };
            let exported = export(&dir.path().join("checkpoint"), &out, &options).unwrap();
            assert!(contents(&out) == original, "{name}: tensors differ");
            assert_eq!(exported.files > 1, max_shard_size < u64::MAX, "{name}");
            HfModel::open(&out).unwrap();
        }
    }
}

#[test]
fn a_model_trained_under_tp_pp_and_zero_exports_with_the_logits_it_has() {
    for name in ["gpt2", "llama-linear-biased", "mistral-window", "qwen2", "qwen2-window", "bloom"]
    {
        let dir = tempfile::tempdir().unwrap();
        let (tokens, before) = expected(name);
        let mut config = run(&family(name), tokens.len(), (2, 2, 2));
        config.parallel.zero_stage = 1;
        let data = sources(Tokens::synthetic(config.model.vocab_size as u32, tokens.len()));
        let model = HfModel::open(&family(name)).unwrap();
        let save = dir.path().join("checkpoint");
        let all = on_ranks(8, |world| {
            let mut trainer = trainer(&config, world, &data)?;
            model.load_into(&trainer.stage().params)?;
            for _ in 0..3 {
                trainer.step()?;
            }
            trainer.save(&save)?;
            logits(&trainer, &tokens)
        })
        .unwrap();
        let trained = all.into_iter().flatten().next().unwrap();
        assert!(
            trained.iter().zip(&before).any(|(a, b)| (a - b).abs() > 0.01),
            "{name} did not train"
        );
        // Once described by the model alone, and once by the configuration that it came with.
        for out in ["bare", "with-origin"] {
            let out = dir.path().join(out);
            export(&save, &out, &WHOLE).unwrap();
            let again = HfModel::open(&out).unwrap();
            gives(&out, &tokens, &trained, |trainer| again.load_into(&trainer.stage().params));
            copy_sidecar_files(&family(name), &save, true).unwrap();
        }
    }
}

#[test]
fn export_converts_to_the_dtype_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    import(&family("llama2"), &dir.path().join("checkpoint"), |_, _| ()).unwrap();
    let options = ExportOptions { dtype: Some(checkpoint::Float::Bf16), ..WHOLE };
    export(&dir.path().join("checkpoint"), &dir.path().join("hf"), &options).unwrap();
    let (ours, theirs) = (
        tensors(&dir.path().join("hf/model.safetensors")),
        tensors(&family("llama2").join("model.safetensors")),
    );
    for (name, theirs) in theirs {
        let rounded = theirs.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(ours[&name].dtype(), DType::BF16);
        let ours = ours[&name].to_dtype(DType::F32).unwrap();
        let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(values(&ours) == values(&rounded), "{name}: values differ");
    }
}

/// Copies the folder of a fixture.
fn copied(name: &str, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(family(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// Files of a folder and their contents.
fn files(folder: &Path) -> HashMap<PathBuf, Vec<u8>> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

#[test]
fn import_changes_no_file_that_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let (model, there) = (dir.path().join("model"), dir.path().join("there"));
    copied("llama2", &model);
    std::fs::write(model.join("tokenizer.json"), "the model's").unwrap();
    copied("qwen2", &there);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&model, &link).unwrap();
    for to in [&model, &link, &there] {
        let before = files(to);
        let why = import(&model, to, |_, _| ()).unwrap_err().to_string();
        assert!(
            why.contains("folder of a Hugging Face model") && why.contains("give another folder"),
            "{why}"
        );
        assert_eq!(files(to), before);
        assert!(!checkpoint::holds_any(to).unwrap());
    }
    // Not a model's folder, but one with its own tokenizer.
    for other in ["tokenizer.json", "hf_config.json"] {
        let to = dir.path().join(format!("with-{other}"));
        std::fs::create_dir(&to).unwrap();
        std::fs::write(to.join(other), "another").unwrap();
        let why = import(&model, &to, |_, _| ()).unwrap_err().to_string();
        assert!(why.contains(other) && why.contains("move this file away"), "{why}");
        let left: Vec<_> =
            std::fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(
            (left, std::fs::read(to.join(other)).unwrap()),
            (vec![other.into()], b"another".to_vec())
        );
    }
    // Nothing is copied from a folder to itself.
    let before = files(&model);
    std::fs::write(model.join("hf_config.json"), std::fs::read(model.join("config.json")).unwrap())
        .unwrap();
    copy_sidecar_files(&model, &link, true).unwrap();
    assert!(before.iter().all(|(path, bytes)| std::fs::read(path).unwrap() == *bytes));
    // An unfinished import may be repeated.
    let to = dir.path().join("new");
    copy_sidecar_files(&model, &to, true).unwrap();
    import(&model, &to, |_, _| ()).unwrap();
    assert_eq!(std::fs::read(to.join("tokenizer.json")).unwrap(), b"the model's");
}

#[test]
fn export_leaves_what_lies_beside_its_folder_alone() {
    let dir = tempfile::tempdir().unwrap();
    import(&family("llama2"), &dir.path().join("checkpoint"), |_, _| ()).unwrap();
    let mine = dir.path().join(".hf.tmp");
    std::fs::create_dir(&mine).unwrap();
    std::fs::write(mine.join("notes"), "mine").unwrap();
    export(&dir.path().join("checkpoint"), &dir.path().join("hf"), &WHOLE).unwrap();
    assert_eq!(std::fs::read(mine.join("notes")).unwrap(), b"mine");
    let mut names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".hf.tmp", "checkpoint", "hf"]);
}

#[test]
fn export_removes_what_a_killed_one_left_and_nothing_that_is_written() {
    let dir = tempfile::tempdir().unwrap();
    import(&family("llama2"), &dir.path().join("checkpoint"), |_, _| ()).unwrap();
    let kept = [".hf.1.tmp", ".hf.x.0.tmp", ".hf2.1.0.tmp", ".hf.12.0.tmp.mine", ".hf.98.0.tmp"];
    for folder in kept.into_iter().chain([".hf.99.0.tmp", ".hf.99.1.tmp"]) {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        std::fs::write(dir.path().join(folder).join("model.safetensors"), "half").unwrap();
    }
    let written = std::fs::File::open(dir.path().join(".hf.98.0.tmp")).unwrap();
    written.try_lock().unwrap();
    export(&dir.path().join("checkpoint"), &dir.path().join("hf"), &WHOLE).unwrap();
    let entries = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        entries.filter(|name| !["hf", "checkpoint"].contains(&name.as_str())).collect();
    names.sort();
    let mut kept = kept.to_vec();
    kept.sort();
    assert_eq!(names, kept);
}

#[test]
fn a_context_that_was_extended_is_exported_and_the_rest_of_the_config_is_what_it_was() {
    for (name, key) in [("llama3-bf16", "max_position_embeddings"), ("bloom", "seq_length")] {
        let dir = tempfile::tempdir().unwrap();
        let save = dir.path().join("checkpoint");
        copy_sidecar_files(&family(name), &save, true).unwrap();
        let read = |folder: &Path| HfConfig::read(folder).unwrap();
        let original = read(&family(name));
        for (extended, out) in [(false, "short"), (true, "long")] {
            let mut config = run(&family(name), 16, (1, 1, 1));
            let length = config.model.max_position_embeddings * if extended { 2 } else { 1 };
            // Trained on sequences that are shorter or longer than the model's context.
            config.model.max_position_embeddings = if extended { length } else { 16 };
            let data = sources(Tokens::synthetic(config.model.vocab_size as u32, 16));
            on_ranks(1, |world| trainer(&config, world, &data)?.save(&save)).unwrap();
            export(&save, &dir.path().join(out), &WHOLE).unwrap();
            let exported = read(&dir.path().join(out));
            assert_eq!(exported.model.max_position_embeddings, length, "{name}");
            let rest = |config: &HfConfig| {
                let mut json = config.json.clone();
                ["torch_dtype", "dtype", key].into_iter().for_each(|key| drop(json.remove(key)));
                json
            };
            assert_eq!(rest(&exported), rest(&original), "{name}");
        }
    }
}

/// The error on opening a copy of a fixture whose tensors `change` has changed.
fn refusal(name: &str, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(family(name).join("config.json"), dir.path().join("config.json")).unwrap();
    let mut all = tensors(&family(name).join("model.safetensors"));
    change(&mut all);
    candle_core::safetensors::save(&all, dir.path().join("model.safetensors")).unwrap();
    HfModel::open(dir.path()).err().map(|error| error.to_string())
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn tensors_that_are_missing_left_over_or_of_another_shape_are_named() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let why = refusal("llama2", |all| drop(all.remove(name))).unwrap();
    assert!(why.contains(name) && why.contains("missing"), "{why}");
    let why = refusal("llama2", |all| {
        drop(all.insert("model.layers.2.mlp.up_proj.weight".into(), zeros(&[48, 32])))
    })
    .unwrap();
    assert!(why.contains("model.layers.2.mlp.up_proj.weight belongs to no parameter"), "{why}");
    let why = refusal("llama2", |all| drop(all.insert(name.into(), zeros(&[32, 48])))).unwrap();
    assert!(why.contains("[32, 48]") && why.contains("[48, 32]"), "{why}");
    let why = refusal("llama2", |all| drop(all.remove("lm_head.weight"))).unwrap();
    assert!(why.contains("lm_head.weight"), "{why}");
    let half = zeros(&[48, 32]).to_dtype(DType::F16).unwrap();
    let why = refusal("llama2", |all| drop(all.insert(name.into(), half))).unwrap();
    assert!(why.contains(name) && why.contains("dtypes"), "{why}");
    let why = refusal("llama2", |all| {
        drop(all.insert(name.into(), zeros(&[48, 32]).to_dtype(DType::U8).unwrap()))
    })
    .unwrap();
    assert!(why.contains(name) && why.contains("dtype"), "{why}");
}

#[test]
fn models_that_are_too_large_for_their_files_are_refused_before_they_are_made() {
    let dir = tempfile::tempdir().unwrap();
    copied("bloom", dir.path());
    let path = dir.path().join("config.json");
    let original: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // The MLP, four times as wide, is also a size.
    let most = i32::MAX / 4;
    for (changes, why) in [
        (&[("n_layer", 65536)][..], "65536 layers, but at most"),
        (&[("n_head", most), ("hidden_size", most)], "a tensor dimension of "),
        (&[("vocab_size", 1000)], "config.json makes it [1000, 32]"),
    ] {
        let mut config = original.clone();
        changes.iter().for_each(|&(key, value)| config[key] = value.into());
        std::fs::write(&path, config.to_string()).unwrap();
        let message =
            HfModel::open(dir.path()).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message.contains(why), "{changes:?}: {message}");
    }
}

#[test]
fn one_file_is_taken_before_an_index_as_transformers_does() {
    let dir = tempfile::tempdir().unwrap();
    copied("llama2", dir.path());
    std::fs::write(
        dir.path().join("model.safetensors.index.json"),
        r#"{"weight_map": {"a": "gone.safetensors"}}"#,
    )
    .unwrap();
    HfModel::open(dir.path()).unwrap();
}

#[test]
fn masks_and_a_repeated_tied_matrix_are_ignored_and_another_matrix_is_not() {
    assert_eq!(
        refusal("gpt2", |all| drop(
            all.insert("transformer.h.0.attn.bias".into(), zeros(&[1, 1, 4, 4]))
        )),
        None
    );
    let words = "transformer.wte.weight";
    assert_eq!(
        refusal("gpt2", |all| drop(all.insert("lm_head.weight".into(), all[words].clone()))),
        None
    );
    let why = refusal("gpt2", |all| drop(all.insert("lm_head.weight".into(), zeros(&[101, 32]))))
        .unwrap();
    assert!(why.contains("lm_head.weight") && why.contains("tie_word_embeddings"), "{why}");
}

#[test]
fn files_of_a_bare_model_have_names_without_prefix() {
    let stripped = |all: &mut HashMap<String, Tensor>| {
        *all = all
            .drain()
            .map(|(name, t)| (name.trim_start_matches("transformer.").to_string(), t))
            .collect();
    };
    assert_eq!(refusal("bloom", stripped), None);
    assert_eq!(refusal("gpt2", stripped), None);
}

#[test]
fn an_index_that_leaves_its_folder_or_lies_is_refused() {
    let copy = |change: &dyn Fn(&str) -> String| {
        let dir = tempfile::tempdir().unwrap();
        copied("mistral-sharded", dir.path());
        let index = dir.path().join("model.safetensors.index.json");
        let text = std::fs::read_to_string(&index).unwrap();
        std::fs::write(&index, change(&text)).unwrap();
        HfModel::open(dir.path()).err().map(|error| error.to_string())
    };
    assert_eq!(copy(&|text| text.to_string()), None);
    let outside =
        copy(&|text| text.replacen("model-00005-of-00005", "../model-00005-of-00005", 1)).unwrap();
    assert!(outside.contains("own folder"), "{outside}");
    let moved =
        copy(&|text| text.replacen("model-00005-of-00005", "model-00004-of-00005", 1)).unwrap();
    assert!(moved.contains("lm_head.weight"), "{moved}");
    assert!(copy(&|_| "{".into()).unwrap().contains("is not an index"));
}

#[test]
fn a_vocabulary_of_another_size_keeps_its_rows_and_new_ones_are_the_same_on_every_layout() {
    for name in ["gpt2", "llama2", "qwen2"] {
        let tokens = expected(name).0;
        let theirs = HfConfig::read(&family(name)).unwrap().model;
        let (theirs, init_std) = (theirs.vocab_size, theirs.init_method_std as f32);
        let model = HfModel::open(&family(name)).unwrap();
        for vocab_size in [theirs + 37, theirs - 3] {
            let mut states = Vec::new();
            for cut in LAYOUTS {
                let dir = tempfile::tempdir().unwrap();
                let mut config = run(&family(name), tokens.len(), cut);
                config.model.vocab_size = vocab_size;
                let data = sources(Tokens::synthetic(vocab_size.min(theirs) as u32, tokens.len()));
                let ranks = cut.0 * cut.1 * cut.2;
                on_ranks(ranks, |world| {
                    let trainer = trainer(&config, world, &data)?;
                    assert!(
                        model.load_into(&trainer.stage().params).is_err() || cut.2 > 1,
                        "{name}: not asked for"
                    );
                    model.load_resized_into(&trainer.stage().params, config.training.seed)?;
                    trainer.save(&dir.path().join("checkpoint"))
                })
                .unwrap();
                copy_sidecar_files(&family(name), &dir.path().join("checkpoint"), true).unwrap();
                export(&dir.path().join("checkpoint"), &dir.path().join("hf"), &WHOLE).unwrap();
                let exported = HfConfig::read(&dir.path().join("hf")).unwrap();
                assert_eq!(exported.model.vocab_size, vocab_size);
                // The rest of the configuration stays unchanged.
                assert_eq!(
                    exported.json.get("bos_token_id"),
                    HfConfig::read(&family(name)).unwrap().json.get("bos_token_id")
                );
                states.push(contents(&dir.path().join("hf")));
            }
            assert!(states.iter().all(|state| *state == states[0]), "{name}: layouts differ");
            let before = contents(&family(name));
            for (tensor, (_, shape, bytes)) in &states[0] {
                let (_, old_shape, old) = &before[tensor];
                let same = bytes.len().min(old.len());
                assert!(bytes[..same] == old[..same], "{name}: {tensor} changed");
                assert!(
                    shape == old_shape || shape[0] == vocab_size && old_shape[0] == theirs,
                    "{name}: {tensor}"
                );
                let most = 8.0 * init_std;
                let drawn = bytes[same..]
                    .chunks(4)
                    .map(|b| f32::from_le_bytes(b.try_into().unwrap()).abs());
                assert!(
                    drawn.clone().all(|x| x < most)
                        && (same == bytes.len() || drawn.sum::<f32>() > 0.0),
                    "{name}: {tensor}"
                );
            }
        }
    }
}

#[test]
fn another_base_and_another_context_are_in_the_exported_config_and_the_rest_is_what_it_was() {
    let dir = tempfile::tempdir().unwrap();
    copied("llama3-bf16", &dir.path().join("model"));
    let model = dir.path().join("model");
    let text = std::fs::read_to_string(model.join(CONFIG)).unwrap();
    let original: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
    for rope in
        [serde_json::json!({}), serde_json::json!({"rope_type": "default", "rope_theta": 5e5})]
    {
        let mut json = original.clone();
        json.remove("rope_scaling");
        json.insert("rope_parameters".into(), rope.clone());
        std::fs::write(model.join(CONFIG), serde_json::Value::from(json).to_string()).unwrap();
        let save = tempfile::tempdir().unwrap();
        let mut config = run(&model, 16, (1, 1, 1));
        config.model.rotary_base = 2.5e6;
        let data = sources(Tokens::synthetic(config.model.vocab_size as u32, 16));
        on_ranks(1, |world| trainer(&config, world, &data)?.save(save.path())).unwrap();
        copy_sidecar_files(&model, save.path(), true).unwrap();
        let out = save.path().join("out");
        export(save.path(), &out, &WHOLE).unwrap();
        let exported = HfConfig::read(&out).unwrap();
        assert_eq!(exported.model.rotary_base, 2.5e6, "{rope}");
        assert_eq!(exported.json.get("eos_token_id"), original.get("eos_token_id"));
    }
}

#[test]
fn weights_that_are_no_numbers_are_refused_by_name() {
    for (value, what) in
        [(f32::NAN, "NaN"), (f32::INFINITY, "infinity"), (f32::NEG_INFINITY, "infinity")]
    {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let dir = tempfile::tempdir().unwrap();
            copied("llama2", &dir.path().join("model"));
            let name = "model.layers.1.mlp.up_proj.weight";
            let mut all = tensors(&dir.path().join("model/model.safetensors"));
            all.values_mut().for_each(|tensor| *tensor = tensor.to_dtype(dtype).unwrap());
            let mut values = vec![0.5f32; all[name].elem_count()];
            *values.last_mut().unwrap() = value;
            let shape = all[name].shape().clone();
            let broken =
                Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            all.insert(name.into(), broken);
            candle_core::safetensors::save(&all, dir.path().join("model/model.safetensors"))
                .unwrap();
            let to = dir.path().join("to");
            let why = import(&dir.path().join("model"), &to, |_, _| ()).unwrap_err().to_string();
            assert!(why.contains(name) && why.contains(what), "{why}");
            assert!(!checkpoint::holds_any(&to).unwrap());
            let config = run(&dir.path().join("model"), 16, (1, 1, 1));
            let data = sources(Tokens::synthetic(config.model.vocab_size as u32, 16));
            let model = HfModel::open(&dir.path().join("model")).unwrap();
            let loaded = on_ranks(1, |world| {
                model.load_into(&trainer(&config, world, &data)?.stage().params)
            });
            assert!(loaded.unwrap_err().to_string().contains(name));
        }
    }
}
