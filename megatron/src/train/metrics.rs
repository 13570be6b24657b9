//! The metrics of a step, and their file: one JSON object per line.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::memory::Peak;
use super::timers::StepTimers;
use crate::{Error, Result, files};

/// The metrics of one training step; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepMetrics {
    /// Steps so far, including this one.
    pub iteration: u64,
    /// Steps of the whole run.
    pub train_iters: u64,
    /// Samples read so far over all replicas.
    pub consumed_samples: u64,
    /// Tokens read so far over all replicas.
    pub consumed_tokens: u64,
    /// Mean loss per unmasked token of the global batch, in nats.
    pub lm_loss: f64,
    /// L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// L2 norm of all parameters after this step, if it was requested for this step.
    pub params_norm: Option<f64>,
    /// Number of zero elements in the gradient, if it was requested for this step.
    pub num_zeros_in_grad: Option<f64>,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Factor on the loss in fp16; 1 in other precisions.
    pub loss_scale: f64,
    /// Samples of this step.
    pub global_batch_size: usize,
    /// Wall-clock milliseconds of this step.
    pub elapsed_ms: f64,
    /// Tokens of the global batch per second.
    pub tokens_per_second: f64,
    /// 10¹² floating-point operations per second and rank, by Megatron's count (6·B·S·…, without
    /// recompute).
    pub tflops: f64,
    /// Whether the update was skipped because a gradient was not finite.
    pub skipped: bool,
    /// Skipped updates so far.
    pub skipped_iterations: u64,
    /// Steps with a non-finite loss so far.
    pub nan_iterations: u64,
    /// Consecutive steps, up to this one, with a non-finite loss or gradient; see
    /// [`Progress`](super::Progress).
    pub nonfinite_in_a_row: u64,
    /// Peak memory of a rank so far.
    pub memory: Peak,
    /// Timers over the steps since the last log line, if they were requested and this step has a
    /// log line.
    pub timers: Option<StepTimers>,
}

/// One evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalMetrics {
    /// Steps so far.
    pub iteration: u64,
    /// The part of the data: `validation` or `test`.
    pub split: String,
    /// Mean loss per unmasked token, in nats.
    pub lm_loss: f64,
}

impl EvalMetrics {
    /// Perplexity as Megatron prints it: exp(min(20, loss)).
    pub fn perplexity(&self) -> f64 {
        // `f64::min` would turn NaN into exp(20).
        if self.lm_loss.is_nan() { f64::NAN } else { self.lm_loss.min(20.0).exp() }
    }
}

/// A number as JSON. JSON has no NaN or infinity; these become strings.
fn number(x: f64) -> Value {
    if x.is_finite() {
        json!(x)
    } else if x.is_nan() {
        json!("NaN")
    } else if x > 0.0 {
        json!("Infinity")
    } else {
        json!("-Infinity")
    }
}

impl StepMetrics {
    /// The JSON object of this step in `metrics.jsonl`.
    pub fn to_json(&self) -> Value {
        let mut object = json!({
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "lm_loss": number(self.lm_loss),
            "grad_norm": number(self.grad_norm),
            "learning_rate": number(self.learning_rate),
            "loss_scale": number(self.loss_scale),
            "global_batch_size": self.global_batch_size,
            "elapsed_ms": number(self.elapsed_ms),
            "tokens_per_second": number(self.tokens_per_second),
            "tflops": number(self.tflops),
            "skipped": self.skipped,
            "skipped_iterations": self.skipped_iterations,
            "nan_iterations": self.nan_iterations,
            "memory": self.memory.allocated,
        });
        if let Some(norm) = self.params_norm {
            object["params_norm"] = number(norm);
        }
        if let Some(zeros) = self.num_zeros_in_grad {
            object["num_zeros_in_grad"] = json!(zeros as u64);
        }
        if let Some(reserved) = self.memory.reserved {
            object["memory_reserved"] = json!(reserved);
        }
        if let Some(timers) = &self.timers {
            object["timers"] = timers.to_json();
        }
        object
    }
}

