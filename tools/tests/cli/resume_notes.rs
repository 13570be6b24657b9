//! The notes of a resumed run about settings that differ from the checkpoint's.

use crate::site::{Site, refused};
use crate::support::stdout;

/// A cosine over four steps of 8 samples of 16 tokens, on one rank.
const RUN: [&str; 4] = [
    "--lr-decay-style=cosine",
    "--train-iters=4",
    "--tensor-model-parallel-size=1",
    "--pipeline-model-parallel-size=1",
];

/// A site with the checkpoint of step 2 in `saved`.
fn half_way() -> Site {
    let site = Site::new();
    site.succeed(&[&RUN[..], &["--save=saved", "--exit-interval=2"]].concat());
    site
}

/// Makes one more step with additional `flags`, with metrics in FILE; returns the output.
fn resume(site: &Site, file: &str, flags: &[&str]) -> String {
    let metrics = format!("--metrics={file}");
    // A flag that is given twice has two values, so flags in `flags` are left out here.
    let name = |flag: &str| flag.split('=').next().unwrap_or_default().to_string();
    let run: Vec<&str> =
        RUN.into_iter().filter(|word| flags.iter().all(|flag| name(flag) != name(word))).collect();
    stdout(
        &site
            .succeed(&[&run[..], &["--load=saved", "--exit-interval=3", &metrics], flags].concat()),
    )
}

/// `key` of a step in FILE.
fn of_step(step: u64, site: &Site, file: &str, key: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(site.path(file)).unwrap();
    let steps = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    steps.filter(|line| line["iteration"] == step).find_map(|line| line.get(key).cloned()).unwrap()
}

#[test]
fn every_change_that_matters_is_noted_once_with_both_values() {
    let site = half_way();
    let cases: [(&[&str], &[&str]); 20] = [
        (&[], &[]),
        (
            &["--lr=0.001", "--split=0.969,0.03,0.001", "--micro-batch-size=1", "--log-interval=2"],
            &[],
        ),
        (&["--data-parallel-size=2", "--use-distributed-optimizer"], &[]),
        (
            &["--train-iters=40"],
            &[
                "train_iters is 40 here and 4 in the checkpoint: the learning rate's decay ends after 320 samples, not 32",
            ],
        ),
        // This does not change the schedule.
        (&["--train-iters=40", "--lr-decay-iters=4"], &[]),
        (&["--lr=2e-3"], &["lr is 0.002 here and 0.001 in the checkpoint"]),
        (&["--min-lr=1e-4"], &["min_lr is 0.0001 here and 0.0 in the checkpoint"]),
        (
            &["--lr-decay-style=linear"],
            &["lr_decay_style is linear here and cosine in the checkpoint"],
        ),
        (
            &["--lr-warmup-iters=1"],
            &["the learning rate's warm-up ends after 8 samples, not 0 as in the checkpoint"],
        ),
        (
            &["--lr-decay-iters=9"],
            &["the learning rate's decay ends after 72 samples, not 32 as in the checkpoint"],
        ),
        (&["--weight-decay=0.5"], &["weight_decay is 0.5 here and 0.01 in the checkpoint"]),
        (
            &["--split=50,50,0"],
            &["split is 50,50,0 here and 969,30,1 in the checkpoint: text used for training"],
        ),
        (
            &["--seed=7"],
            &["seed is 7 here and 1234 in the checkpoint: samples are read in another order"],
        ),
        (
            &["--seq-length=8", "--max-position-embeddings=16", "--dataloader-type=sequential"],
            &[
                "seq_length is 8 here and 16 in the checkpoint: the data continue at sample 32 of \
                 the new length, after the 256 tokens",
                "dataloader_type is sequential here and shuffled in the checkpoint",
            ],
        ),
        (
            &["--global-batch-size=4", "--lr-decay-samples=32"],
            &["global_batch_size is 4 here and 8 in the checkpoint"],
        ),
        (
            &["--global-batch-size=4"],
            &[
                "here and 8 in the checkpoint: the learning rate's decay ends after 16 samples, not 32",
                "is over, after 16 samples",
            ],
        ),
        (
            &["--clip-grad=2", "--adam-beta2=0.95"],
            &["clip_grad is 2.0 here and 1.0", "adam_beta2 is 0.95 here and 0.999"],
        ),
        (&["--hidden-dropout=0.2"], &["hidden_dropout is 0.2 here and 0.1 in the checkpoint"]),
        (&["--no-load-optim", "--seed=7"], &["seed is 7 here"]),
        // A separate run.
        (&["--finetune", "--lr=2e-3", "--seed=7"], &[]),
    ];
    for (flags, expected) in cases {
        let log = resume(&site, "/dev/null", flags);
        let notes: Vec<&str> = log.lines().filter(|line| line.starts_with("note: ")).collect();
        assert_eq!(notes.len(), expected.len(), "{flags:?}: {log}");
        for part in expected {
            assert!(
                notes.iter().any(|note| note.contains(part)),
                "{flags:?}: no {part:?} in {log}"
            );
        }
        if expected.is_empty() {
            assert!(!log.contains("checkpoint's"), "{flags:?}: {log}");
        }
    }
}

