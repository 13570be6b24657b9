//! `megatron inspect`: its output for intact and damaged files.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use megatron::data::{IndexedWriter, TokenType};

use crate::reshard::{succeed, trained};
use crate::support::{megatron, pipe, stderr, stdout};

fn inspected(folder: &Path, args: &[&str]) -> String {
    stdout(&succeed(megatron().current_dir(folder).arg("inspect").args(args)))
}

fn refused(folder: &Path, args: &[&str]) -> String {
    let output = megatron().current_dir(folder).arg("inspect").args(args).output().unwrap();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{}", stdout(&output));
    stderr(&output)
}

#[test]
fn a_checkpoint_is_described_and_one_that_is_damaged_is_named() {
    let folder = trained(&["--tensor-model-parallel-size=2"]);
    let text = inspected(folder.path(), &["saved"]);
    for part in [
        "saved/iter_0000003",
        "iteration   3\n",
        "files       2 with",
        "attention",
        "exp_avg_sq  f32",
        "4 layers, hidden 16, 4 heads in 4 groups of width 4",
        "6 samples, 3 updates",
        "written by  tp 2 · pp 1 · dp 1",
        "fits        tp 1, 2, 4 · cp where tp · cp divides 4 · pp 1 to 4 · any dp",
        "whole       yes: every element is present once, and the checksums of all",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let file = folder.path().join("saved/iter_0000003/rank_00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).unwrap();
    assert!(
        inspected(folder.path(), &["saved", "--verify=false"])
            .contains("checksums were not checked")
    );
    let text = refused(folder.path(), &["saved"]);
    assert!(
        text.contains("rank_00001.safetensors: tensor") && text.contains("is damaged"),
        "{text}"
    );
    bytes.pop();
    fs::write(&file, &bytes).unwrap();
    let text = refused(folder.path(), &["saved", "--verify=false"]);
    assert!(text.contains("rank_00001.safetensors: is truncated"), "{text}");
}

#[test]
fn without_a_pointer_the_only_checkpoint_is_meant_and_of_several_the_iterations_are_named() {
    let folder = trained(&["--save-interval=1"]);
    let saved = folder.path().join("saved");
    fs::remove_file(saved.join("latest_checkpointed_iteration.txt")).unwrap();
    let text = refused(folder.path(), &["saved"]);
    assert!(text.contains("iterations 3, 2, 1; give the folder of one"), "{text}");
    assert!(inspected(folder.path(), &["saved", "--iteration=2"]).contains("iteration   2\n"));
    let output = megatron()
        .current_dir(folder.path())
        .args(["eval", "--load", "saved", "--data-path", "text.txt"])
        .output()
        .unwrap();
    assert!(stderr(&output).contains("iterations 3, 2, 1"), "{}", stderr(&output));
    for iteration in [1, 3] {
        fs::remove_dir_all(saved.join(format!("iter_000000{iteration}"))).unwrap();
    }
    fs::create_dir(saved.join("iter_0000009")).unwrap(); // not a checkpoint
    assert!(inspected(folder.path(), &["saved"]).contains("iteration   2\n"));
}

#[test]
fn a_dataset_is_described_with_its_largest_token() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = IndexedWriter::create(folder.path().join("data"), TokenType::U16).unwrap();
    for tokens in [&[5, 70, 3][..], &[9], &[], &[1, 2]] {
        writer.add_sequence(tokens).unwrap();
        writer.end_document();
    }
    writer.finish().unwrap();
    for path in ["data", "data.bin", "data.idx"] {
        let text = inspected(folder.path(), &[path]);
        for part in [
            "sequences   4\n",
            "documents   4\n",
            "tokens      6 (6)",
            "0 to 3 tokens per sequence, 1.5 on average, 1 empty",
            "stored as   u16, 12 B",
            "largest id  70: fits vocabularies of 71",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
    assert!(!inspected(folder.path(), &["data", "--verify=false"]).contains("largest id"));
    let bin = folder.path().join("data.bin");
    let bytes = fs::read(&bin).unwrap();
    fs::write(&bin, &bytes[..bytes.len() - 1]).unwrap();
    assert!(refused(folder.path(), &["data"]).contains("is truncated"));
}

/// A Hugging Face folder of two files with an index.
fn hugging_face() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &str, name: &str, shape: &[usize]| {
        let tensor = Tensor::zeros(shape, DType::BF16, &Device::Cpu).unwrap();
        candle_core::safetensors::save(&HashMap::from([(name, tensor)]), folder.path().join(file))
            .unwrap();
    };
    write("a.safetensors", "model.embed_tokens.weight", &[10, 4]);
    write("b.safetensors", "model.norm.weight", &[4]);
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4}"#;
    fs::write(folder.path().join("config.json"), config).unwrap();
    index(
        folder.path(),
        &[("model.embed_tokens.weight", "a.safetensors"), ("model.norm.weight", "b.safetensors")],
    );
    folder
}

fn index(folder: &Path, files: &[(&str, &str)]) {
    let map: HashMap<_, _> = files.iter().copied().collect();
    let json = serde_json::json!({ "metadata": { "total_size": 88 }, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), json.to_string()).unwrap();
}

#[test]
fn a_hugging_face_folder_is_described_from_its_headers() {
    let folder = hugging_face();
    let text = inspected(folder.path(), &["."]);
    for part in [
        "LlamaForCausalLM (llama)",
        "num_hidden_layers 1, hidden_size 4",
        "import      not possible: ",
        "tensors     2 with 44 parameters",
        "bf16  2 tensors, 88 B",
        "largest     model.embed_tokens.weight [10, 4]",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let text = inspected(folder.path(), &["b.safetensors"]);
    assert!(text.contains("bf16  1 tensors, 8 B"), "{text}");
    let known = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/families/qwen2");
    let text = inspected(folder.path(), &[known]);
    assert!(text.contains("import      possible, as Qwen2"), "{text}");
}

#[test]
fn a_hugging_face_folder_that_import_refuses_is_not_called_whole() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families");
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("model.safetensors");
    let put = |family: &str, change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        fs::copy(families.join(family).join("config.json"), folder.path().join("config.json"))
            .unwrap();
        let whole = families.join(family).join("model.safetensors");
        let mut all = candle_core::safetensors::load(whole, &Device::Cpu).unwrap();
        change(&mut all);
        candle_core::safetensors::save(&all, &weights).unwrap();
    };
    let inspect = |args: &[&str]| {
        let output = megatron()
            .current_dir(folder.path())
            .args(["inspect", "."])
            .args(args)
            .output()
            .unwrap();
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    put("llama2", &|all| drop(all.remove("model.norm.weight")));
    for args in [&[][..], &["--verify=false"]] {
        let (code, text) = inspect(args);
        assert_eq!(code, Some(1), "{text}");
        assert!(
            text.contains("import      not possible: ")
                && text.contains("model.norm.weight is missing"),
            "{text}"
        );
        assert!(
            text.contains("tensors     ") && text.contains("does not match the model"),
            "{text}"
        );
        assert!(!text.contains("whole"), "{text}");
    }
    // A matrix that should equal another; only the data show the difference.
    put("gpt2", &|all| {
        let other = all["transformer.wte.weight"].zeros_like().unwrap();
        all.insert("lm_head.weight".into(), other);
    });
    let (code, text) = inspect(&[]);
    assert!(code == Some(1) && text.contains("tie_word_embeddings"), "{text}");
    assert_eq!(inspect(&["--verify=false"]).0, Some(0));
}

#[test]
fn a_hugging_face_folder_with_files_that_cannot_be_read_is_not_called_whole() {
    let link = |path: &Path| std::os::unix::fs::symlink(path.file_name().unwrap(), path).unwrap();
    type Spoil<'a> = &'a dyn Fn(&Path);
    let cases: [(&str, Spoil<'_>); 4] = [
        ("config.json", &link),
        ("tokenizer.json", &pipe),
        ("tokenizer_config.json", &|path| fs::create_dir(path).unwrap()),
        ("tokenizer.model", &link),
    ];
    for (name, make) in cases {
        let folder = hugging_face();
        let path = folder.path().join(name);
        if path.exists() {
            fs::remove_file(&path).unwrap();
        }
        make(&path);
        for args in [&["."][..], &[".", "--verify=false"]] {
            let text = refused(folder.path(), args);
            assert!(text.contains(name) && !text.contains("whole"), "{name}: {text}");
        }
    }
}

#[test]
fn hostile_hugging_face_files_are_refused_by_name() {
    let (embedding, norm) = ("model.embed_tokens.weight", "model.norm.weight");
    for (files, why) in [
        (
            &[(embedding, "../a.safetensors"), (norm, "b.safetensors")][..],
            "not a file in its own folder",
        ),
        (&[(embedding, "/etc/passwd"), (norm, "b.safetensors")], "not a file in its own folder"),
        (&[(embedding, "b.safetensors"), (norm, "a.safetensors")], "which does not hold it"),
        (
            &[(embedding, "a.safetensors"), (norm, "a.safetensors")],
            "in a.safetensors, which does not hold it",
        ),
        (&[(embedding, "a.safetensors"), (norm, "c.safetensors")], "c.safetensors"),
    ] {
        let folder = hugging_face();
        index(folder.path(), files);
        let text = refused(folder.path(), &["."]);
        assert!(text.contains(why), "{files:?}: {text}");
    }
    for (at, bytes) in [(0, u64::MAX.to_le_bytes()), (0, 9u64.to_le_bytes()), (8, *b"[[[[[[[[")] {
        let folder = hugging_face();
        let file = folder.path().join("a.safetensors");
        let mut contents = fs::read(&file).unwrap();
        contents[at..at + 8].copy_from_slice(&bytes);
        fs::write(&file, contents).unwrap();
        let text = refused(folder.path(), &["."]);
        assert!(text.contains("a.safetensors: not a complete safetensors file"), "{text}");
    }
}

#[test]
fn a_path_that_is_nothing_known_says_what_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let text = refused(folder.path(), &["."]);
    assert!(
        text.contains("neither a checkpoint") && text.contains("nor a Hugging Face model"),
        "{text}"
    );
    assert!(refused(folder.path(), &["missing"]).contains("missing does not exist"));
}
