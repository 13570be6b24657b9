//! Timers: on every layout the entries of a rank add up to its step, with evaluations between, and
//! a slow rank's time is what the others wait for.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use megatron::config::{Recompute, RecomputeMethod, RunConfig, TimingLogOption};
use megatron::data::SampleSource;
use megatron::train::{EvalMetrics, Profile, Reporter, Sources, StepMetrics};
use system_tests::{Style, Tokens, interleave, layout, on_ranks, sources, tiny, trainer};

/// Remembers the steps of a rank.
#[derive(Default)]
struct Steps(Vec<StepMetrics>);

impl Reporter for Steps {
    fn start(&mut self, _: u64, _: u64) {}
    fn step(&mut self, metrics: &StepMetrics) {
        self.0.push(metrics.clone());
    }
    fn eval(&mut self, _: &EvalMetrics) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}
    fn profile(&mut self, _: &Profile) {}
    fn message(&mut self, _: &str) {}
}

/// Five steps with a summary every two steps, and an evaluation after every step.
fn timed(mut config: RunConfig, level: u8) -> RunConfig {
    config.training.train_iters = 5;
    let logging = &mut config.logging;
    (logging.log_interval, logging.eval_interval, logging.eval_iters) = (2, Some(1), 2);
    (logging.timing_log_level, logging.timing_log_option) = (level, TimingLogOption::All);
    config
}

/// The steps of each rank. `data` is that of a rank.
fn steps(config: &RunConfig, data: impl Fn(usize) -> Sources + Sync) -> Vec<Vec<StepMetrics>> {
    let ranks = on_ranks(config.parallel.world_size(), |world| {
        let sources = data(world.rank());
        let mut steps = Steps::default();
        trainer(config, world, &sources)?.run(&mut steps, &AtomicBool::new(false))?;
        Ok(steps.0)
    });
    ranks.expect("every rank trains")
}

fn tokens(config: &RunConfig) -> Tokens {
    Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length)
}

/// Largest time of a rank in an entry or detail of the last summary.
fn largest(steps: &[StepMetrics], name: &str) -> f64 {
    let timers = steps.last().and_then(|step| step.timers.as_ref()).expect("the last step's");
    let all = timers.entries.iter().chain(&timers.details);
    let found = all.into_iter().find(|entry| entry.name == name);
    found.unwrap_or_else(|| panic!("no {name}")).ms.iter().copied().fold(0.0, f64::max)
}

#[test]
fn the_entries_of_a_rank_add_up_to_its_step_on_every_layout() {
    let plain = tiny(Style::Llama, 0.0);
    let sharded = |stage: u8, recompute| {
        let mut config = layout(plain.clone(), 2, 1, 1);
        (config.parallel.zero_stage, config.parallel.overlap_grad_reduce) = (stage, stage != 1);
        config.training.recompute = recompute;
        config
    };
    let full = Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 };
    let cases: [(&str, RunConfig, &[&str]); 8] = [
        ("alone", plain.clone(), &["output"]),
        ("dp", layout(plain.clone(), 2, 1, 1), &["reduce"]),
        ("tp", layout(plain.clone(), 1, 2, 1), &["wait"]),
        ("pp", layout(plain.clone(), 1, 1, 2), &["receive", "send"]),
        ("interleaved", interleave(layout(plain.clone(), 1, 1, 2), 2), &["receive"]),
        ("ZeRO-1", sharded(1, Recompute::None), &["reduce", "gather"]),
        ("ZeRO-2", sharded(2, Recompute::None), &["reduce", "gather"]),
        ("ZeRO-3", sharded(3, full), &["gather", "recompute"]),
    ];
    for (what, config, positive) in cases {
        let config = timed(config, 2);
        let data = |_| {
            let mut data = sources(tokens(&config));
            data.valid = Some(data.train.clone());
            data
        };
        let of_ranks = steps(&config, data);
        for (rank, steps) in of_ranks.iter().enumerate() {
            let mut since = 0;
            for (at, step) in steps.iter().enumerate() {
                let due = [2, 4, 5].contains(&step.iteration);
                assert_eq!(step.timers.is_some(), due, "{what}: step {}", step.iteration);
                let Some(timers) = &step.timers else { continue };
                assert_eq!(timers, of_ranks[0][at].timers.as_ref().unwrap(), "{what}");
                let interval = &steps[since..=at];
                let elapsed: f64 = interval.iter().map(|step| step.elapsed_ms).sum();
                let mean = elapsed / interval.len() as f64;
                since = at + 1;
                let sum: f64 = timers.entries.iter().map(|entry| entry.ms[rank]).sum();
                assert!((sum / mean - 1.0).abs() < 0.05, "{what}: {sum} of {mean} in {timers:?}");
            }
        }
        for name in ["forward", "backward", "optimizer"].iter().chain(positive) {
            assert!(largest(&of_ranks[0], name) > 0.0, "{what}: {name}");
        }
    }
}

/// Samples that take long to read.
struct Slow(Tokens);

impl SampleSource for Slow {
    fn seq_length(&self) -> usize {
        self.0.seq_length()
    }

    fn num_samples(&self) -> u64 {
        self.0.num_samples()
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> megatron::Result<()> {
        std::thread::sleep(Duration::from_millis(10));
        self.0.sample(index, out)
    }
}

#[test]
fn the_time_of_a_slow_rank_is_the_waiting_of_the_others() {
    let config = timed(layout(tiny(Style::Llama, 0.0), 1, 1, 2), 1);
    let data = |rank| {
        let mut data = sources(tokens(&config));
        if rank == 0 {
            data.train = Arc::new(Slow(tokens(&config)));
        }
        data
    };
    let steps = steps(&config, data);
    let timers = steps[0].last().and_then(|step| step.timers.as_ref()).expect("the last step's");
    let entry =
        |name: &str| &timers.entries.iter().find(|entry| entry.name == name).expect("an entry").ms;
    let slow = entry("other")[0];
    assert!(entry("wait")[1] > slow / 2.0 && entry("other")[1] < slow / 2.0, "{timers:?}");
    assert!(timers.details.is_empty());
}
