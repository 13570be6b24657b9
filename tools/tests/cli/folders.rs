//! Which checkpoint and tokenizer a folder means: the same for every command, however its path is
//! written.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::site::{SOON, Site, ended, refused};
use crate::support::{kill, megatron, pipe, stderr, stdout};

/// One rank, so that a run is fast.
const ALONE: [&str; 2] = ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1"];
const POINTER: &str = "latest_checkpointed_iteration.txt";

/// A site with the checkpoints of iterations 1 and 2 in `saved`.
fn saved() -> Site {
    let site = Site::new();
    pretrain(&site, &["--save=saved", "--train-iters=2", "--save-interval=1"]);
    site
}

fn pretrain(site: &Site, flags: &[&str]) -> String {
    stdout(&site.succeed(&[&ALONE[..], flags].concat()))
}

fn pretrain_refused(site: &Site, flags: &[&str], parts: &[&str]) {
    let before = site.files();
    refused(&site.pretrain(&[&ALONE[..], flags].concat()).output().unwrap(), parts);
    site.assert_unchanged(&before);
}

/// The output of `megatron` with `words`.
fn run(site: &Site, words: &[&str]) -> String {
    let output = site.mark(megatron()).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    stdout(&output)
}

#[test]
fn a_run_resumes_from_one_checkpoints_folder() {
    let site = saved();
    let log = pretrain(&site, &["--load=saved/iter_0000001", "--save=other", "--train-iters=3"]);
    assert!(log.contains("resumed from saved/iter_0000001 (8 samples"), "{log}");
    // The metrics of the previous step also stay.
    assert_eq!(site.losses().iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3]);
    pretrain_refused(
        &site,
        &["--load=saved/iter_0000009", "--save=new"],
        &["iter_0000009", "holds no checkpoint"],
    );
    let own = ["--load=saved/iter_0000001", "--save=saved/iter_0000001"];
    pretrain_refused(&site, &own, &["the folder of one checkpoint"]);
}

#[test]
fn a_decay_that_smaller_batches_would_shorten_is_told() {
    let site = saved(); // 16 samples
    let smaller = ["--load=saved", "--save=other", "--global-batch-size=4", "--train-iters=8"];
    let log = pretrain(&site, &smaller);
    assert!(log.contains("the learning rate ends before this run does, after 32 samples"), "{log}");
    assert!(log.contains("this run ends at 40"), "{log}");
    fs::remove_dir_all(site.path("other")).unwrap();
    let log = pretrain(&site, &[&smaller[..], &["--lr-decay-samples=40"]].concat());
    assert!(
        log.contains("resumed from") && !log.contains("the decay of the learning rate"),
        "{log}"
    );
    fs::remove_dir_all(site.path("other")).unwrap();
    let log =
        pretrain(&site, &["--load=saved", "--save=other", "--train-iters=3", "--lr-decay-iters=1"]);
    assert!(
        log.contains("resumed from") && !log.contains("the decay of the learning rate"),
        "as it was asked for: {log}"
    );
}

#[test]
fn checkpoints_without_a_pointer_are_not_taken_for_none() {
    let site = saved();
    fs::remove_file(site.path("saved").join(POINTER)).unwrap();
    for flags in [&["--load=saved"][..], &["--load=saved", "--save=saved"]] {
        pretrain_refused(&site, flags, &["saved", POINTER, "2, 1", "give the folder of one"]);
    }
    pretrain_refused(&site, &["--save=saved"], &["saved/iter_", "would overwrite"]);
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/llama-tiny");
    let before = site.files();
    refused(
        &site.mark(megatron()).args(["import", model, "saved"]).output().unwrap(),
        &["iter_", "already exists"],
    );
    site.assert_unchanged(&before);
    // If there is only one checkpoint, it is used.
    fs::remove_dir_all(site.path("saved/iter_0000002")).unwrap();
    let log = pretrain(&site, &["--load=saved", "--save=saved", "--train-iters=2"]);
    assert!(log.contains("resumed from saved/iter_0000001"), "{log}");
}

#[test]
fn a_folder_is_the_same_however_it_is_written() {
    let site = saved();
    symlink("saved", site.path("link")).unwrap();
    let absolute = format!("--load={}", site.path("saved").display());
    for (load, iters) in [("--load=./saved", 3), ("--load=link", 4), (&absolute, 5)] {
        let log = pretrain(&site, &[load, "--save=saved", &format!("--train-iters={iters}")]);
        assert!(log.contains("resumed from"), "{log}");
    }
}

