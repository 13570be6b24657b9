//! Files from unknown sources: models that exist only in a description, and non-files in place of
//! files. Commands end soon, with a message.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::site::{SOON, Site, ended, refused};
use crate::support::megatron;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// Asserts that each command is refused with `part`.
fn all_refuse(site: &Site, commands: &[&str], part: &str) {
    for words in commands {
        let mut command = megatron();
        command.args(words.split(' '));
        let output = &ended(vec![site.mark(command).spawn().unwrap()], SOON)[0];
        println!("{words}");
        refused(output, &[part]);
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

const TEXT: &str = "--data-path text.txt --split 1,0,0 --cache-dir cache";

#[test]
fn a_pipe_in_the_place_of_any_file_is_refused_at_once() {
    let site = Site::new();
    site.succeed(&[
        "--save=saved",
        "--train-iters=1",
        "--tokenizer=train:300",
        "--num-query-groups=4",
    ]);
    copy(&fixture("families/mistral-sharded"), &site.path("sharded"));
    copy(&fixture("llama-tiny"), &site.path("whole"));
    copy(&fixture("megatron-core/gpt2-tp2"), &site.path("megatron"));
    for name in ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"] {
        site.write(&format!("saved/{name}"), "{}");
    }
    site.write("documents.jsonl", "{\"text\": \"a\"}\n");
    site.write("hosts", "localhost slots=1\n");
    let evaluate = format!("eval --load saved {TEXT}");
    let latest = [
        "generate --load saved --prompt a",
        &evaluate,
        "export saved out",
        "inspect saved",
        "reshard saved new",
    ];
    let data =
        "pretrain run.toml --tokenizer=byte --data-path=whole/data_text_document --split=1,0,0";
    let tokenized =
        "preprocess --input documents.jsonl --output-prefix new --tokenizer saved/tokenizer.json";
    let cases: &[(&str, &[&str])] = &[
        ("saved/latest_checkpointed_iteration.txt", &latest),
        ("saved/iter_0000001/manifest.json", &latest),
        ("saved/iter_0000001/rank_00000.safetensors", &latest[..1]),
        (
            "saved/tokenizer.json",
            &["generate --load saved --prompt a", "export saved out", tokenized],
        ),
        ("saved/tokenizer_config.json", &["generate --load saved --prompt a", "export saved out"]),
        ("saved/special_tokens_map.json", &["export saved out"]),
        ("saved/generation_config.json", &["export saved out"]),
        ("saved/hf_config.json", &["export saved out"]),
        (
            "whole/config.json",
            &[
                "import whole new",
                "generate --load whole --prompt a --tokenizer byte",
                "inspect whole",
            ],
        ),
        ("whole/model.safetensors", &["import whole new", "inspect whole"]),
        ("sharded/model.safetensors.index.json", &["import sharded new", "inspect sharded"]),
        ("sharded/model-00001-of-00005.safetensors", &["import sharded new", "inspect sharded"]),
        ("megatron/latest_checkpointed_iteration.txt", &["import megatron new"]),
        ("megatron/iter_0000005/common.pt", &["import megatron new"]),
        ("megatron/iter_0000005/metadata.json", &["import megatron new"]),
        ("megatron/iter_0000005/.metadata", &["import megatron new"]),
        ("megatron/iter_0000005/__0_0.distcp", &["import megatron new"]),
        ("whole/data_text_document.bin", &["inspect whole/data_text_document", data]),
        ("whole/data_text_document.idx", &["inspect whole/data_text_document", data]),
        ("documents.jsonl", &[tokenized]),
        ("hosts", &["launch --hostfile hosts -- true"]),
        ("run.toml", &["pretrain run.toml"]),
        ("text.txt", &[&evaluate]),
    ];
    for (file, commands) in cases {
        let (path, aside) = (site.path(file), site.path("aside"));
        let was_there = path.exists();
        if was_there {
            fs::rename(&path, &aside).unwrap();
        }
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        all_refuse(&site, commands, path.file_name().unwrap().to_str().unwrap());
        fs::remove_file(&path).unwrap();
        if was_there {
            fs::rename(&aside, &path).unwrap();
        }
        assert!(!site.path("out").exists() && !site.path("new/iter_0000000").exists(), "{file}");
    }
}

/// Replaces a setting of the model that a checkpoint's manifest names.
fn claim(manifest: &Path, setting: &str, value: &str) {
    let text = fs::read_to_string(manifest).unwrap();
    let (_, body) = text.split_once('\n').unwrap();
    let state = body.rfind("\"model\":{").unwrap();
    let at = state + body[state..].find(&format!("\"{setting}\":")).unwrap() + setting.len() + 3;
    let end = at + body[at..].find([',', '}']).unwrap();
    let body = format!("{}{value}{}", &body[..at], &body[end..]);
    let first = format!("{{\"manifest_crc32c\":\"{:08x}\",\n", crc32c::crc32c(body.as_bytes()));
    fs::write(manifest, first + &body).unwrap();
}

#[test]
fn a_model_that_a_manifest_merely_claims_is_refused_before_it_is_made() {
    let site = Site::new();
    site.succeed(&["--save=saved", "--train-iters=1", "--position-embedding-type=rope"]);
    let manifest = site.path("saved/iter_0000001/manifest.json");
    let original = fs::read(&manifest).unwrap();
    let evaluate = format!("eval --load saved {TEXT}");
    let all = [
        "generate --load saved --prompt a",
        &evaluate,
        "export saved out",
        "reshard saved new",
        "inspect saved",
        "pretrain --load saved --train-iters 2",
    ];
    for (setting, value) in [
        ("num_layers", "1000000000000"),
        ("num_layers", "1000000"),
        ("hidden_size", "1000000000000"),
        ("ffn_hidden_size", "1000000000000"),
        ("vocab_size", "1000000000000"),
        ("num_attention_heads", "1000000000000"),
        ("seq_length", "1000000000000"),
        ("max_position_embeddings", "1000000000000"),
        ("make_vocab_size_divisible_by", "1000000000000"),
    ] {
        claim(&manifest, setting, value);
        all_refuse(&site, &all, "its manifest names");
        fs::write(&manifest, &original).unwrap();
    }
    // A possible size costs only as much as is used of it.
    claim(&manifest, "max_position_embeddings", "2000000000");
    let mut command = megatron();
    command.args("generate --load saved --prompt a --num-tokens 3".split(' '));
    let output = &ended(vec![site.mark(command).spawn().unwrap()], SOON)[0];
    assert!(output.status.success(), "{}", crate::support::stderr(output));
}

#[test]
fn a_model_that_a_config_merely_claims_is_refused_before_it_is_made() {
    let site = Site::new();
    copy(&fixture("llama-tiny"), &site.path("model"));
    let path = site.path("model/config.json");
    let original: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let train = "pretrain --init-from-hf model --seq-length 16 --tokenizer byte --micro-batch-size 1 --global-batch-size 1 \
                 --train-iters 1 --lr 1e-3 --data-path text.txt --cache-dir cache";
    let generate = "generate --load model --prompt a --tokenizer byte";
    for (setting, value) in [
        ("num_hidden_layers", 1_000_000_000_000u64),
        ("num_hidden_layers", 60_000),
        ("hidden_size", 1 << 30),
        ("intermediate_size", 1 << 30),
        ("vocab_size", 1 << 30),
        ("max_position_embeddings", 1 << 40),
    ] {
        let mut config = original.clone();
        config[setting] = value.into();
        fs::write(&path, config.to_string()).unwrap();
        all_refuse(&site, &["import model new", generate, train], "model");
    }
}
