//! A folder with a small run, and the check after the run's end: nothing of it is left.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{is_alive, kill, megatron, stderr, wait_for};

/// How soon a failing run must end on every rank.
pub const SOON: Duration = Duration::from_secs(10);
/// Marks the processes of a site in their environment.
const MARK: &str = "MEGATRON_TEST_SITE";
/// Ranks of the run in [`RUN`].
pub const RANKS: usize = 4;

const RUN: &str = r#"[model]
num_layers = 4
hidden_size = 32
num_attention_heads = 4
num_query_groups = 2
seq_length = 16
hidden_dropout = 0.1

[parallel]
tensor_model_parallel_size = 2
pipeline_model_parallel_size = 2

[data]
data_path = "text.txt"
tokenizer = "byte"
cache_dir = "cache"

[training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 20

[optimizer]
lr = 1e-3

[logging]
metrics = "metrics.jsonl"
eval_iters = 0
"#;

/// A folder with `run.toml` (TP 2 × PP 2, milliseconds a step) and `text.txt`.
pub struct Site {
    folder: TempDir,
    mark: String,
}

impl Site {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mark = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let site = Self { folder: tempfile::tempdir().unwrap(), mark };
        fs::create_dir(site.path("tmp")).unwrap();
        site.write("run.toml", RUN);
        site.write("text.txt", &"All work and no play makes a dull corpus.\n\n".repeat(200));
        site
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Replaces a part of the run file.
    pub fn edit(&self, from: &str, to: &str) {
        let text = fs::read_to_string(self.path("run.toml")).unwrap();
        assert!(text.contains(from), "{from}");
        self.write("run.toml", &text.replace(from, to));
    }

    /// `command` in this folder and under this site's mark, its output piped.
    pub fn mark(&self, mut command: Command) -> Command {
        command
            .current_dir(self.folder.path())
            .env(MARK, &self.mark)
            .env("TMPDIR", self.path("tmp"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// `megatron pretrain run.toml` with `flags`.
    pub fn pretrain(&self, flags: &[&str]) -> Command {
        let mut command = self.mark(megatron());
        command.args(["pretrain", "run.toml"]).args(flags);
        command
    }

    /// The same as rank `rank` of a world that a launcher started.
    pub fn rank(&self, rank: usize, port: u16, flags: &[&str]) -> Command {
        let mut command = self.pretrain(flags);
        let numbers = [
            ("RANK", rank),
            ("WORLD_SIZE", RANKS),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", RANKS),
        ];
        command.envs(numbers.map(|(name, value)| (name, value.to_string())));
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command
    }

    /// All ranks of a world, started without a supervisor.
    pub fn ranks(&self, flags: &[&str]) -> Vec<Child> {
        let port = free_port();
        (0..RANKS).map(|rank| self.rank(rank, port, flags).spawn().unwrap()).collect()
    }

    /// A run that succeeds.
    pub fn succeed(&self, flags: &[&str]) -> Output {
        let output = self.pretrain(flags).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        output
    }

    /// The running processes of this site.
    pub fn processes(&self) -> Vec<u32> {
        let mark = format!("{MARK}={}", self.mark);
        let marked = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
        };
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(marked).filter(|&pid| is_alive(pid)).collect()
    }

    /// The supervised ranks, by rank; waits for all of them.
    pub fn supervised_ranks(&self) -> Vec<u32> {
        let rank_of = |pid: u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let rank = environment
                .split(|byte| *byte == 0)
                .find_map(|entry| entry.strip_prefix(b"RANK="))?;
            String::from_utf8_lossy(rank).parse::<usize>().ok()
        };
        wait_for("the ranks to start", || {
            let found: BTreeMap<usize, u32> =
                self.processes().into_iter().filter_map(|pid| Some((rank_of(pid)?, pid))).collect();
            (found.len() == RANKS).then(|| found.into_values().collect())
        })
    }

    /// Waits until at least `steps` steps are in the metrics.
    pub fn wait_for_step(&self, steps: u64) {
        wait_for("steps", || (self.last_step() >= steps).then_some(()));
    }

    /// Waits for a step that is minutes away on a busy machine.
    pub fn wait_long_for_step(&self, steps: u64) {
        let start = Instant::now();
        while self.last_step() < steps {
            assert!(start.elapsed() < 30 * SOON, "step {steps} was not reached");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn last_step(&self) -> u64 {
        self.losses().last().map_or(0, |(step, _)| *step)
    }

    /// Steps and losses in `metrics.jsonl`, the losses as they are written.
    pub fn losses(&self) -> Vec<(u64, String)> {
        let text = fs::read_to_string(self.path("metrics.jsonl")).unwrap_or_default();
        let parse = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).ok()?;
            Some((value.get("iteration")?.as_u64()?, value.get("lm_loss")?.to_string()))
        };
        text.lines().filter_map(parse).collect()
    }

    /// Every file of the folder with its content, except the caches.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let paths = walk(self.folder.path()).into_iter().filter(|path| path.is_file());
        let kept = paths.filter(|path| !path.starts_with(self.path("cache")));
        kept.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    }

    /// Asserts that the files are the same as `before` (from [`Self::files`]).
    pub fn assert_unchanged(&self, before: &BTreeMap<PathBuf, Vec<u8>>) {
        let after = self.files();
        for path in before.keys().chain(after.keys()) {
            assert!(before.get(path) == after.get(path), "{} is not what it was", path.display());
        }
    }

    /// Asserts that no process, socket, temporary file or shared memory of the site's runs is left.
    pub fn assert_nothing_left(&self) {
        wait_for("the processes to end", || self.processes().is_empty().then_some(()));
        for path in walk(self.folder.path()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let kind = fs::symlink_metadata(&path).unwrap().file_type();
            assert!(!kind.is_socket() && !kind.is_fifo(), "{}", path.display());
            assert!(!name.ends_with(".tmp") && !name.ends_with(".old"), "{}", path.display());
            assert!(
                !path.starts_with(self.path("tmp")) || path == self.path("tmp"),
                "{}",
                path.display()
            );
        }
        for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            assert!(
                !entry.file_name().to_string_lossy().contains("megatron"),
                "{:?}",
                entry.file_name()
            );
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // A failed test leaves nothing running.
        for pid in self.processes() {
            let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        }
    }
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut paths = vec![];
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.path().is_dir() {
            paths.extend(walk(&entry.path()));
        }
        paths.push(entry.path());
    }
    paths
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Waits at most `limit` for each process; those that did not end are killed and the test fails.
pub fn ended(children: Vec<Child>, limit: Duration) -> Vec<Output> {
    let (start, pids) = (Instant::now(), children.iter().map(Child::id).collect::<Vec<_>>());
    let waiting: Vec<_> = children
        .into_iter()
        .map(|child| std::thread::spawn(|| child.wait_with_output().unwrap()))
        .collect();
    while !waiting.iter().all(std::thread::JoinHandle::is_finished) && start.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(10));
    }
    let late: Vec<u32> =
        pids.iter().zip(&waiting).filter(|(_, w)| !w.is_finished()).map(|(pid, _)| *pid).collect();
    late.iter().for_each(|&pid| kill(pid, "KILL"));
    let outputs: Vec<Output> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
    let said: Vec<String> = outputs.iter().map(stderr).collect();
    assert!(
        late.is_empty(),
        "processes {late:?} of {pids:?} did not end within {limit:?}: {said:?}"
    );
    outputs
}

/// Asserts that a process failed with one message that contains all of `parts`.
pub fn refused(output: &Output, parts: &[&str]) {
    let text = stderr(output);
    assert!(!output.status.success(), "succeeded, but had to say {parts:?}");
    assert!(output.status.code().is_some(), "{:?}: {text}", output.status);
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    for word in ["panicked", "backtrace", "internal error"] {
        assert!(!text.contains(word), "{text}");
    }
}