#[test]
fn what_keeps_a_run_from_resuming_or_saving_is_said_before_it_trains() {
    let site = saved();
    let resume = ["--load=saved", "--save=saved", "--train-iters=4"];
    let advice = [
        "of the optimizer adam",
        "this run uses sgd",
        "--optimizer adam",
        "--no-load-optim",
        "--finetune",
    ];
    pretrain_refused(&site, &[&resume[..], &["--optimizer=sgd"]].concat(), &advice);
    pretrain(&site, &["--save=momentum", "--train-iters=1", "--optimizer=sgd"]);
    pretrain_refused(&site, &["--load=momentum"], &["of the optimizer sgd", "this run uses adam"]);
    for flags in [
        &["--save"][..],
        &["--save=elsewhere", "--offload-optimizer=nvme", "--nvme-path"],
        &["--save=elsewhere", "--tensorboard-dir"],
    ] {
        let mut command = site.pretrain(&ALONE);
        command.args(flags).arg(OsStr::from_bytes(b"b\xffd"));
        let output = command.output().unwrap();
        refused(&output, &[flags[flags.len() - 1], "not UTF-8"]);
        assert!(!stdout(&output).contains("iteration "), "{}", stdout(&output));
    }
}

#[test]
fn what_was_trained_in_a_models_folder_goes_before_the_model() {
    let site = saved();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama-tiny");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture.join(name), site.path("saved").join(name)).unwrap();
    }
    let evaluate = ["eval", "--load=saved", "--data-path=text.txt", "--cache-dir=cache"];
    let text = run(&site, &evaluate);
    assert!(text.starts_with("saved/iter_0000002 "), "{text}");
    let pointer = fs::read(site.path("saved").join(POINTER)).unwrap();
    fs::remove_file(site.path("saved").join(POINTER)).unwrap();
    let output = site.mark(megatron()).args(evaluate).output().unwrap();
    refused(&output, &["2, 1", POINTER]);
    fs::write(site.path("saved").join(POINTER), pointer).unwrap();
}

#[test]
fn a_folder_that_was_moved_under_a_run_is_saved_into_no_more_and_no_other_in_its_place() {
    for flags in [&ALONE[..], &[][..], &[ALONE[0], ALONE[1], "--async-save"]] {
        let site = Site::new();
        let endless = ["--save=saved", "--save-interval=20", "--train-iters=1000000", "--lr=1e-5"];
        let run = site.pretrain(&[flags, &endless].concat()).spawn().unwrap();
        site.wait_for_step(45);
        fs::rename(site.path("saved"), site.path("moved")).unwrap();
        fs::create_dir(site.path("saved")).unwrap();
        let output = ended(vec![run], SOON).remove(0);
        refused(
            &output,
            &[
                "saved: is now a different folder",
                "move it back",
                "--load and --save at its new path",
            ],
        );
        assert_eq!(fs::read_dir(site.path("saved")).unwrap().count(), 0);
        assert!(site.path("moved/iter_0000040").exists());
        fs::remove_dir(site.path("saved")).unwrap();
        site.assert_nothing_left();
    }
}

#[test]
fn metrics_of_a_run_that_goes_on_are_not_taken() {
    let site = Site::new();
    let run = site.pretrain(&[&ALONE[..], &["--train-iters=1000000"]].concat()).spawn().unwrap();
    site.wait_for_step(3);
    let second = site.pretrain(&[&ALONE[..], &["--train-iters=2"]].concat()).output().unwrap();
    refused(&second, &["metrics = metrics.jsonl is in use: another run is writing to it"]);
    site.wait_for_step(site.last_step() + 3);
    kill(run.id(), "TERM");
    ended(vec![run], SOON);
    pretrain(&site, &["--train-iters=2"]);
    assert!(site.path("metrics.jsonl.1").exists());
}

/// `/dev/full` acts like a full disk.
#[test]
fn a_run_whose_metrics_cannot_be_written_trains_and_saves_and_says_so() {
    let site = Site::new();
    let log = pretrain(&site, &["--save=saved", "--train-iters=3", "--metrics=/dev/full"]);
    assert_eq!(
        log.matches("note: cannot write /dev/full: No space left on device").count(),
        1,
        "{log}"
    );
    assert!(log.contains("note: metrics end before step 1: cannot write /dev/full"), "{log}");
    assert_eq!(fs::read_to_string(site.path("saved").join(POINTER)).unwrap().trim(), "3");
}

