//! Any checkpoint on any layout: saved under one layout, continued under another.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use megatron::Result;
use megatron::config::{IncreaseStyle, OptimizerKind, RunConfig, Takes, WeightDecayIncrease};
use megatron::data::SampleSource;
use megatron::params::StateKind;
use megatron::train::report::Silent;
use megatron::train::{Outcome, Sources};
use system_tests::{
    Style, Tokens, assemble, context, interleave, largest_relative_difference, layout, on_ranks,
    save_after, shares, sources, tiny, train, train_from, trainer,
};

fn writer(style: Style) -> RunConfig {
    let mut config = layout(tiny(style, 0.1), 2, 1, 2);
    config.parallel.zero_stage = 1;
    config
}

#[test]
fn the_same_layout_continues_bitwise() {
    for style in [Style::Gpt2, Style::Llama] {
        let dir = tempfile::tempdir().unwrap();
        let config = writer(style);
        let uninterrupted = train(&config, 20).unwrap();
        let path = save_after(&config, 10, dir.path());
        let resumed = train_from(&config, Some(&path), 10).unwrap();
        assert_eq!(resumed.losses, uninterrupted.losses[10..]);
        assert_eq!(resumed.grad_norms, uninterrupted.grad_norms[10..]);
        assert!(resumed.last == uninterrupted.last, "{style:?}: final state differs");
    }
}

#[test]
fn any_other_layout_follows_the_uninterrupted_run() {
    for style in [Style::Gpt2, Style::Llama] {
        let dir = tempfile::tempdir().unwrap();
        let uninterrupted = train(&writer(style), 20).unwrap();
        let path = save_after(&writer(style), 10, dir.path());
        let layouts = [(1, 2, 1), (1, 1, 1), (1, 2, 4), (4, 1, 1)];
        let mut readers: Vec<_> =
            layouts.map(|(dp, tp, pp)| layout(tiny(style, 0.1), dp, tp, pp)).into();
        readers.push(interleave(layout(tiny(style, 0.1), 1, 2, 2), 2));
        readers.push(context(layout(tiny(style, 0.1), 2, 1, 1), 4));
        readers.push(context(layout(tiny(style, 0.1), 1, 2, 2), 2));
        for reader in readers {
            let resumed = train_from(&reader, Some(&path), 10).unwrap();
            let difference =
                largest_relative_difference(&resumed.losses, &uninterrupted.losses[10..]);
            assert!(
                difference <= 1e-4,
                "{style:?} {:?}: losses differ by {difference:e}",
                reader.parallel
            );
        }
    }
}

#[test]
fn a_checkpoint_passed_through_other_layouts_is_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let first = save_after(&writer(Style::Llama), 3, &dir.path().join("a"));
    let reference = train_from(&writer(Style::Llama), Some(&first), 0).unwrap().last;
    let mut path = first;
    let layouts =
        [(1, 1, 4, 1), (4, 1, 2, 1), (2, 2, 1, 2), (1, 1, 1, 4), (1, 4, 1, 1), (2, 1, 1, 2)];
    for (at, (dp, cp, tp, pp)) in layouts.into_iter().enumerate() {
        let mut config = context(layout(tiny(Style::Llama, 0.1), dp, tp, pp), cp);
        config.parallel.zero_stage = (cp > 1).into();
        let data =
            sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
        let paths = on_ranks(config.parallel.world_size(), |world| {
            let mut trainer = trainer(&config, world, &data)?;
            trainer.load(&path)?;
            trainer.save(&dir.path().join(at.to_string()))
        });
        path = paths.unwrap().remove(0);
    }
    assert!(train_from(&writer(Style::Llama), Some(&path), 0).unwrap().last == reference);
}

#[test]
fn another_architecture_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_after(&tiny(Style::Gpt2, 0.0), 1, dir.path());
    let mut other = tiny(Style::Gpt2, 0.0);
    other.model.num_layers = 4;
    let error = train_from(&other, Some(&path), 1).unwrap_err().to_string();
    assert!(error.contains("num_layers is 8 there and 4 here"), "{error}");
}

/// Records which samples are read.
struct Watched(Tokens, Mutex<Vec<u64>>);

impl SampleSource for Watched {
    fn seq_length(&self) -> usize {
        self.0.seq_length()
    }

    fn num_samples(&self) -> u64 {
        self.0.num_samples()
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
        self.1.lock().unwrap().push(index);
        self.0.sample(index, out)
    }
}

#[test]
fn with_sequences_of_another_length_the_data_go_on_behind_the_tokens_that_were_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_after(&tiny(Style::Llama, 0.0), 3, dir.path());
    let tokens = 3 * 8 * tiny(Style::Llama, 0.0).model.seq_length as u64;
    for length in [8, 12, 16, 28, 64] {
        let mut config = tiny(Style::Llama, 0.0);
        (config.model.seq_length, config.model.max_position_embeddings) = (length, 64);
        let train = Tokens::synthetic(config.model.vocab_size as u32, length);
        let watched = Arc::new(Watched(train, Mutex::default()));
        let data = Sources {
            train: watched.clone(),
            ..sources(Tokens { tokens: vec![0, 0], seq_length: 1 })
        };
        let steps = on_ranks(1, |world| {
            let mut trainer = trainer(&config, world, &data)?;
            trainer.load(&path)?;
            trainer.step()?;
            // Another run continues from here with the same length.
            trainer.save(&dir.path().join(length.to_string()))?;
            trainer.step()
        });
        let step = steps.unwrap().remove(0);
        assert_eq!(
            (step.consumed_samples, step.consumed_tokens),
            (5 * 8, tokens + 2 * 8 * length as u64)
        );
        let read = watched.1.lock().unwrap().clone();
        let first = tokens.div_ceil(length as u64);
        assert_eq!(read, (first..first + 16).collect::<Vec<_>>(), "{length}");
        watched.1.lock().unwrap().clear();
        let saved = dir.path().join(format!("{length}/iter_0000004"));
        on_ranks(1, |world| {
            let mut trainer = trainer(&config, world, &data)?;
            trainer.load(&saved)?;
            trainer.step()
        })
        .unwrap();
        assert_eq!(*watched.1.lock().unwrap(), read[8..], "{length}");
    }
}

