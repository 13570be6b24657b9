//! Fuzzes one target: inputs with new coverage are kept and mutated further.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::coverage::Coverage;
use crate::memory::peak_of;
use crate::mutate::{Random, mutate};
use crate::targets::Target;

/// Memory that a run may take per byte of input, in addition to the target's constant limit.
const MEMORY_PER_BYTE: usize = 4096;
const TIME: Duration = Duration::from_secs(5);

/// Statistics of a fuzzing run.
pub struct Report {
    pub runs: u64,
    pub inputs: usize,
    pub edges: usize,
}

/// Runs the target on its seeds and on mutations of them for `time`. `current` is the file of the
/// present input, which remains if the process dies.
///
/// # Errors
/// The input that broke the rule, and the violation.
pub fn fuzz(
    target: &Target,
    time: Duration,
    seed: u64,
    current: &Path,
) -> Result<Report, (Vec<u8>, String)> {
    let folder = tempfile::tempdir_in(scratch())
        .map_err(|error| (Vec::new(), format!("no folder: {error}")))?;
    let (mut coverage, mut random) = (Coverage::default(), Random::new(seed));
    let mut inputs: Vec<Vec<u8>> = (target.seeds)();
    inputs.extend(found(target.name));
    let mut runs = 0;
    let mut run = |input: &[u8], coverage: &mut Coverage| {
        runs += 1;
        attempt(target, folder.path(), input, coverage, current)
            .map_err(|why| (input.to_vec(), why))
    };
    for input in &inputs {
        run(input, &mut coverage)?;
    }
    let start = Instant::now();
    while start.elapsed() < time {
        // Later inputs are chosen more often, because they were found last.
        let (a, b) = (random.below(inputs.len()), random.below(inputs.len()));
        let mut input = inputs[a.max(b)].clone();
        let other = &inputs[random.below(inputs.len())];
        mutate(&mut random, &mut input, other, target.words);
        if run(&input, &mut coverage)? {
            inputs.push(input);
        }
    }
    Ok(Report { runs, inputs: inputs.len(), edges: coverage.edges() })
}

/// Inputs that broke the rule in the past.
fn found(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("found").join(target);
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| fs::read(entry.path()).ok()).collect()
}

/// A folder in memory, if the system offers one.
fn scratch() -> PathBuf {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { shared.to_path_buf() } else { std::env::temp_dir() }
}

/// Runs the target once. Returns whether it showed something new.
fn attempt(
    target: &Target,
    folder: &Path,
    input: &[u8],
    coverage: &mut Coverage,
    current: &Path,
) -> Result<bool, String> {
    fs::write(current, input).map_err(|error| format!("{}: {error}", current.display()))?;
    Coverage::reset();
    let start = Instant::now();
    let (result, peak) = peak_of(|| catch_unwind(AssertUnwindSafe(|| (target.run)(folder, input))));
    let elapsed = start.elapsed();
    if result.is_err() {
        return Err("it panicked".into());
    }
    let most = target.memory + MEMORY_PER_BYTE * input.len();
    if peak > most {
        return Err(format!("it took {} MB for {} bytes", peak / 1_000_000, input.len()));
    }
    if elapsed > TIME {
        return Err(format!("it took {:.1} s", elapsed.as_secs_f64()));
    }
    Ok(coverage.add())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets;

    fn broken(run: fn(&Path, &[u8])) -> String {
        let current = tempfile::NamedTempFile::new().unwrap();
        let target = Target {
            name: "broken",
            seeds: || vec![b"harmless".to_vec()],
            words: &[],
            run,
            memory: 1 << 20,
        };
        let (input, why) = fuzz(&target, Duration::from_secs(60), 1, current.path()).err().unwrap();
        assert_eq!(fs::read(current.path()).unwrap(), input);
        why
    }

    /// One test, because memory is counted for the whole process.
    #[test]
    fn what_breaks_the_rule_is_noticed_and_seeds_do_not() {
        assert!(broken(|_, input| assert!(!input.contains(&0xff))).contains("panicked"));
        let hungry = |_: &Path, input: &[u8]| {
            drop(vec![0u8; if input.contains(&0xff) { 1 << 30 } else { 0 }])
        };
        assert!(broken(hungry).contains("MB for"));
        let current = tempfile::NamedTempFile::new().unwrap();
        for target in targets::all() {
            let report = fuzz(&target, Duration::ZERO, 1, current.path());
            assert!(report.map_err(|(_, why)| why).unwrap().runs > 0, "{}", target.name);
        }
    }
}
