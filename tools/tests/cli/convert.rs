//! Hugging Face models through the command line: imported, trained with PyTorch's results, and
//! exported.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use serde_json::Value;

use crate::support::{megatron, stderr, stdout};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// The run of `expected.json` with the layout `more`; its folder holds `metrics.jsonl` and `saved`.
fn pretrain(folder: &Path, name: &str, more: &[&str]) -> std::process::Output {
    pretrain_from(&fixtures().join(name), folder, name, more)
}

/// As [`pretrain`], with the model in `model`.
fn pretrain_from(model: &Path, folder: &Path, name: &str, more: &[&str]) -> std::process::Output {
    let fixture = fixtures().join(name);
    let mut command = megatron();
    command.current_dir(folder).arg("pretrain");
    command.arg("--data-path").arg(fixture.join("data_text_document"));
    command.arg("--init-from-hf").arg(model);
    command.args(
        "--seq-length 64 --split 1,0,0 --dataloader-type sequential --train-iters 20".split(' '),
    );
    command.args(
        "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant".split(' '),
    );
    command.args(
        "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0"
            .split(' '),
    );
    command.args("--eval-iters 0 --metrics metrics.jsonl --save saved".split(' ')).args(more);
    command.output().unwrap()
}

#[test]
fn a_run_from_hugging_face_weights_does_not_tell_of_initial_ones() {
    let dir = tempfile::tempdir().unwrap();
    let output = pretrain(dir.path(), "llama-tiny", &["--load=saved", "--train-iters=1"]);
    let log = stdout(&output);
    assert!(output.status.success(), "{log}{}", stderr(&output));
    assert!(log.contains("no checkpoint in saved: starting from the weights in "), "{log}");
    assert!(!log.contains("initial weights"), "{log}");
}