/// `config`, with `takes` as the parts of a checkpoint that it loads.
fn taking(mut config: RunConfig, takes: Takes) -> RunConfig {
    config.checkpoint.takes = takes;
    config
}

#[test]
fn a_run_that_takes_weights_alone_is_a_run_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_after(&writer(Style::Llama), 10, dir.path());
    let saved = train_from(&writer(Style::Llama), Some(&path), 0).unwrap().last;
    // No optimizer state is loaded, so another optimizer may train the weights.
    for kind in [OptimizerKind::Adam, OptimizerKind::Sgd] {
        let mut config = taking(layout(tiny(Style::Llama, 0.1), 1, 2, 1), Takes::Weights);
        config.optimizer.kind = kind;
        let data =
            sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
        let ranks = on_ranks(2, |world| {
            let mut trainer = trainer(&config, world, &data)?;
            trainer.load(&path)?;
            assert_eq!(trainer.progress(), Default::default());
            let before = shares(&trainer)?;
            trainer.step()?;
            assert_eq!((trainer.progress().iteration, trainer.progress().consumed_samples), (1, 8));
            Ok(before)
        });
        for ((name, kind), values) in assemble(ranks.unwrap()) {
            match kind {
                StateKind::Param => assert!(saved[&(name.clone(), kind)] == values, "{name}"),
                _ => assert!(values.iter().all(|value| *value == 0.0), "{name} {kind:?}"),
            }
        }
    }
}

#[test]
fn without_the_optimizers_state_a_run_goes_on_where_it_was_with_a_fresh_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_after(&writer(Style::Gpt2), 10, dir.path());
    let uninterrupted = train(&writer(Style::Gpt2), 12).unwrap();
    let resumed =
        train_from(&taking(writer(Style::Gpt2), Takes::WithoutOptimizer), Some(&path), 2).unwrap();
    // The same samples, dropout and weights, but Adam's first step, as in a new run.
    assert_eq!(resumed.losses[0], uninterrupted.losses[10]);
    assert_ne!(resumed.losses[1], uninterrupted.losses[11]);
    let config = taking(tiny(Style::Gpt2, 0.1), Takes::WithoutOptimizer);
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let progress = on_ranks(1, |world| {
        let mut trainer = trainer(&config, world, &data)?;
        trainer.load(&path)?;
        Ok(trainer.progress())
    });
    // Adam's bias correction uses the number of updates in its moments.
    let progress = progress.unwrap()[0];
    assert_eq!((progress.iteration, progress.consumed_samples, progress.updates), (10, 80, 0));
    let mut sgd = writer(Style::Gpt2);
    sgd.optimizer.kind = OptimizerKind::Sgd;
    let error = train_from(&sgd, Some(&path), 1).unwrap_err().to_string();
    assert!(error.contains("--no-load-optim") && error.contains("--finetune"), "{error}");
    let resumed = train_from(&taking(sgd, Takes::WithoutOptimizer), Some(&path), 1).unwrap();
    assert_eq!(resumed.losses[0], uninterrupted.losses[10]);
}

#[test]
fn a_weight_decay_that_grows_goes_on_bitwise_on_every_layout() {
    let dir = tempfile::tempdir().unwrap();
    let grow = |mut config: RunConfig, style| {
        config.optimizer.weight_decay_increase =
            Some(WeightDecayIncrease { start: 0.0, end: 10.0, style, samples: 100 });
        (config.optimizer.warmup_init, config.optimizer.warmup_samples) = (5e-4, 240);
        config
    };
    for style in [IncreaseStyle::Linear, IncreaseStyle::Cosine] {
        let config = grow(writer(Style::Llama), style);
        let uninterrupted = train(&config, 16).unwrap();
        let path = save_after(&config, 6, dir.path());
        // Data and pipeline parallelism change no bit.
        for reader in [config.clone(), grow(layout(tiny(Style::Llama, 0.1), 2, 1, 4), style)] {
            let resumed = train_from(&reader, Some(&path), 10).unwrap();
            assert_eq!(resumed.losses, uninterrupted.losses[6..], "{style:?}");
            assert!(resumed.last == uninterrupted.last, "{style:?}: final state differs");
        }
        let constant = train(&writer(Style::Llama), 16).unwrap();
        assert_ne!(constant.losses[3..], uninterrupted.losses[3..16]);
    }
}

#[test]
fn the_time_of_one_rank_that_is_over_ends_the_run_on_all_after_the_same_step() {
    let mut config = layout(tiny(Style::Gpt2, 0.1), 2, 1, 2);
    config.training.exit_duration_in_mins = Some(30.0);
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let ranks = on_ranks(4, |world| {
        let late = world.rank() == 2;
        let mut trainer = trainer(&config, world, &data)?;
        if late {
            let an_hour = Duration::from_secs(3600);
            trainer.count_minutes_from(
                Instant::now().checked_sub(an_hour).expect("the machine runs for so long"),
            );
        }
        Ok((trainer.run(&mut Silent, &AtomicBool::new(false))?, trainer.progress().iteration))
    });
    assert_eq!(ranks.unwrap(), [(Outcome::ExitDuration, 1); 4]);
}
