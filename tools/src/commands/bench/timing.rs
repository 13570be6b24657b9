//! Repeated timing of one operation.

use std::time::{Duration, Instant};

use kernels::peak::Instruction;
use megatron::Result;

/// Calls that are not timed: the first calls fault memory in and start threads.
const WARM_UP: usize = 2;
/// Minimum and maximum number of timed calls.
const CALLS: (usize, usize) = (5, 2000);

/// Seconds of repeated calls of one operation, in ascending order.
#[derive(Clone, Debug)]
pub struct Timing(Vec<f64>);

impl Timing {
    /// `seconds` of at least one call, in any order.
    pub fn new(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Self(seconds)
    }

    /// The middle call, or the mean of the middle two.
    pub fn median(&self) -> f64 {
        let (lower, upper) = (self.0.len().saturating_sub(1) / 2, self.0.len() / 2);
        (self.0[lower] + self.0[upper]) / 2.0
    }

    /// The call that took the least time.
    pub fn fastest(&self) -> f64 {
        self.0[0]
    }

    /// The call that took the most time.
    pub fn slowest(&self) -> f64 {
        self.0[self.0.len() - 1]
    }
}

/// How many calls of `seconds` each fill `budget`.
pub fn calls_within(budget: Duration, seconds: f64) -> usize {
    ((budget.as_secs_f64() / seconds.max(1e-9)) as usize).clamp(CALLS.0, CALLS.1)
}

/// Calls `operation` for about `budget` after a warm-up.
///
/// # Errors
/// Those of `operation`.
pub fn repeat<R>(budget: Duration, mut operation: impl FnMut() -> Result<R>) -> Result<Timing> {
    let mut last = 0.0;
    for _ in 0..WARM_UP {
        last = time(&mut operation)?;
    }
    (0..calls_within(budget, last))
        .map(|_| time(&mut operation))
        .collect::<Result<_>>()
        .map(Timing::new)
}

/// Calls `operation` for about `budget` after a warm-up, and runs `instruction` on all threads
/// before and after every call, each as long as the call took. Returns the times, and for an
/// operation of `flops` operations the share of the rate around it that each call reached. On a
/// shared machine, clocks and neighbours change the speed by up to half within seconds; this
/// affects both measurements equally.
///
/// # Errors
/// Those of `operation`.
pub fn repeat_beside<R>(
    budget: Duration,
    instruction: Instruction,
    flops: usize,
    mut operation: impl FnMut() -> Result<R>,
) -> Result<(Timing, Timing)> {
    let mut last = 0.0;
    for _ in 0..WARM_UP {
        last = time(&mut operation)?;
    }
    let rounds = rounds_of(instruction, last.max(1e-3));
    let (mut seconds, mut shares) = (Vec::new(), Vec::new());
    let mut before = rate_of_all(instruction, rounds);
    for _ in 0..calls_within(budget, last) {
        let took = time(&mut operation)?;
        let after = rate_of_all(instruction, rounds);
        seconds.push(took);
        shares.push(flops as f64 / took / ((before + after) / 2.0));
        before = after;
    }
    Ok((Timing::new(seconds), Timing::new(shares)))
}

/// Seconds of one call. Results are dropped within the time, as a training step drops them.
fn time<R>(operation: &mut impl FnMut() -> Result<R>) -> Result<f64> {
    let start = Instant::now();
    drop(std::hint::black_box(operation()?));
    Ok(start.elapsed().as_secs_f64())
}

/// Peak rate of `instruction` on the threads of the current pool, in 10⁹ operations per second: the
/// sum of the threads' rates in the best of several runs, because neighbours on a shared machine
/// slow down some runs. A run is long enough for the clock to settle.
pub fn peak(instruction: Instruction, budget: Duration) -> f64 {
    let rounds = rounds_of(instruction, 0.01);
    let start = Instant::now();
    let mut best = 0f64;
    while best == 0.0 || start.elapsed() < budget {
        best = best.max(rate_of_all(instruction, rounds));
    }
    best / 1e9
}

/// Operations per second of one thread.
fn rate(instruction: Instruction, rounds: usize) -> f64 {
    let start = Instant::now();
    instruction.run(rounds) / start.elapsed().as_secs_f64().max(1e-9)
}

/// The sum of the rates of all threads of the current pool.
fn rate_of_all(instruction: Instruction, rounds: usize) -> f64 {
    rayon::broadcast(|_| rate(instruction, rounds)).iter().sum()
}

/// Rounds that take about `seconds`.
fn rounds_of(instruction: Instruction, seconds: f64) -> usize {
    (rate(instruction, 10_000) / instruction.run(1) * seconds) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_middle_two() {
        assert_eq!(Timing::new(vec![9.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Timing::new(vec![9.0, 1.0, 2.0, 4.0]).median(), 3.0);
        assert_eq!(Timing::new(vec![7.0]).median(), 7.0);
    }

    #[test]
    fn the_number_of_calls_follows_the_budget_within_bounds() {
        let second = Duration::from_secs(1);
        assert_eq!(calls_within(second, 0.01), 100);
        assert_eq!(calls_within(second, 10.0), CALLS.0);
        assert_eq!(calls_within(second, 0.0), CALLS.1);
    }
}