fn follows_pytorch(name: &str, layout: &str) {
    let dir = tempfile::tempdir().unwrap();
    let output = pretrain(dir.path(), name, &layout.split(' ').collect::<Vec<_>>());
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = std::fs::read(fixtures().join(name).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let metrics = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let mut ours: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let end = ours.pop().unwrap();
    let ranks = end["peak_memory"].as_array().unwrap();
    assert!(!ranks.is_empty() && ranks.iter().all(|bytes| bytes.as_u64() > Some(1 << 20)), "{end}");
    let steps = expected["steps"].as_array().unwrap();
    assert_eq!(ours.len(), steps.len());
    for (ours, theirs) in ours.iter().zip(steps) {
        for key in ["lm_loss", "grad_norm"] {
            let (a, b) = (ours[key].as_f64().unwrap(), theirs[key].as_f64().unwrap());
            assert!(
                ((a - b) / b).abs() < 1e-4,
                "{name} step {}: {key} {a} here, {b} there",
                theirs["iteration"]
            );
        }
    }
    let output =
        megatron().current_dir(dir.path()).args(["export", "saved", "hf"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let load = |path: PathBuf| candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let ours = load(dir.path().join("hf/model.safetensors"));
    let theirs = load(fixtures().join(name).join("final/model.safetensors"));
    assert_eq!(ours.len(), theirs.len());
    for (tensor, theirs) in theirs {
        let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let pairs = values(&ours[&tensor]).into_iter().zip(values(&theirs));
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst < 2e-4, "{name}: {tensor} differs by {worst}");
    }
}

#[test]
fn twenty_steps_from_a_hugging_face_model_follow_pytorch_and_end_at_its_weights() {
    follows_pytorch("gpt2-tiny", "--data-parallel-size 1 --attention-dropout 0");
    follows_pytorch(
        "llama-tiny",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    );
}

#[test]
fn settings_that_contradict_the_model_are_refused_and_others_may_repeat_it() {
    let dir = tempfile::tempdir().unwrap();
    let output = pretrain(
        dir.path(),
        "llama-tiny",
        &["--num-layers", "6", "--hidden-size", "64", "--swiglu=false"],
    );
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    for part in ["num_layers", "--num-layers", "but it has 4", "swiglu", "config.json"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(!message.contains("hidden_size"), "{message}");
}

#[test]
fn weights_beyond_fp16_are_not_exported_as_infinities() {
    let dir = tempfile::tempdir().unwrap();
    let (fixture, name) = (fixtures().join("llama-tiny"), "model.norm.weight");
    std::fs::create_dir(dir.path().join("hf")).unwrap();
    std::fs::copy(fixture.join("config.json"), dir.path().join("hf/config.json")).unwrap();
    let mut tensors =
        candle_core::safetensors::load(fixture.join("model.safetensors"), &Device::Cpu).unwrap();
    tensors.insert(name.into(), (&tensors[name] * 1e6).unwrap());
    candle_core::safetensors::save(&tensors, dir.path().join("hf/model.safetensors")).unwrap();
    let run = |words: &[&str]| megatron().current_dir(dir.path()).args(words).output().unwrap();
    assert!(run(&["import", "hf", "checkpoint"]).status.success());
    let output = run(&["export", "checkpoint", "out", "--dtype", "fp16"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!([name, "65504", "bf16"].iter().all(|part| message.contains(part)), "{message}");
    assert!(!dir.path().join("out").exists());
    // Export to a link to an empty folder.
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    std::os::unix::fs::symlink("empty", dir.path().join("out")).unwrap();
    assert!(run(&["export", "checkpoint", "out", "--dtype", "bf16"]).status.success());
    assert!(dir.path().join("out").is_symlink() && dir.path().join("empty/config.json").is_file());
}

#[test]
fn a_models_folder_is_no_place_for_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let (fixture, folder) = (fixtures().join("llama-tiny"), dir.path().join("saved"));
    std::fs::create_dir(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(file), folder.join(file)).unwrap();
    }
    let import =
        megatron().current_dir(dir.path()).args(["import", "saved", "saved"]).output().unwrap();
    let train = pretrain(dir.path(), "llama-tiny", &[]);
    for output in [import, train] {
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(
            message.contains("folder of a Hugging Face model") && message.contains("give another"),
            "{message}"
        );
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
    let same = |file: &str| {
        std::fs::read(folder.join(file)).unwrap() == std::fs::read(fixture.join(file)).unwrap()
    };
    assert!(same("config.json") && same("model.safetensors"));
}

/// A tokenizer of three words.
const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
  "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}}"#;

#[test]
fn a_run_replaces_no_file_of_another_model_and_brings_none_of_another_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let (model, saved) = (dir.path().join("model"), dir.path().join("saved"));
    std::fs::create_dir(&model).unwrap();
    std::fs::create_dir(&saved).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("llama-tiny").join(file), model.join(file)).unwrap();
    }
    for (file, text) in [
        ("tokenizer.json", WORDS),
        ("chat_template.jinja", "hello"),
        ("generation_config.json", "{}"),
    ] {
        std::fs::write(model.join(file), text).unwrap();
    }
    let train = |more: &[&str]| pretrain_from(&model, dir.path(), "llama-tiny", more);
    let names = || {
        let entries = std::fs::read_dir(&saved)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.filter(|name| !name.contains("iter")).collect();
        names.sort();
        names
    };
    for (file, more) in [
        ("tokenizer.json", &["--exit-interval=1"][..]),
        ("chat_template.jinja", &["--exit-interval=1"]),
        ("generation_config.json", &["--exit-interval=1", "--tokenizer=byte"]),
        ("hf_config.json", &["--exit-interval=1", "--tokenizer=byte"]),
    ] {
        std::fs::write(saved.join(file), "mine").unwrap();
        let output = train(more);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(
            message.contains(&format!("saved/{file}")) && message.contains("away"),
            "{message}"
        );
        assert_eq!(
            (names(), std::fs::read(saved.join(file)).unwrap()),
            (vec![file.to_string()], b"mine".to_vec())
        );
        std::fs::remove_file(saved.join(file)).unwrap();
    }
    let output = train(&["--exit-interval=1", "--tokenizer=byte"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(names(), ["generation_config.json", "hf_config.json"]);
    // Files beside the run's checkpoints belong to the run.
    std::fs::write(saved.join("generation_config.json"), "mine").unwrap();
    let output = train(&["--load=saved", "--exit-interval=2"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(std::fs::read(saved.join("generation_config.json")).unwrap(), b"mine");
    assert_eq!(
        names(),
        ["chat_template.jinja", "generation_config.json", "hf_config.json", "tokenizer.json"]
    );
}

#[test]
fn import_and_export_go_there_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| megatron().current_dir(dir.path()).args(words).output().unwrap();
    let fixture = fixtures().join("families/mistral-sharded");
    let output = run(&["import", &fixture.display().to_string(), "checkpoint"]);
    assert!(output.status.success() && stdout(&output).contains("mistral"), "{}", stderr(&output));
    let output =
        run(&["export", "checkpoint", "hf", "--max-shard-size", "20KB", "--dtype", "bf16"]);
    assert!(output.status.success() && stdout(&output).contains("files"), "{}", stderr(&output));
    for file in ["config.json", "generation_config.json", "model.safetensors.index.json"] {
        assert!(dir.path().join("hf").join(file).is_file(), "{file}");
    }
    let again = run(&["export", "checkpoint", "hf"]);
    assert!(!again.status.success() && stderr(&again).contains("not empty"), "{}", stderr(&again));
    let missing = run(&["import", "nowhere", "other"]);
    assert!(
        !missing.status.success() && stderr(&missing).contains("nowhere"),
        "{}",
        stderr(&missing)
    );
}

#[test]
fn training_goes_on_from_a_checkpoint_of_megatron_lm_with_megatrons_loss() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = fixtures().join("megatron-core/gpt2-tp2");
    let expected =
        candle_core::safetensors::load(fixture.join("expected.safetensors"), &Device::Cpu).unwrap();
    let tokens: Vec<i64> = expected["tokens"].to_vec1().unwrap();
    let logits: Vec<Vec<f32>> = expected["logits"].to_vec2().unwrap();
    let vocabulary = logits[0].len();
    // A text with the tokens of Megatron's logits.
    let words: serde_json::Map<_, _> =
        (0..vocabulary).map(|word| (format!("w{word}"), word.into())).collect();
    let mut tokenizer: Value = serde_json::from_str(WORDS).unwrap();
    (tokenizer["model"]["vocab"], tokenizer["model"]["unk_token"]) = (words.into(), "w0".into());
    std::fs::write(dir.path().join("words.json"), tokenizer.to_string()).unwrap();
    let text: Vec<String> = tokens.iter().map(|token| format!("w{token}")).collect();
    std::fs::write(dir.path().join("text.txt"), format!("{} ", text.join(" ")).repeat(20)).unwrap();

    let run = |words: &[&str]| megatron().current_dir(dir.path()).args(words).output().unwrap();
    let output = run(&["import", &fixture.display().to_string(), "imported"]);
    let message = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for part in [
        "Megatron-LM model of iteration 5",
        "imported/iter_0000000",
        "101 tokens, as the checkpoint records",
        "optimizer",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let flags = "pretrain --load imported --save saved --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 \
                 --num-attention-heads 4 --seq-length 11 --max-position-embeddings 12 --attention-dropout 0 \
                 --hidden-dropout 0 --data-path text.txt --tokenizer words.json --split 1,0,0 --dataloader-type sequential \
                 --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --lr 1e-4 --eval-iters 0 --metrics metrics.jsonl";
    let output = run(&flags.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", stderr(&output));
    let metrics = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let first: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    let losses = logits.iter().zip(&tokens[1..]).map(|(row, &next)| {
        let total: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        total.ln() - f64::from(row[next as usize])
    });
    let theirs = losses.sum::<f64>() / (tokens.len() - 1) as f64;
    let ours = first["lm_loss"].as_f64().unwrap();
    assert!((ours - theirs).abs() < 1e-5, "{ours} here, {theirs} by Megatron's logits");
}

#[test]
fn a_folder_that_is_no_model_is_told_what_was_looked_for_and_a_vocabulary_is_megatrons_alone() {
    let dir = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| megatron().current_dir(dir.path()).args(words).output().unwrap();
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    let output = run(&["import", "empty", "to"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    for part in ["empty", "config.json", "latest_checkpointed_iteration.txt", ".metadata"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let model = fixtures().join("llama-tiny").display().to_string();
    let output = run(&["import", &model, "to", "--vocab-size", "400"]);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("--vocab-size is for"),
        "{}",
        stderr(&output)
    );
    let checkpoint = fixtures().join("megatron-core/llama-tp2-pp2").display().to_string();
    let output = run(&["import", &checkpoint, "to", "--vocab-size", "105"]);
    assert!(
        output.status.code() == Some(1) && stderr(&output).contains("104 rows"),
        "{}",
        stderr(&output)
    );
    assert!(!dir.path().join("to").exists());
    let output = run(&["import", &checkpoint, "to"]);
    assert!(
        stdout(&output).contains("all 104 rows") && stdout(&output).contains("--vocab-size"),
        "{}",
        stdout(&output)
    );
    let output = run(&["import", &checkpoint, "told", "--vocab-size", "101"]);
    assert!(stdout(&output).contains("101 tokens (--vocab-size)"), "{}", stdout(&output));
}

/// A copy of a fixture.
fn copied(name: &str, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join(name).join(file), to.join(file)).unwrap();
    }
}

#[test]
fn a_hugging_face_model_begins_with_another_vocabulary_base_and_context() {
    let dir = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| megatron().current_dir(dir.path()).args(words).output().unwrap();
    let overrides = [
        "--vocab-size=600",
        "--rotary-base=500000",
        "--max-position-embeddings=4096",
        "--exit-interval=1",
    ];
    let output = pretrain(dir.path(), "llama-tiny", &overrides);
    assert!(output.status.success(), "{}", stderr(&output));
    let said = stdout(&output) + &stderr(&output);
    assert!(
        said.contains("vocabulary 600") && said.contains("up to 600 start with random weights"),
        "{said}"
    );
    assert!(run(&["export", "saved", "hf"]).status.success());
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("hf/config.json")).unwrap()).unwrap();
    let shown = [&config["vocab_size"], &config["rope_theta"], &config["max_position_embeddings"]]
        .map(Value::to_string);
    assert_eq!(shown, ["600", "500000.0", "4096"]);
    // The same command line resumes.
    let more = [&overrides[..3], &["--load=saved", "--exit-interval=2"]].concat();
    let output = pretrain(dir.path(), "llama-tiny", &more);
    assert!(
        output.status.success() && !stdout(&output).contains("random weights"),
        "{}",
        stderr(&output)
    );
    // Notes on settings without effect list only given settings.
    let output = pretrain(dir.path(), "gpt2-tiny", &["--train-iters=1", "--save=other"]);
    assert!(
        output.status.success() && !stdout(&output).contains("no effect"),
        "{}",
        stdout(&output)
    );
    for (name, flags, why) in [
        ("gpt2-tiny", &["--max-position-embeddings=4096"][..], "has learned"),
        ("gpt2-tiny", &["--rotary-base=500000"], "rotary_base"),
        ("llama-tiny", &["--vocab-size=100", "--tokenizer=byte"], "257 tokens"),
    ] {
        let output = pretrain(dir.path(), name, flags);
        let message = stderr(&output);
        assert!(!output.status.success() && message.contains(why), "{why}: {message}");
    }
}

#[test]
fn what_is_given_in_a_models_place_is_named_with_the_command_that_helps() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let file = |name: &str, text: &str| {
        std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        std::fs::write(at(name), text).unwrap();
    };
    copied("llama-tiny", &at("hf"));
    let run =
        |words: &str| megatron().current_dir(dir.path()).args(words.split(' ')).output().unwrap();
    assert!(run("import hf ours").status.success());
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 548105171\n";
    copied("llama-tiny", &at("lfs"));
    file("lfs/model.safetensors", pointer);
    copied("llama-tiny", &at("lfs-config"));
    file("lfs-config/config.json", pointer);
    file("lfs-tokenizer/tokenizer.json", pointer);
    copied("llama-tiny", &at("pickle"));
    std::fs::rename(at("pickle/model.safetensors"), at("pickle/pytorch_model.bin")).unwrap();
    file("deepspeed/latest", "global_step5");
    file("deepspeed/zero_to_fp32.py", "");
    file("deepspeed/global_step5/mp_rank_00_model_states.pt", "");
    file("adapter/adapter_config.json", "{}");
    file("adapter/adapter_model.safetensors", "");
    file("text.txt", &"text ".repeat(2000));
    let fixture = fixtures().join("megatron-core/gpt2-tp2").display().to_string();
    let train = "pretrain --seq-length 64 --tokenizer byte --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 \
                 --data-path text.txt --cache-dir cache --eval-iters 0";
    let sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1";
    for (words, parts) in [
        ("import gpt2 new", &["gpt2 does not exist", "hf download gpt2 --local-dir"][..]),
        ("import Qwen/Qwen2-0.5B new", &["hf download Qwen/Qwen2-0.5B"]),
        (&format!("{train} --init-from-hf gpt2"), &["hf download gpt2"]),
        ("generate --load gpt2 --prompt a", &["hf download gpt2"]),
        ("import lfs new", &["model.safetensors", "git lfs pull"]),
        ("import lfs-config new", &["config.json", "git lfs pull"]),
        (
            "generate --load ours --prompt a --tokenizer lfs-tokenizer",
            &["tokenizer.json", "git lfs pull"],
        ),
        ("import pickle new", &["pytorch_model.bin", "save_pretrained"]),
        (&format!("{train} --init-from-hf pickle"), &["pytorch_model.bin", "save_pretrained"]),
        ("import deepspeed new", &["DeepSpeed", "zero_to_fp32.py"]),
        (&format!("{train} --init-from-hf deepspeed"), &["DeepSpeed", "zero_to_fp32.py"]),
        (&format!("{train} {sizes} --load deepspeed"), &["DeepSpeed", "zero_to_fp32.py"]),
        ("export deepspeed new", &["DeepSpeed", "zero_to_fp32.py"]),
        ("import adapter new", &["LoRA", "merge_and_unload"]),
        ("import ours new", &["is a checkpoint of this program", "--load"]),
        (&format!("{train} --init-from-hf ours"), &["is a checkpoint of this program", "--load"]),
        (&format!("{train} {sizes} --load {fixture}"), &["Megatron-LM", "megatron import"]),
        (&format!("{train} --init-from-hf {fixture}"), &["Megatron-LM", "megatron import"]),
        (&format!("generate --load {fixture} --prompt a"), &["Megatron-LM", "megatron import"]),
        (&format!("{train} {sizes} --load hf"), &["Hugging Face model", "--init-from-hf"]),
        ("export hf new", &["Hugging Face model", "--init-from-hf"]),
    ] {
        let output = run(words);
        let message = stderr(&output);
        assert!(!output.status.success(), "{words}");
        for part in parts {
            assert!(message.contains(part), "{words}: {part}: {message}");
        }
        assert!(
            !at("new").exists() || std::fs::read_dir(at("new")).unwrap().next().is_none(),
            "{words}"
        );
    }
}

#[test]
fn an_evaluation_that_gives_no_number_ends_badly() {
    let dir = tempfile::tempdir().unwrap();
    copied("llama-tiny", &dir.path().join("hf"));
    // Values that overflow in the computation.
    let path = dir.path().join("hf/model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let norm = tensors.get_mut("model.norm.weight").unwrap();
    *norm = (&*norm * 1e38).unwrap();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    std::fs::write(dir.path().join("text.txt"), "text ".repeat(2000)).unwrap();
    let words =
        "eval --load hf --tokenizer byte --data-path text.txt --cache-dir cache --seq-length 32";
    let output = megatron().current_dir(dir.path()).args(words.split(' ')).output().unwrap();
    let message = stderr(&output);
    assert!(
        output.status.code() == Some(1) && message.contains("the loss is"),
        "{}{message}",
        stdout(&output)
    );
}

/// Tests the files that `--tokenizer FOLDER` brings along.
#[test]
fn a_tokenizers_folder_goes_along_into_checkpoints_and_exports() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let run =
        |words: &str| megatron().current_dir(dir.path()).args(words.split(' ')).output().unwrap();
    std::fs::create_dir(at("tokens")).unwrap();
    let tokenizer = WORDS.replace(
        "\"added_tokens\": []",
        r#""added_tokens": [{"id": 3, "content": "<e>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}]"#,
    );
    let config = r#"{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>", "bos_token": "a", "chat_template": "{{ x }}"}"#;
    let given = [
        ("tokenizer.json", tokenizer.as_str()),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", r#"{"eos_token": "<e>"}"#),
        ("added_tokens.json", r#"{"<e>": 3}"#),
        ("chat_template.jinja", "{{ x }}"),
        ("generation_config.json", r#"{"eos_token_id": [2, 3], "temperature": 0.5}"#),
    ];
    given.iter().for_each(|(name, text)| std::fs::write(at("tokens").join(name), text).unwrap());
    std::fs::write(at("text.txt"), "a b ".repeat(2000)).unwrap();
    let train = "pretrain --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --micro-batch-size 1 \
                 --global-batch-size 1 --train-iters 1 --lr 1e-3 --data-path text.txt --cache-dir cache --eval-iters 0";
    let output = run(&format!("{train} --tokenizer tokens --save saved"));
    assert!(output.status.success(), "{}", stderr(&output));
    let output = run("export saved hf");
    assert!(output.status.success() && !stdout(&output).contains("note"), "{}", stderr(&output));
    let json = |path: &str| -> Value {
        serde_json::from_slice(&std::fs::read(at(path)).unwrap()).unwrap()
    };
    for folder in ["saved", "hf"] {
        for (name, text) in &given[..5] {
            assert_eq!(
                std::fs::read_to_string(at(folder).join(name)).unwrap(),
                *text,
                "{folder}/{name}"
            );
        }
    }
    assert_eq!(json("hf/generation_config.json")["eos_token_id"], serde_json::json!([2, 3]));
    assert_eq!(json("hf/generation_config.json")["temperature"], 0.5);
    assert_eq!(
        (&json("hf/config.json")["eos_token_id"], &json("hf/config.json")["bos_token_id"]),
        (&3.into(), &0.into())
    );
    // A folder of checkpoints with another tokenizer's files is left unchanged.
    let output = run(&format!("{train} --tokenizer byte --save bytes"));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(run("export bytes hf-bytes").status.success());
    let made = json("hf-bytes/tokenizer_config.json");
    assert_eq!(
        (&made["tokenizer_class"], &made["eos_token"]),
        (&"PreTrainedTokenizerFast".into(), &"<|endoftext|>".into())
    );
    // And with the ids of training for spelled-out special tokens, although these are special by
    // default.
    std::fs::write(at("special.txt"), "a <e> b <|endoftext|> ".repeat(20)).unwrap();
    let evaluated = |load: &str| {
        let output = run(&format!("eval --load {load} --data-path special.txt --cache-dir cache"));
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).split(" train: ").nth(1).unwrap().split(" | ").next().unwrap().to_string()
    };
    assert_eq!(evaluated("hf-bytes"), evaluated("bytes"));
    let output = run(&format!("{train} --tokenizer tokens --split-special-tokens --save literal"));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(run("export literal hf-literal").status.success());
    assert_eq!(evaluated("hf-literal"), evaluated("literal"));
    assert_ne!(evaluated("literal"), evaluated("saved"));
    // The files that import puts beside its checkpoint are the tokenizer, with its options.
    assert!(run("import hf-literal imported").status.success());
    let flags = "--finetune --seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --save tuned";
    let output =
        run(&format!("pretrain --load imported {flags} --data-path special.txt --cache-dir cache"));
    let said = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        said.contains("note: --tokenizer is not given: imported/tokenizer.json is used"),
        "{said}"
    );
    assert_eq!(evaluated("tuned"), evaluated("literal"));
    // Without --data-path, the run's data are used.
    let output = run("eval --load tuned --cache-dir cache");
    assert!(
        output.status.success()
            && stderr(&output).contains("the training data are used: special.txt")
    );
    let output = run("eval --load hf-literal --cache-dir cache");
    assert!(
        !output.status.success() && stderr(&output).contains("give --data-path"),
        "{}",
        stderr(&output)
    );
    for file in ["config.json", "generation_config.json"] {
        let ids = json(&format!("hf-bytes/{file}"));
        assert_eq!(
            (&ids["eos_token_id"], &ids["bos_token_id"]),
            (&256.into(), &256.into()),
            "{file}"
        );
    }
}
