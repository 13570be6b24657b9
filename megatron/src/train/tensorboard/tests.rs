use std::path::Path;

use super::*;
use crate::config::valid;
use crate::train::TimerEntry;

/// Each step takes longer than the previous one.
fn step(iteration: u64) -> StepMetrics {
    let (elapsed_ms, tflops) = (100.0 * iteration as f64, iteration as f64);
    StepMetrics { elapsed_ms, tflops, ..StepMetrics::example(iteration) }
}

fn writer(dir: &Path, log_timers: bool, log_interval: u64) -> TensorboardWriter {
    let mut run = valid();
    run.logging.log_interval = log_interval;
    let settings = TensorboardConfig {
        dir: dir.to_path_buf(),
        log_interval: 1,
        log_validation_ppl: false,
        log_timers,
        log_memory: false,
    };
    TensorboardWriter::create(&settings, &run, &Progress::default()).unwrap()
}

/// The content of the only event file of `dir`.
fn content(dir: &Path) -> Vec<u8> {
    let mut files = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file());
    let content = std::fs::read(files.next().unwrap()).unwrap();
    assert!(files.next().is_none());
    content
}

/// The values of the curve `tag`, in order.
fn values(content: &[u8], tag: &str) -> Vec<f32> {
    // Field 1 is the tag; field 2 has four bytes.
    let start = [&[0x0a, tag.len() as u8], tag.as_bytes(), &[0x15]].concat();
    let ends = (start.len()..content.len()).filter(|&end| content[..end].ends_with(&start));
    ends.map(|at| f32::from_le_bytes(content[at..at + 4].try_into().unwrap())).collect()
}

#[test]
fn values_are_shown_once_a_second_and_after_evaluations() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = writer(folder.path(), false, 1);
    let shown = || values(&content(folder.path()), "lm loss").len();
    writer.step(&step(1)).unwrap();
    assert_eq!(shown(), 0);
    writer.flushed = Instant::now().checked_sub(DELAY).unwrap();
    writer.step(&step(2)).unwrap();
    assert_eq!(shown(), 2);
    writer.step(&step(3)).unwrap();
    assert_eq!(shown(), 2);
    writer
        .eval(&EvalMetrics { iteration: 3, split: "validation".into(), lm_loss: 2.0 }, 24)
        .unwrap();
    assert_eq!(shown(), 3);
    writer.step(&step(4)).unwrap();
    drop(writer);
    assert_eq!(shown(), 4);
}

#[test]
fn times_are_means_over_the_steps_since_the_last_log_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = writer(folder.path(), true, 2);
    (1..=5).for_each(|iteration| {
        let mut step = step(iteration);
        step.timers = iteration.is_multiple_of(2).then(|| StepTimers {
            option: Default::default(),
            entries: vec![TimerEntry { name: "wait", ms: vec![1.0, 2000.0 * iteration as f64] }],
            details: vec![],
        });
        writer.step(&step).unwrap();
    });
    writer.flush().unwrap();
    let content = content(folder.path());
    assert_eq!(values(&content, "wait-time"), [4.0, 8.0]);
    assert_eq!(values(&content, "iteration-time"), [0.15, 0.35]);
    // The quotient of all operations and all time, not a mean of rates.
    assert_eq!(values(&content, "throughput"), [500.0 / 300.0, 2500.0 / 700.0]);
}
