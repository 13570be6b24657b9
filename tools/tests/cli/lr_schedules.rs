//! DeepSpeed's learning-rate schedules: runs have its rates, also when they resume, and settings
//! that contradict each other are refused with the origins of both.

use serde_json::Value;

use crate::site::{Site, refused};
use crate::support::stdout;

const GOLDENS: &str = include_str!("../../../megatron/tests/fixtures/lr_schedules.json");

const ALONE: [&str; 2] = ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1"];

/// One of DeepSpeed's cycles of 7 and 11 steps.
const CYCLE: [&str; 7] = [
    "--lr-schedule=OneCycle",
    "--cycle-min-lr=1e-4",
    "--cycle-max-lr=3e-3",
    "--cycle-first-step-size=7",
    "--cycle-second-step-size=11",
    "--cycle-first-stair-count=3",
    "--cycle-second-stair-count=4",
];

/// A site whose run file has no learning rate.
fn without_lr() -> Site {
    let site = Site::new();
    site.edit("[optimizer]\nlr = 1e-3\n", "[optimizer]\n");
    site
}

/// The rates of the first golden case with these settings.
fn golden(settings: &[(&str, Value)]) -> Vec<f64> {
    let file: Value = serde_json::from_str(GOLDENS).unwrap();
    let is_meant = |case: &&Value| settings.iter().all(|(key, value)| case[*key] == *value);
    let case = file["cases"].as_array().unwrap().iter().find(is_meant).unwrap();
    case["lr"].as_str().unwrap().split(' ').map(|number| number.parse().unwrap()).collect()
}

/// `key` of every step of a run's metrics.
fn told(site: &Site, file: &str, key: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(site.path(file)).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line.get(key).and_then(Value::as_f64)).collect()
}

#[track_caller]
fn assert_rates(told: &[f64], expected: &[f64]) {
    assert!(!told.is_empty() && told.len() <= expected.len());
    for (step, (told, expected)) in told.iter().zip(expected).enumerate() {
        // Parsing JSON rounds.
        assert!((told - expected).abs() <= 1e-15 * expected, "step {step}: {told}, not {expected}");
    }
}

#[test]
fn a_run_has_the_rates_of_deepspeed() {
    let site = without_lr();
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, Value)]);
    let cases: [Case<'_>; 2] = [
        (
            &["--lr-schedule=WarmupLR", "--lr=6e-4", "--warmup-num-steps=30"],
            &[("type", "WarmupLR".into()), ("warmup_max_lr", 6e-4.into())],
        ),
        (&CYCLE, &[("type", "OneCycle".into()), ("cycle_first_stair_count", 3.into())]),
    ];
    for (at, (flags, settings)) in cases.into_iter().enumerate() {
        let file = format!("rates-{at}.jsonl");
        let metrics = format!("--metrics={file}");
        site.succeed(&[&ALONE[..], &[&metrics], flags].concat());
        assert_rates(&told(&site, &file, "learning_rate"), &golden(settings));
    }
}

/// The second half has another batch size: schedules of DeepSpeed count steps, not samples.
#[test]
fn a_resumed_run_goes_on_in_the_schedule() {
    let site = without_lr();
    let rates = golden(&[("type", "OneCycle".into()), ("cycle_first_stair_count", 3.into())]);
    let flags = |file: &'static str| [&ALONE[..], &CYCLE, &["--train-iters=9", file]].concat();
    site.succeed(&flags("--metrics=whole.jsonl"));
    let first = [&flags("--metrics=halves.jsonl")[..], &["--save=saved", "--exit-interval=4"]];
    site.succeed(&first.concat());
    let rest = [&flags("--metrics=halves.jsonl")[..], &["--load=saved"]].concat();
    let log = stdout(&site.succeed(&rest));
    assert!(!log.contains("note: "), "{log}");
    for key in ["learning_rate", "lm_loss", "grad_norm"] {
        assert_eq!(told(&site, "halves.jsonl", key), told(&site, "whole.jsonl", key), "{key}");
    }
    assert_rates(&told(&site, "halves.jsonl", "learning_rate"), &rates);

    let batch = ["--load=saved", "--global-batch-size=4", "--metrics=other.jsonl"];
    let other = [&ALONE[..], &CYCLE, &["--train-iters=9"], &batch].concat();
    site.succeed(&other);
    assert_rates(&told(&site, "other.jsonl", "learning_rate"), &rates[4..]);

    // Another schedule is noted, with what differs of it, unless the checkpoint's is to be used.
    let changed: Vec<&str> = other
        .iter()
        .map(|flag| if flag.starts_with("--cycle-max-lr") { "--cycle-max-lr=2e-3" } else { flag })
        .collect();
    let log = stdout(&site.succeed(&changed));
    assert!(log.contains("note: cycle_max_lr is 0.002 here and 0.003 in the checkpoint"), "{log}");
    let taken = ["--load=saved", "--lr=1e-3", "--lr-decay-style=cosine", "--train-iters=9"];
    let metrics = ["--use-checkpoint-opt-param-scheduler", "--metrics=taken.jsonl"];
    let log = stdout(&site.succeed(&[&ALONE[..], &taken, &metrics].concat()));
    assert!(log.contains("the checkpoint's lr_schedule, "), "{log}");
    assert_rates(&told(&site, "taken.jsonl", "learning_rate"), &rates[4..]);
    let from_checkpoint = ["--use-checkpoint-args", "--load=saved", "--metrics=again.jsonl"];
    site.succeed(&from_checkpoint);
    assert_rates(&told(&site, "again.jsonl", "learning_rate"), &rates[4..]);
}

