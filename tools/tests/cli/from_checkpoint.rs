//! `pretrain --load CKPT` without a run file: a checkpoint restarts itself.

use std::fs;
use std::process::Command;

use crate::site::{RANKS, Site, refused};
use crate::support::{megatron, stderr, stdout};

/// A run of four steps that ends after two.
const HALF: [&str; 4] = ["--train-iters=4", "--exit-interval=2", "--save=saved", "--load=saved"];

/// `megatron pretrain` with only `flags`.
fn pretrain(site: &Site, flags: &[&str]) -> Command {
    let mut command = site.mark(megatron());
    command.arg("pretrain").args(flags);
    command
}

fn succeed(site: &Site, flags: &[&str]) -> String {
    let output = pretrain(site, flags).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

fn half() -> Site {
    let site = Site::new();
    // Flags that make a different run on the same data.
    site.succeed(
        &[&HALF[..], &["--seed=5", "--tokenizer=train:300", "--bf16", "--lr-warmup-iters=3"]]
            .concat(),
    );
    site
}

#[test]
fn a_run_goes_on_as_its_run_file_would_have_it() {
    let (site, whole) = (half(), half());
    whole.succeed(
        &[&HALF[..], &["--seed=5", "--tokenizer=train:300", "--bf16", "--lr-warmup-iters=3"]]
            .concat(),
    );
    fs::remove_file(site.path("run.toml")).unwrap();
    let log = succeed(&site, &["--load=saved"]);
    assert!(
        log.contains(
            "settings that are not given come from saved/iter_0000002; checkpoints go to saved"
        ),
        "{log}"
    );
    assert!(log.contains("tp 2 · pp 2 · dp 1"), "{log}");
    // All settings come from the checkpoint, so none without effect were given by the user.
    assert!(!log.contains("no effect"), "{log}");
    assert_eq!((site.losses().len(), site.losses()), (4, whole.losses()));
    assert!(site.path("saved/iter_0000004").is_dir());
    // Under a launcher, which sets the number of ranks; moved, with its own tokenizer.
    fs::rename(site.path("saved"), site.path("moved")).unwrap();
    let ranks = RANKS.to_string();
    let mut launch = site.mark(megatron());
    launch.args([
        "launch",
        "--nproc-per-node",
        &ranks,
        "--",
        env!("CARGO_BIN_EXE_megatron"),
        "pretrain",
    ]);
    let output = launch.args(["--load=moved", "--train-iters=5"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(site.path("moved/iter_0000005").is_dir());
}

#[test]
fn what_is_given_comes_first_and_a_layout_is_given_as_a_whole() {
    let site = half();
    let log = succeed(&site, &["--load=saved", "--data-parallel-size=2", "--lr=0.5", "--fp16"]);
    assert!(log.contains("tp 1 · pp 1 · dp 2") && log.contains("| fp16 on "), "{log}");
    assert!(log.contains("learning rate: 5.0"), "{log}");
    // The run file overrides the checkpoint: 0.25 falls to 0 from sample 24 to 64, and 32 are read.
    fs::write(site.path("part.toml"), "[optimizer]\nlr = 0.25\n[training]\ntrain_iters = 8\n")
        .unwrap();
    let log = succeed(
        &site,
        &["part.toml", "--load=saved", "--use-checkpoint-args", "--exit-interval=6"],
    );
    assert!(log.contains("| bf16 on ") || log.contains("| fp16 on "), "{log}");
    assert!(log.contains("learning rate: 2.000000E-01"), "{log}");
}

#[test]
fn one_checkpoint_and_one_whose_weights_are_taken_say_that_nothing_is_saved() {
    let site = half();
    let before = site.files();
    let log = succeed(&site, &["--load=saved/iter_0000002", "--metrics=/dev/null"]);
    assert!(log.contains("nothing is saved without --save"), "{log}");
    let log = succeed(&site, &["--load=saved", "--finetune", "--exit-interval=1"]);
    assert!(
        log.contains("nothing is saved without --save")
            && log.contains("starting from the weights"),
        "{log}"
    );
    let evaluated = [
        "--load=saved",
        "--save=elsewhere",
        "--skip-train",
        "--eval-iters=1",
        "--metrics=/dev/null",
    ];
    let log = succeed(&site, &evaluated);
    assert!(
        log.contains("nothing is saved under --skip-train") && !log.contains("without --save"),
        "{log}"
    );
    site.assert_unchanged(&before);
    succeed(&site, &["--load=saved", "--finetune", "--exit-interval=1", "--save=tuned"]);
    assert!(site.path("tuned/iter_0000001").is_dir());
}

#[test]
fn what_is_missing_is_named() {
    let site = half();
    let text = fs::read(site.path("text.txt")).unwrap();
    fs::remove_file(site.path("text.txt")).unwrap();
    let parts =
        ["text.txt: does not exist", "This path is recorded in saved/iter_0000002", "--data-path"];
    refused(&pretrain(&site, &["--load=saved"]).output().unwrap(), &parts);
    fs::write(site.path("text.txt"), text).unwrap();
    // A given tokenizer, in any flags, overrides the recorded one.
    let other = ["--load=saved", "--vocab-file=other.json", "--merge-file=other.txt"];
    refused(&pretrain(&site, &other).output().unwrap(), &["other.json"]);
    let none = ["not set: num_layers", "none holds no checkpoint to take them from"];
    refused(&pretrain(&site, &["--load=none"]).output().unwrap(), &none);
    refused(
        &pretrain(&site, &["--use-checkpoint-args"]).output().unwrap(),
        &["use_checkpoint_args (--use-checkpoint-args) has no effect without load"],
    );
    fs::write(site.path("part.toml"), "[model]\nnum_layers = 4\n").unwrap();
    refused(
        &pretrain(&site, &["part.toml", "--load=saved"]).output().unwrap(),
        &["not set: hidden_size", "--use-checkpoint-args takes them from the checkpoint in saved"],
    );
}

#[test]
fn one_that_was_imported_tells_its_architecture_and_what_it_lacks() {
    let site = Site::new();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/llama-tiny");
    let output = site.mark(megatron()).args(["import", model, "imported"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    refused(
        &pretrain(&site, &["--load=imported"]).output().unwrap(),
        &[
            "not set: data_path under [data], micro_batch_size",
            "imported/iter_0000000 does not record [parallel] [data]",
        ],
    );
    succeed(
        &site,
        &[
            "--load=imported",
            "--mock-data",
            "--micro-batch-size=1",
            "--train-iters=1",
            "--lr=1e-3",
            "--split=1,0,0",
            "--save=saved",
        ],
    );
    assert!(site.path("saved/iter_0000001").is_dir());
}
