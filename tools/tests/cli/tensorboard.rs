//! Event files: read by an independent reader and compared with `metrics.jsonl`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::site::{Site, refused};
use crate::support::stdout;

/// The contents of an event.
#[derive(Clone, Debug, PartialEq)]
enum Event {
    FileVersion(String),
    SessionStart(u64),
    Scalar { step: u64, tag: String, value: f32 },
}

/// The Castagnoli polynomial, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// The data of the records, after checking their checksums.
fn records(mut file: &[u8]) -> Vec<&[u8]> {
    let mut records = Vec::new();
    while !file.is_empty() {
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let (head, rest) = file.split_at(12);
        assert_eq!(head[8..], masked(&head[..8]));
        assert_eq!(rest[length..length + 4], masked(&rest[..length]));
        records.push(&rest[..length]);
        file = &rest[length + 4..];
    }
    records
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let length = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    let (number, rest) = bytes.split_at(length);
    *bytes = rest;
    number.iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
}

/// The fields of a protobuf message: numbers as the eight bytes of a u64.
fn fields(mut message: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let length = match key & 7 {
            0 => {
                fields.push((key >> 3, varint(&mut message).to_le_bytes().into()));
                continue;
            }
            1 => 8,
            5 => 4,
            2 => varint(&mut message) as usize,
            other => panic!("wire type {other}"),
        };
        let (value, rest) = message.split_at(length);
        fields.push((key >> 3, value.into()));
        message = rest;
    }
    fields
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.into()).unwrap()
}

fn events(path: &Path) -> Vec<Event> {
    let file = fs::read(path).unwrap();
    let mut events = Vec::new();
    for record in records(&file) {
        let (mut step, mut time) = (0, 0.0);
        for (field, value) in fields(record) {
            match field {
                1 => time = f64::from_le_bytes(value.try_into().unwrap()),
                2 => step = u64::from_le_bytes(value.try_into().unwrap()),
                3 => events.push(Event::FileVersion(text(&value))),
                5 => {
                    for (_, one) in fields(&value) {
                        let one: BTreeMap<u64, Vec<u8>> = fields(&one).into_iter().collect();
                        let value = f32::from_le_bytes(one[&2][..].try_into().unwrap());
                        events.push(Event::Scalar { step, tag: text(&one[&1]), value });
                    }
                }
                7 => {
                    assert_eq!(fields(&value), [(1, 1u64.to_le_bytes().into())]);
                    events.push(Event::SessionStart(step));
                }
                other => panic!("field {other}"),
            }
        }
        let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        assert!((now - 600.0..=now).contains(&time), "{time}");
    }
    events
}

/// The event files of a folder, in the order in which TensorBoard reads them.
fn files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = paths.filter(|path| path.is_file()).collect();
    files.sort();
    assert!(
        files.iter().all(|path| path.to_string_lossy().contains("/events.out.tfevents.1")),
        "{files:?}"
    );
    files
}

/// The curves of a folder as TensorBoard shows them: a restarted session replaces later points.
fn curves(folder: &Path) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut curves: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for file in files(folder) {
        for event in events(&file) {
            match event {
                Event::FileVersion(version) => assert_eq!(version, "brain.Event:2"),
                Event::SessionStart(first) => {
                    curves.values_mut().for_each(|curve| curve.retain(|(step, _)| *step < first));
                }
                Event::Scalar { step, tag, value } => {
                    curves.entry(tag).or_default().push((step, value))
                }
            }
        }
    }
    curves
}

/// The objects of `metrics.jsonl` that have `key`.
fn metrics(site: &Site, key: &str) -> Vec<Value> {
    let text = fs::read_to_string(site.path("metrics.jsonl")).unwrap();
    let objects = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    objects.filter(|object| object.get(key).is_some()).collect()
}

fn number(object: &Value, key: &str) -> f64 {
    object[key].as_f64().unwrap_or_else(|| object[key].as_str().unwrap().parse().unwrap())
}

/// The curve of `value` over `x`.
fn curve(objects: &[Value], x: &str, value: impl Fn(&Value) -> f64) -> Vec<(u64, f32)> {
    objects.iter().map(|object| (object[x].as_u64().unwrap(), value(object) as f32)).collect()
}

const ONE_STAGE: [&str; 2] = ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1"];
const ALL: [&str; 3] = [
    "--log-validation-ppl-to-tensorboard",
    "--log-timers-to-tensorboard",
    "--log-memory-to-tensorboard",
];