#[test]
fn settings_that_contradict_each_other_are_refused_with_both_origins() {
    let site = Site::new();
    let cases: [(&[&str], &[&str]); 14] = [
        (
            &["--warmup-num-steps=5"],
            &[
                "warmup_num_steps (--warmup-num-steps)",
                "WarmupLR and WarmupDecayLR and WarmupCosineLR",
            ],
        ),
        (
            &["--lr-schedule=WarmupLR", "--cycle-min-lr=1e-5"],
            &[
                "cycle_min_lr (--cycle-min-lr)",
                "lr_schedule = WarmupLR (--lr-schedule)",
                "warmup_max_lr",
            ],
        ),
        (
            &["--lr-schedule=WarmupLR", "--lr-decay-style=cosine"],
            &["lr_decay_style (--lr-decay-style)", "lr_schedule = WarmupLR (--lr-schedule)"],
        ),
        (
            &["--lr-schedule=WarmupLR", "--warmup-max-lr=2e-3"],
            &["lr = 0.001 (run.toml:", "warmup_max_lr = 0.002 (--warmup-max-lr)"],
        ),
        (
            &["--lr-schedule=LRRangeTest", "--lr-range-test-min-lr=1e-5"],
            &["lr = 0.001 (run.toml:", "lr_range_test_min_lr = 0.00001 (--lr-range-test-min-lr)"],
        ),
        (
            &["--lr-schedule=WarmupDecayLR"],
            &["warmup_num_steps = 1000 (default)", "total_num_steps = 20 (default: the whole run)"],
        ),
        (
            &["--lr-schedule=WarmupLR", "--warmup-num-steps=0"],
            &["warmup_num_steps = 0 (--warmup-num-steps) must be at least 1"],
        ),
        (
            &["--lr-schedule=WarmupLR", "--warmup-min-lr=0.1"],
            &["warmup_min_lr = 0.1 (--warmup-min-lr) exceeds warmup_max_lr = 0.001 (lr = 0.001 ("],
        ),
        (
            &["--lr-schedule=WarmupCosineLR", "--warmup-num-steps=3", "--cos-min-ratio=-1"],
            &["cos_min_ratio = -1 (--cos-min-ratio) must be in [0, 1]"],
        ),
        (&["--lr-schedule=OneCycle"], &["not set: cycle_min_lr and cycle_max_lr"]),
        (&["--lr-schedule=warmup"], &["'warmup'", "WarmupLR", "LRRangeTest"]),
        (
            &[
                "--lr-schedule=OneCycle",
                "--cycle-min-lr=0",
                "--cycle-max-lr=1e-3",
                "--adam-beta1=0.8",
            ],
            &[
                "adam_beta1 (--adam-beta1)",
                "lr_schedule = OneCycle (--lr-schedule)",
                "cycle_momentum = true (default)",
            ],
        ),
        (
            &[
                "--lr-schedule=OneCycle",
                "--cycle-min-lr=0",
                "--cycle-max-lr=1e-3",
                "--cycle-momentum=false",
                "--cycle-min-mom=0.7",
            ],
            &["cycle_min_mom (--cycle-min-mom)", "cycle_momentum = false (--cycle-momentum)"],
        ),
        (
            &[
                "--lr-schedule=OneCycle",
                "--cycle-min-lr=0",
                "--cycle-max-lr=1e-3",
                "--cycle-momentum=true",
                "--optimizer=sgd",
            ],
            &["cycle_momentum = true (--cycle-momentum)", "optimizer = sgd (--optimizer)"],
        ),
    ];
    for (flags, parts) in cases {
        refused(&site.pretrain(flags).output().unwrap(), parts);
    }
}