/// The pipe has no reader, so a full pipe would block the run.
#[test]
fn a_pipe_in_the_place_of_metrics_is_refused() {
    let site = Site::new();
    pipe(&site.path("pipe"));
    for flags in [&["--metrics=pipe"][..], &["--metrics=pipe", ALONE[0], ALONE[1]]] {
        let run = site.pretrain(flags).spawn().unwrap();
        refused(
            &ended(vec![run], SOON).remove(0),
            &["write metrics to pipe (--metrics)", "it is a pipe"],
        );
    }
}

/// A tokenizer of three words that do not occur in the site's text.
const FOREIGN: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
  "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}}"#;

#[test]
fn the_tokenizer_is_the_one_of_the_run() {
    let site = saved();
    let evaluate = |load: &str, folder: &str| {
        let mut command = site.mark(megatron());
        let data = site.path("text.txt").display().to_string();
        let flags = ["eval", "--load", load, "--data-path", &data, "--cache-dir", "cache"];
        let output = command.current_dir(site.path(folder)).args(flags).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).split(": ").nth(1).unwrap().to_string()
    };
    let bytes = evaluate("saved", "");
    // Beside a byte-level run are sidecar files of another model.
    site.write("saved/tokenizer.json", FOREIGN);
    assert_eq!(evaluate("saved", ""), bytes);
    fs::remove_file(site.path("saved/tokenizer.json")).unwrap();

    pretrain(&site, &["--save=words/saved", "--train-iters=1", "--tokenizer=train:300"]);
    let words = evaluate("words/saved", "");
    assert_ne!(words, bytes);
    // The parent folders of the links and of the folder hold another tokenizer.
    for name in ["tokenizer.json", "words/tokenizer.json"] {
        site.write(name, FOREIGN);
    }
    symlink("words/saved/iter_0000001", site.path("best")).unwrap();
    assert_eq!(evaluate("best", ""), words);
    assert_eq!(evaluate(".", "words/saved/iter_0000001"), words);
    let log = pretrain(&site, &["--load=best", "--train-iters=2", "--tokenizer=train:300"]);
    assert!(!log.contains("differ from those that the checkpoint was trained on"), "{log}");
}

#[test]
fn another_tokenizer_is_not_replaced_where_there_are_no_checkpoints_yet() {
    let site = Site::new();
    fs::create_dir(site.path("saved")).unwrap();
    site.write("saved/tokenizer.json", FOREIGN);
    let flags = ["--save=saved", "--train-iters=1", "--tokenizer=train:300"];
    let run = site.pretrain(&[&ALONE[..], &flags].concat()).output().unwrap();
    refused(&run, &["saved/tokenizer.json", "this run's tokenizer", "save elsewhere"]);
    assert_eq!(fs::read_to_string(site.path("saved/tokenizer.json")).unwrap(), FOREIGN);
    fs::remove_file(site.path("saved/tokenizer.json")).unwrap();
    pretrain(&site, &flags);
    pretrain(&site, &["--save=saved", "--load=saved", "--train-iters=2", "--tokenizer=train:300"]);
}

#[test]
fn the_tokenizer_of_checkpoints_is_not_replaced_by_a_run_that_goes_on_with_another() {
    let site = Site::new();
    pretrain(&site, &["--save=saved", "--train-iters=1", "--tokenizer=train:270"]);
    let theirs = fs::read_to_string(site.path("saved/tokenizer.json")).unwrap();
    site.write("words.txt", &"other words than those ".repeat(200));
    let train =
        ["tokenizer", "train", "--vocab-size=270", "--input=words.txt", "--output=other.json"];
    let output = site.mark(megatron()).args(train).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let flags = ["--save=saved", "--load=saved", "--train-iters=2", "--tokenizer=other.json"];
    let run = site.pretrain(&[&ALONE[..], &flags].concat()).output().unwrap();
    refused(&run, &["saved/tokenizer.json", "this run's tokenizer", "save elsewhere"]);
    assert_eq!(fs::read_to_string(site.path("saved/tokenizer.json")).unwrap(), theirs);
    let log = pretrain(
        &site,
        &["--save=elsewhere", "--load=saved", "--train-iters=2", "--tokenizer=other.json"],
    );
    assert!(log.contains("the tokenizer differ from those"), "{log}");
}