/// Writes `metrics.jsonl`. Only one rank of a run writes the file.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl MetricsWriter {
    /// Opens `path` for a run that continues after `resumed_iteration` (0 for a new run). The file
    /// keeps the lines of an earlier run up to that step; later lines, and a line truncated by a
    /// crash, are removed. A new run renames an existing file and returns the new name. The writer
    /// holds an operating-system lock on the file as long as it lives.
    ///
    /// # Errors
    /// If another active run writes the file, if the file is not a metrics file, or if the file or
    /// its folder cannot be created, read or written.
    pub fn open(path: &Path, resumed_iteration: u64) -> Result<(Self, Option<PathBuf>)> {
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        }
        let (mut file, mut keep, mut aside) = (open_own(path)?, 0, None);
        if file.metadata().is_ok_and(|there| there.is_file() && there.len() > 0) {
            expect_metrics(path)?;
            if resumed_iteration > 0 {
                keep = kept_length(&file, resumed_iteration)
                    .map_err(|e| Error::io("read", path, e))?;
            }
            if keep == 0 {
                aside = Some(move_aside(path)?);
                file = open_own(path)?;
            }
        }
        // A device (/dev/null) has no length to truncate.
        if file.metadata().is_ok_and(|m| m.is_file()) {
            file.set_len(keep).map_err(|e| Error::io("truncate", path, e))?;
            file.seek(std::io::SeekFrom::Start(keep)).map_err(|e| Error::io("seek in", path, e))?;
        }
        Ok((Self { path: path.to_path_buf(), file: BufWriter::new(file) }, aside))
    }

    /// Copies the file at `path` if [`open`](Self::open) would remove steps after
    /// `resumed_iteration` from it. Returns the path of the copy.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn keep_whole(path: &Path, resumed_iteration: u64) -> Result<Option<PathBuf>> {
        let Some(there) = path.metadata().ok().filter(|there| there.is_file() && there.len() > 0)
        else {
            return Ok(None);
        };
        expect_metrics(path)?;
        let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        let keep = kept_length(&file, resumed_iteration).map_err(|e| Error::io("read", path, e))?;
        // A file without lines of this run is renamed as a whole instead.
        if keep == 0 || keep == there.len() {
            return Ok(None);
        }
        let copy = free_name(path);
        std::fs::copy(path, &copy).map_err(|e| Error::io("write", &copy, e))?;
        Ok(Some(copy))
    }

    /// Appends the line of one step and passes it to the operating system.
    ///
    /// # Errors
    /// If the line cannot be written, e.g. on a full disk.
    pub fn step(&mut self, metrics: &StepMetrics) -> Result<()> {
        self.line(&metrics.to_json())
    }

    /// Appends the line of one evaluation: `iteration`, `eval` (the split) and `lm_loss`.
    ///
    /// # Errors
    /// If the line cannot be written, e.g. on a full disk.
    pub fn eval(&mut self, metrics: &EvalMetrics) -> Result<()> {
        self.line(&json!({
            "iteration": metrics.iteration,
            "eval": metrics.split,
            "lm_loss": number(metrics.lm_loss),
            "ppl": number(metrics.perplexity()),
        }))
    }

    /// Appends the last line of a run: `iteration` and `peak_memory`, the peak memory of each rank
    /// in bytes.
    ///
    /// # Errors
    /// If the line cannot be written, e.g. on a full disk.
    pub fn memory(&mut self, iteration: u64, by_rank: &[u64]) -> Result<()> {
        self.line(&json!({ "iteration": iteration, "peak_memory": by_rank }))
    }

    fn line(&mut self, value: &Value) -> Result<()> {
        writeln!(self.file, "{value}")
            .and_then(|()| self.file.flush())
            .map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Opens a file, or creates it, with an exclusive lock. Network file systems may not support locks;
/// the file is then opened without one.
fn open_own(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    // A pipe is refused: writing to a full pipe would block the run, even when the run is told to
    // stop.
    let file =
        files::open_to_write(path, options.read(true).write(true).create(true).truncate(false));
    let file = file.map_err(|e| Error::io("open", path, e))?;
    if file.metadata().is_ok_and(|there| there.is_file())
        && let Err(TryLockError::WouldBlock) = file.try_lock()
    {
        return Err(Error::config(format!(
            "metrics = {} is in use: another run is writing to it; wait until that ends, stop it, or give another name",
            path.display()
        )));
    }
    Ok(file)
}

/// Checks that the file's first line is a line of metrics, or one that a crash truncated.
fn expect_metrics(path: &Path) -> Result<()> {
    // Beginnings of the lines of steps, evaluations and the run's end, which a crash may have
    // truncated.
    const STARTS: [&[u8]; 3] = [b"{\"consumed_samples\"", b"{\"eval\"", b"{\"iteration\""];
    const LONGEST: u64 = 1 << 16;
    let mut line = Vec::new();
    let file = files::open(path).map_err(|e| Error::io("open", path, e))?;
    // Files of other kinds may have very long lines.
    let read = BufReader::new(file).take(LONGEST).read_until(b'\n', &mut line);
    let read = read.map_err(|e| Error::io("read", path, e))? as u64;
    let is_cut_short = !line.ends_with(b"\n")
        && read < LONGEST
        && STARTS.iter().any(|start| line.starts_with(start));
    let object = serde_json::from_slice::<Map<String, Value>>(&line);
    if object.is_ok_and(|object| object.contains_key("iteration")) || is_cut_short {
        return Ok(());
    }
    Err(Error::config(format!(
        "metrics = {} is a file with other content, which metrics would replace; give another name",
        path.display()
    )))
}

/// Renames `path` to a free name and returns that name.
fn move_aside(path: &Path) -> Result<PathBuf> {
    let free = free_name(path);
    std::fs::rename(path, &free).map_err(|e| Error::io("move aside", path, e))?;
    Ok(free)
}

/// The first of `path.1`, `path.2`, … that does not exist.
fn free_name(path: &Path) -> PathBuf {
    let numbered = |number: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let free = (1..).map(numbered).find(|name| std::fs::symlink_metadata(name).is_err());
    free.unwrap_or_else(|| numbered(0))
}

/// Number of bytes in the leading complete lines whose iteration is at most `last`.
fn kept_length(file: &File, last: u64) -> std::io::Result<u64> {
    let mut reader = BufReader::new(file);
    let (mut length, mut line) = (0u64, Vec::new());
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        let iteration = serde_json::from_slice::<Map<String, Value>>(&line)
            .ok()
            .and_then(|object| object.get("iteration").and_then(Value::as_u64));
        if read == 0 || line.last() != Some(&b'\n') || iteration.is_none_or(|i| i > last) {
            return Ok(length);
        }
        length += read as u64;
    }
}

