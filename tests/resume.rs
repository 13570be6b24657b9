//! Any checkpoint on any layout: saved under one cut, continued under another.

use megatron::config::RunConfig;
use system_tests::{
    Style, Tokens, context, interleave, largest_relative_difference, layout, on_ranks, save_after, sources, tiny,
    train, train_from, trainer,
};

fn writer(style: Style) -> RunConfig {
    let mut config = layout(tiny(style, 0.1), 2, 1, 2);
    config.parallel.use_distributed_optimizer = true;
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
        let mut readers: Vec<_> = layouts.map(|(dp, tp, pp)| layout(tiny(style, 0.1), dp, tp, pp)).into();
        readers.push(interleave(layout(tiny(style, 0.1), 1, 2, 2), 2));
        readers.push(context(layout(tiny(style, 0.1), 2, 1, 1), 4));
        readers.push(context(layout(tiny(style, 0.1), 1, 2, 2), 2));
        for reader in readers {
            let resumed = train_from(&reader, Some(&path), 10).unwrap();
            let difference = largest_relative_difference(&resumed.losses, &uninterrupted.losses[10..]);
            assert!(difference <= 1e-4, "{style:?} {:?}: losses differ by {difference:e}", reader.parallel);
        }
    }
}

#[test]
fn a_checkpoint_passed_through_other_layouts_is_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let first = save_after(&writer(Style::Llama), 3, &dir.path().join("a"));
    let reference = train_from(&writer(Style::Llama), Some(&first), 0).unwrap().last;
    let mut path = first;
    let layouts = [(1, 1, 4, 1), (4, 1, 2, 1), (2, 2, 1, 2), (1, 1, 1, 4), (1, 4, 1, 1), (2, 1, 1, 2)];
    for (at, (dp, cp, tp, pp)) in layouts.into_iter().enumerate() {
        let mut config = context(layout(tiny(Style::Llama, 0.1), dp, tp, pp), cp);
        config.parallel.use_distributed_optimizer = cp > 1;
        let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
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
