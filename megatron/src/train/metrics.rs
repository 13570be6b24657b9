//! The numbers of a step, and the file of them: one JSON object a line.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::memory::Peak;
use crate::{Error, Result, files};

/// One training step, as every rank knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct StepMetrics {
    /// Steps made so far, this one included.
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
    /// L2 norm of all parameters after this step, of steps that it was asked for.
    pub params_norm: Option<f64>,
    /// Elements of the gradient that are zero, of steps that it was asked for.
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
    /// 10¹² floating-point operations per second and rank, by Megatron's count (6·B·S·…, recompute
    /// not counted).
    pub tflops: f64,
    /// Whether the update was left out because a gradient was not finite.
    pub skipped: bool,
    /// Updates left out so far.
    pub skipped_iterations: u64,
    /// Steps so far whose loss was not finite.
    pub nan_iterations: u64,
    /// Steps in a row, up to this one, whose loss or gradient was not finite; see
    /// [`Progress`](super::Progress).
    pub nonfinite_in_a_row: u64,
    /// Largest memory of a rank so far.
    pub memory: Peak,
}

/// One evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalMetrics {
    /// Steps made so far.
    pub iteration: u64,
    /// Which part of the data: `validation` or `test`.
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

/// A number as JSON; JSON has no NaN or infinity, so these are strings.
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
    /// The object of this step in `metrics.jsonl`.
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
        object
    }
}

/// Writes `metrics.jsonl`. One rank of a run owns the file.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl MetricsWriter {
    /// Opens `path` for a run that continues after `resumed_iteration` (0 for a fresh one). What a
    /// previous run wrote up to that step stays; later lines, and a line cut short by a crash, are
    /// removed. A fresh run moves another one's file aside, and tells where to. As long as the
    /// writer lives, the file is its own: the lock is the operating system's.
    ///
    /// # Errors
    /// If a run that goes on writes the file, there is one of something else, or it or its folder
    /// cannot be created, read or written.
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
        // A device (/dev/null) has no length to cut.
        if file.metadata().is_ok_and(|m| m.is_file()) {
            file.set_len(keep).map_err(|e| Error::io("truncate", path, e))?;
            file.seek(std::io::SeekFrom::Start(keep)).map_err(|e| Error::io("seek in", path, e))?;
        }
        Ok((Self { path: path.to_path_buf(), file: BufWriter::new(file) }, aside))
    }

    /// Copies the file at `path`, if [`open`](Self::open) would remove steps after
    /// `resumed_iteration` from it, and tells where to.
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
        // What has nothing of this run's is moved aside as a whole.
        if keep == 0 || keep == there.len() {
            return Ok(None);
        }
        let copy = free_name(path);
        std::fs::copy(path, &copy).map_err(|e| Error::io("write", &copy, e))?;
        Ok(Some(copy))
    }

    /// Appends the line of one step and hands it to the operating system.
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

    /// Appends the last line of a run: `iteration` and `peak_memory`, the largest memory of each
    /// rank in bytes.
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

/// Opens a file, which is made where it is missing, for one run alone. Network file systems may
/// know no locks; then it is opened all the same.
fn open_own(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    // Not a pipe: a full one would hold the run up, also where it is told to stop.
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

/// Asserts that the file's first line is one of metrics, or what a crash left of one.
fn expect_metrics(path: &Path) -> Result<()> {
    // Of the lines of steps, evaluations and the end, as a crash may leave one.
    const STARTS: [&[u8]; 3] = [b"{\"consumed_samples\"", b"{\"eval\"", b"{\"iteration\""];
    const LONGEST: u64 = 1 << 16;
    let mut line = Vec::new();
    let file = files::open(path).map_err(|e| Error::io("open", path, e))?;
    // Lines of other files may be long.
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

/// Renames `path` to a free name and returns that.
fn move_aside(path: &Path) -> Result<PathBuf> {
    let free = free_name(path);
    std::fs::rename(path, &free).map_err(|e| Error::io("move aside", path, e))?;
    Ok(free)
}

/// The first free one of `path.1`, `path.2`, …
fn free_name(path: &Path) -> PathBuf {
    let numbered = |number: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let free = (1..).map(numbered).find(|name| std::fs::symlink_metadata(name).is_err());
    free.unwrap_or_else(|| numbered(0))
}

/// Bytes of the leading complete lines whose iteration is at most `last`.
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
    /// A step as tests have it.
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
            // The other run's are kept.
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