#[cfg(test)]
impl StepMetrics {
    /// Metrics for tests.
    pub(super) fn example(iteration: u64) -> Self {
        Self {
            iteration,
            train_iters: 10,
            consumed_samples: 8 * iteration,
            consumed_tokens: 64 * iteration,
            lm_loss: 2.5,
            grad_norm: 1.0,
            params_norm: None,
            num_zeros_in_grad: None,
            learning_rate: 1e-3,
            loss_scale: 1.0,
            global_batch_size: 8,
            elapsed_ms: 12.5,
            tokens_per_second: 100.0,
            tflops: 0.1,
            skipped: false,
            skipped_iterations: 0,
            nan_iterations: 0,
            nonfinite_in_a_row: 0,
            memory: Peak { allocated: 1 << 20, reserved: None },
            timers: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iterations(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap()["iteration"].as_u64().unwrap())
            .collect()
    }

    #[test]
    fn non_finite_values_are_written_as_strings() {
        let mut m = StepMetrics::example(1);
        m.lm_loss = f64::NAN;
        m.grad_norm = f64::INFINITY;
        let json = m.to_json();
        assert_eq!(json["lm_loss"], "NaN");
        assert_eq!(json["grad_norm"], "Infinity");
    }

    #[test]
    fn the_memory_of_a_gpu_is_what_tensors_held_and_what_was_taken_for_them() {
        let mut m = StepMetrics::example(1);
        assert_eq!(
            (&m.to_json()["memory"], m.to_json().get("memory_reserved")),
            (&json!(1 << 20), None)
        );
        m.memory = Peak { allocated: 5, reserved: Some(8) };
        assert_eq!(
            (&m.to_json()["memory"], &m.to_json()["memory_reserved"]),
            (&json!(5), &json!(8))
        );
    }

    #[test]
    fn perplexity_of_nan_is_nan() {
        let eval = EvalMetrics { iteration: 1, split: "validation".into(), lm_loss: f64::NAN };
        assert!(eval.perplexity().is_nan());
    }

    #[test]
    fn resuming_drops_the_steps_after_the_checkpoint_and_appends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/metrics.jsonl");
        let (mut writer, _) = MetricsWriter::open(&path, 0).unwrap();
        for i in 1..=5 {
            writer.step(&StepMetrics::example(i)).unwrap();
        }
        drop(writer);
        MetricsWriter::open(&path, 3).unwrap().0.step(&StepMetrics::example(4)).unwrap();
        assert_eq!(iterations(&path), [1, 2, 3, 4]);
    }

