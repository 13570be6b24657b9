//! `megatron bench`, seen from outside.

use std::collections::BTreeMap;

use crate::site::Site;
use crate::support::{megatron, stderr, stdout};

/// Runs `megatron bench` with `words` and returns its output.
fn bench(words: &[&str]) -> String {
    let output = megatron().arg("bench").args(words).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

/// The `key=value` pairs of the line in the format of the PyTorch script.
fn figures(text: &str) -> BTreeMap<&str, &str> {
    let line = text.lines().find(|line| line.contains("tokens_per_second=")).unwrap();
    line.split(' ').filter_map(|word| word.split_once('=')).collect()
}

#[test]
fn steps_are_timed_on_the_ranks_of_a_layout() {
    let layout = [
        "--tensor-model-parallel-size=2",
        "--sequence-parallel",
        "--threads=1",
        "--micro-batch-size=1",
    ];
    let memory = "--recompute-granularity=full";
    let text =
        bench(&[&["step", "--preset=llama-small", "--steps=1", memory], &layout[..]].concat());
    let figures = figures(&text);
    for (key, expected) in [
        ("layout", "tp2·pp1·dp1·sp·full-recompute"),
        ("world", "2"),
        ("threads", "1"),
        ("params", "12.6M"),
    ] {
        assert_eq!(figures[key], expected, "{text}");
    }
    for key in ["tokens_per_second", "tflops", "peak_gib"] {
        assert!(figures[key].parse::<f64>().unwrap() > 0.0, "{text}");
    }
    // Random tokens cannot be learned: the loss stays near ln 8192 = 9.01.
    assert!((figures["loss"].parse::<f64>().unwrap() - 9.01).abs() < 0.3, "{text}");
}

#[test]
fn steps_are_timed_in_16_bits() {
    for precision in ["bf16", "fp16"] {
        let flag = format!("--{precision}");
        let text =
            bench(&["step", "--preset=llama-small", "--steps=1", "--micro-batch-size=1", &flag]);
        assert!(text.contains(&format!(" cpu llama-small {precision} layout=")), "{text}");
        assert!((figures(&text)["loss"].parse::<f64>().unwrap() - 9.01).abs() < 0.3, "{text}");
    }
    let output = megatron().args(["bench", "step", "--hysteresis=1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("hysteresis (--hysteresis) is a setting of fp16"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_layout_that_does_not_fit_the_preset_names_both() {
    let output =
        megatron().args(["bench", "step", "--tensor-model-parallel-size=4"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = stderr(&output);
    assert!(
        message.contains("--preset small") && message.contains("--tensor-model-parallel-size"),
        "{message}"
    );
}

#[test]
fn collectives_run_between_processes_on_every_backend() {
    for backend in ["local", "tcp", "threads"] {
        let text = bench(&[
            "collectives",
            "--ranks=3",
            "--backend",
            backend,
            "--sizes=4K,64K",
            "--milliseconds=1",
        ]);
        for operation in ["all_reduce", "all_gather", "reduce_scatter", "send/recv"] {
            let rows =
                text.lines().filter(|line| line.starts_with(&format!("| {operation} "))).count();
            assert_eq!(rows, 2, "{backend}: {text}");
        }
    }
}

#[test]
fn kernels_are_timed_at_the_shapes_of_a_preset() {
    let words = [
        "kernels",
        "--preset=llama-small",
        "--micro-batch-size=1",
        "--milliseconds=1",
        "--only=norm",
    ];
    let text = bench(&words);
    assert!(text.contains("| rms_norm_backward | 256×384 |"), "{text}");
    assert!(!text.contains("| linear"), "{text}");
}

#[test]
fn only_what_is_asked_for_is_timed_and_nothing_is_an_error() {
    let text = bench(&["collectives", "--sizes=4K", "--milliseconds=1", "--only=gather"]);
    assert!(text.contains("| all_gather") && !text.contains("reduce"), "{text}");
    for words in [["collectives", "--only=gater"], ["kernels", "--only=gater"]] {
        let output =
            megatron().args(["bench", words[0], "--milliseconds=1", words[1]]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(stderr(&output).contains("--only gater"), "{words:?}");
    }
}

#[test]
fn numbers_of_nothing_are_refused() {
    for words in [
        ["step", "--steps=0"],
        ["kernels", "--threads=0"],
        ["collectives", "--ranks=1"],
        ["collectives", "--sizes=1"],
    ] {
        let output = megatron().arg("bench").args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
    }
}

#[test]
fn a_step_can_be_profiled_on_every_rank() {
    let site = Site::new();
    let traces = site.path("traces");
    let dir = format!("--profile-dir={}", traces.display());
    let words = [
        "step",
        "--preset=llama-small",
        "--steps=1",
        "--micro-batch-size=1",
        "--data-parallel-size=2",
        &dir,
    ];
    let text = bench(&[&words[..], &["--global-batch-size=2", "--profile"]].concat());
    assert!(text.contains("tokens_per_second=") && text.contains("profile: 4 steps"), "{text}");
    assert!(text.contains("mean of 2 ranks") && text.contains("| linear_wgrad "), "{text}");
    for rank in 0..2 {
        assert!(traces.join(format!("trace_rank_{rank:05}.json")).exists());
    }
    let output = megatron().args(["bench", "step", &dir]).output().unwrap();
    assert!(
        stderr(&output).contains("--profile"),
        "a folder without a profile: {}",
        stderr(&output)
    );
}