#[test]
fn a_result_that_could_not_be_printed_is_an_error() {
    let site = saved();
    for words in [
        "inspect saved",
        "generate --load saved --prompt a --num-tokens 2",
        "--help",
        "help pretrain",
        "pretrain -h",
        "--version",
        "completions bash",
    ] {
        let mut command = site.mark(megatron());
        let full = fs::File::create("/dev/full").unwrap();
        let output = command.args(words.split(' ')).stdout(full).output().unwrap();
        refused(&output, &["write to standard output", "No space left"]);
        assert_eq!(output.status.code(), Some(1), "{words}");
    }
}

#[test]
fn a_models_tokenizer_lies_in_its_own_folder() {
    let site = Site::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama-tiny");
    fs::create_dir(site.path("model")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture.join(name), site.path("model").join(name)).unwrap();
    }
    site.write("tokenizer.json", FOREIGN);
    let generate = ["generate", "--load=model", "--prompt=a", "--num-tokens=0"];
    refused(
        &site.mark(megatron()).args(generate).output().unwrap(),
        &["no tokenizer", "--tokenizer FILE"],
    );
    site.write("model/tokenizer.json", FOREIGN);
    run(&site, &generate);
}

#[test]
fn what_lies_beside_checkpoints_goes_along_to_another_folder() {
    let site = saved();
    site.write("saved/hf_config.json", "{\"model_type\": \"mistral\"}");
    site.write("saved/chat_template.jinja", "hello");
    pretrain(&site, &["--load=saved", "--save=other", "--train-iters=3"]);
    assert_eq!(
        fs::read(site.path("saved/hf_config.json")).unwrap(),
        fs::read(site.path("other/hf_config.json")).unwrap()
    );
    // It belongs to a tokenizer that this run does not use.
    assert!(!site.path("other/chat_template.jinja").exists());
    // Files beside the checkpoint count, not those in the parent folder of a link.
    symlink("saved/iter_0000002", site.path("best")).unwrap();
    run(&site, &["reshard", "best", "resharded", "--tensor-model-parallel-size=2"]);
    assert!(
        site.path("resharded/hf_config.json").is_file()
            && site.path("resharded/chat_template.jinja").is_file()
    );
    site.assert_nothing_left();
}

#[test]
fn a_model_whose_numbers_overflow_is_told_as_such() {
    let site = Site::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama-tiny");
    let mut tensors =
        candle_core::safetensors::load(fixture.join("model.safetensors"), &Device::Cpu).unwrap();
    let norm = tensors.get_mut("model.norm.weight").unwrap();
    *norm =
        Tensor::full(f32::MAX, norm.shape(), &Device::Cpu).unwrap().to_dtype(norm.dtype()).unwrap();
    fs::create_dir(site.path("model")).unwrap();
    fs::copy(fixture.join("config.json"), site.path("model/config.json")).unwrap();
    candle_core::safetensors::save(&tensors, site.path("model/model.safetensors")).unwrap();
    let data = format!("--data-path={}", fixture.join("data_text_document").display());
    let output = site.mark(megatron()).args(["eval", "--load=model", &data]).output().unwrap();
    refused(&output, &["the loss is ", "hold NaN or infinity, or values overflow"]);
    let pipeline = "--pipeline-model-parallel-size=2";
    for layout in [&[][..], &[pipeline]] {
        let words = ["generate", "--load=model", "--prompt=the", "--tokenizer=byte"];
        let output = site.mark(megatron()).args([&words, layout].concat()).output().unwrap();
        refused(&output, &["logits after token 3 of prompt 1 are not finite"]);
    }
    site.assert_nothing_left();
}

#[test]
fn without_a_home_the_cache_is_in_a_folder_of_this_user_alone() {
    let site = Site::new();
    site.edit("cache_dir = \"cache\"\n", "");
    let run = || {
        let flags = [&ALONE[..], &["--train-iters=1", "--metrics=m.jsonl"]].concat();
        site.pretrain(&flags).env_remove("HOME").env_remove("XDG_CACHE_HOME").output().unwrap()
    };
    let output = run();
    assert!(output.status.success(), "{}", stderr(&output));
    let [cache] =
        &fs::read_dir(site.path("tmp")).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>()[..]
    else {
        panic!()
    };
    assert!(
        cache.file_name().unwrap().to_str().unwrap().starts_with("megatron-"),
        "{}",
        cache.display()
    );
    assert_eq!(fs::metadata(cache).unwrap().permissions().mode() & 0o777, 0o700);
    // As another user could have prepared it.
    fs::set_permissions(cache, fs::Permissions::from_mode(0o777)).unwrap();
    refused(&run(), &["cannot be the cache folder", "is writable by every user", "cache_dir"]);
}