#[test]
fn the_next_learning_rate_is_told_and_whose_it_is_can_be_said() {
    let site = half_way();
    resume(&site, "as-saved.jsonl", &[]);
    let of_saved = |key: &str| of_step(3, &site, "as-saved.jsonl", key);
    let other = ["--train-iters=40", "--lr=2e-3", "--weight-decay=0.5"];

    let log = resume(&site, "noted.jsonl", &other);
    assert_eq!(log.matches("note: ").count(), 3, "{log}");
    assert!(log.contains("--use-checkpoint-opt-param-scheduler keeps"), "as --help has it: {log}");
    let rate = |value: serde_json::Value| format!("{:.3e}", value.as_f64().unwrap());
    let (ours, theirs) =
        (rate(of_step(3, &site, "noted.jsonl", "learning_rate")), rate(of_saved("learning_rate")));
    assert!(
        log.contains(&format!(
            "learning rate is {ours}; by the checkpoint's schedule it would be {theirs}"
        )),
        "{log}"
    );

    let log =
        resume(&site, "ours.jsonl", &[&other[..], &["--override-opt_param-scheduler"]].concat());
    assert!(!log.contains("note: "), "{log}");
    assert!(log.contains("this run's lr, 0.002, overrides the checkpoint's, 0.001"), "{log}");
    assert_eq!(rate(of_step(3, &site, "ours.jsonl", "learning_rate")), ours);

    let flags = [&other[..], &["--use-checkpoint-opt_param-scheduler", "--save=kept"]].concat();
    let log = resume(&site, "theirs.jsonl", &flags);
    assert!(!log.contains("note: "), "{log}");
    assert!(
        log.contains("the checkpoint's weight_decay, 0.01, is used instead of this run's, 0.5"),
        "{log}"
    );
    for key in ["learning_rate", "lm_loss", "grad_norm"] {
        assert_eq!(of_step(3, &site, "theirs.jsonl", key), of_saved(key), "{key}");
    }
    // Also weight decay: the next loss depends on the weights after that step.
    let next = ["--load=kept", "--exit-interval=4", "--metrics=next.jsonl"];
    let log = stdout(&site.succeed(&[&RUN[..], &next].concat()));
    assert!(!log.contains("note: "), "{log}");
    site.succeed(&[&RUN[..], &["--load=saved", "--metrics=whole.jsonl"]].concat());
    assert_eq!(
        of_step(4, &site, "next.jsonl", "lm_loss"),
        of_step(4, &site, "whole.jsonl", "lm_loss")
    );

    let both = ["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"];
    refused(
        &site.pretrain(&both).output().unwrap(),
        &["give only one", "(--use-checkpoint-opt-param-scheduler)"],
    );
}