#[test]
fn curves_have_megatrons_names_and_the_values_of_the_metrics_and_one_rank_writes_them() {
    let site = Site::new();
    let run = [
        "--data-parallel-size=2",
        "--train-iters=5",
        "--fp16",
        "--initial-loss-scale=64",
        "--tensorboard-dir=a/board",
    ];
    let eval = ["--eval-interval=2", "--eval-iters=1", "--split=80,10,10"];
    site.succeed(&[&ONE_STAGE[..], &run, &eval, &ALL].concat());
    let (over_steps, over_samples) =
        (curves(&site.path("a/board")), curves(&site.path("a/board/vs-samples")));
    assert_eq!(
        (files(&site.path("a/board")).len(), files(&site.path("a/board/vs-samples")).len()),
        (1, 1)
    );

    let steps = metrics(&site, "grad_norm");
    assert_eq!(steps.len(), 5);
    let mut expected = BTreeMap::new();
    let mut expected_over_samples = BTreeMap::new();
    for (tag, key) in [
        ("learning-rate", "learning_rate"),
        ("batch-size", "global_batch_size"),
        ("lm loss", "lm_loss"),
        ("loss-scale", "loss_scale"),
        ("grad-norm", "grad_norm"),
    ] {
        expected.insert(tag.to_string(), curve(&steps, "iteration", |step| number(step, key)));
        let curve = curve(&steps, "consumed_samples", |step| number(step, key));
        expected_over_samples.insert(format!("{tag} vs samples"), curve);
    }
    let seconds = curve(&steps, "iteration", |step| number(step, "elapsed_ms") / 1e3);
    expected.insert("iteration-time".into(), seconds);
    expected.insert(
        "mem-max-allocated-bytes".into(),
        curve(&steps, "iteration", |step| number(step, "memory")),
    );
    for (split, tag) in [("validation", "lm loss validation"), ("test", "lm loss test")] {
        let evals: Vec<Value> =
            metrics(&site, "eval").into_iter().filter(|eval| eval["eval"] == split).collect();
        for (tag, key) in [(tag.to_string(), "lm_loss"), (format!("{tag} ppl"), "ppl")] {
            let curve = curve(&evals, "iteration", |eval| number(eval, key));
            let over_samples = curve.iter().map(|(step, value)| (8 * step, *value)).collect();
            expected_over_samples.insert(format!("{tag} vs samples"), over_samples);
            expected.insert(tag, curve);
        }
    }
    assert_eq!(
        expected["lm loss validation"].iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        [2, 4, 5]
    );

    // A quotient with rounding in another place.
    let (mut over_steps, throughput) =
        (over_steps, curve(&steps, "iteration", |step| number(step, "tflops")));
    for (shown, computed) in over_steps.remove("throughput").unwrap().iter().zip(&throughput) {
        assert!(
            shown.0 == computed.0 && (shown.1 - computed.1).abs() <= 1e-6 * computed.1,
            "{shown:?}, {computed:?}"
        );
    }
    assert_eq!(over_steps, expected);
    assert_eq!(over_samples, expected_over_samples);
}

#[test]
fn what_was_not_asked_for_is_not_there() {
    let site = Site::new();
    let interval = [
        "--tensorboard-dir=board",
        "--tensorboard-log-interval=3",
        "--train-iters=7",
        "--eval-iters=1",
    ];
    site.succeed(&[&ONE_STAGE[..], &interval].concat());
    let curves = curves(&site.path("board"));
    let expected = ["batch-size", "grad-norm", "learning-rate", "lm loss", "lm loss validation"];
    assert_eq!(curves.keys().collect::<Vec<_>>(), expected);
    assert_eq!(curves["lm loss"].iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 6]);
    assert_eq!(curves["lm loss validation"].iter().map(|(step, _)| *step).collect::<Vec<_>>(), [7]);
}

#[test]
fn a_run_that_goes_on_starts_a_second_file_at_its_first_step() {
    let site = Site::new();
    let common = [&ONE_STAGE[..], &["--tensorboard-dir=board", "--save-interval=3"]].concat();
    site.succeed(&[&common[..], &["--save=saved", "--exit-interval=7"]].concat());
    // Four of seven steps were lost.
    let output = site.succeed(
        &[&common[..], &["--load=saved/iter_0000003", "--save=again", "--exit-interval=9"]]
            .concat(),
    );
    assert!(!stdout(&output).contains("an earlier run"), "{}", stdout(&output));
    for (folder, x, first) in
        [("board", "iteration", 4), ("board/vs-samples", "consumed_samples", 25)]
    {
        let files = files(&site.path(folder));
        let starts = files.iter().map(|file| events(file)[1].clone());
        assert_eq!(
            starts.collect::<Vec<_>>(),
            [Event::SessionStart(1), Event::SessionStart(first)]
        );
        let losses = curve(&metrics(&site, "grad_norm"), x, |step| number(step, "lm_loss"));
        assert_eq!(losses.len(), 9);
        let tag = if x == "iteration" { "lm loss" } else { "lm loss vs samples" };
        assert_eq!(curves(&site.path(folder))[tag], losses);
    }
    // A separate run in the same folder.
    let output =
        site.succeed(&[&ONE_STAGE[..], &["--tensorboard-dir=board", "--train-iters=1"]].concat());
    assert!(
        stdout(&output).contains("note: board has the events of an earlier run"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn intervals_of_tensorboard_are_at_least_a_step() {
    let site = Site::new();
    site.edit(
        "metrics = \"metrics.jsonl\"",
        "tensorboard_dir = \"board\"\ntensorboard_log_interval = 0",
    );
    refused(
        &site.pretrain(&[]).output().unwrap(),
        &["tensorboard_log_interval = 0 (run.toml:", "at least 1"],
    );
    assert!(!site.path("board").exists());
}