    #[test]
    fn what_a_run_that_goes_back_removes_is_kept_in_a_copy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let text = "{\"iteration\":1}\n{\"iteration\":2}\n{\"iteration\":3}\n";
        assert_eq!(MetricsWriter::keep_whole(&path, 2).unwrap(), None);
        std::fs::write(&path, text).unwrap();
        assert_eq!(MetricsWriter::keep_whole(&path, 3).unwrap(), None);
        let copy = MetricsWriter::keep_whole(&path, 2).unwrap().unwrap();
        assert_eq!(copy, folder.path().join("metrics.jsonl.1"));
        assert_eq!(std::fs::read_to_string(copy).unwrap(), text);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn a_line_cut_short_by_a_crash_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"iteration\":1}\n{\"iteration\":2").unwrap();
        MetricsWriter::open(&path, 2).unwrap().0.step(&StepMetrics::example(3)).unwrap();
        assert_eq!(iterations(&path), [1, 3]);
    }

    #[test]
    fn a_fresh_run_starts_an_empty_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        for earlier in 1..3 {
            let text = format!("{{\"iteration\":{earlier}}}\n");
            std::fs::write(&path, &text).unwrap();
            let (_, aside) = MetricsWriter::open(&path, 0).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
            // The files of the other runs are kept.
            let kept = folder.path().join(format!("metrics.jsonl.{earlier}"));
            assert_eq!(aside.as_deref(), Some(&*kept));
            assert_eq!(std::fs::read_to_string(kept).unwrap(), text);
        }
    }

    #[test]
    fn a_resumed_run_that_finds_nothing_of_its_own_moves_the_file_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        for (number, text) in
            [(1, "{\"iteration\":7}\n{\"iteration\":8}\n"), (2, "{\"consumed_samples\":3")]
        {
            std::fs::write(&path, text).unwrap();
            let (_, aside) = MetricsWriter::open(&path, 4).unwrap();
            assert_eq!(aside, Some(folder.path().join(format!("metrics.jsonl.{number}"))));
            assert_eq!(std::fs::read_to_string(aside.unwrap()).unwrap(), text);
        }
    }

    #[test]
    fn the_file_of_a_run_that_goes_on_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let (mut theirs, _) = MetricsWriter::open(&path, 0).unwrap();
        for steps in 0..2 {
            for resumed in [0, 1] {
                let error = MetricsWriter::open(&path, resumed).unwrap_err().to_string();
                assert!(
                    error.contains("metrics.jsonl is in use: another run is writing to it"),
                    "{error}"
                );
            }
            theirs.step(&StepMetrics::example(steps + 1)).unwrap();
        }
        assert_eq!(iterations(&path), [1, 2]);
        drop(theirs);
        MetricsWriter::open(&path, 2).unwrap();
    }

    #[test]
    fn a_file_of_something_else_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corpus.txt");
        let long = format!("{{\"text\": \"{}\"}}\n", "a long document ".repeat(5000));
        for text in [
            "A text.\n",
            "A text",
            "{\"text\": \"a document\"}\n",
            "{\"text\": \"a document\"}",
            "\n",
            &long,
        ] {
            std::fs::write(&path, text).unwrap();
            for resumed in [0, 4] {
                let error = MetricsWriter::open(&path, resumed).unwrap_err().to_string();
                assert!(error.contains("corpus.txt is a file with other content"), "{error}");
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
