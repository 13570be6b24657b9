//! Resharded checkpoints equal those that a run of the other layout would have saved.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use megatron::checkpoint::{Manifest, latest};
use megatron::config::{Origins, PartitionMethod, RunConfig};
use models::SavedGpt;
use system_tests::{
    Style, Tokens, context, interleave, largest_relative_difference, layout, on_ranks, sources,
    tiny, train_from, trainer,
};

fn data(config: &RunConfig) -> megatron::train::Sources {
    sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length))
}

/// Trains three steps under dp 2 · pp 2 with ZeRO-1 and small buckets, and saves.
fn first(style: Style, dir: &Path) -> PathBuf {
    let config = writer(style);
    let paths = on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = trainer(&config, world, &data(&config))?;
        for _ in 0..3 {
            trainer.step()?;
        }
        trainer.save(dir)
    });
    paths.unwrap().remove(0)
}

fn writer(style: Style) -> RunConfig {
    let mut config = layout(tiny(style, 0.1), 2, 1, 2);
    config.parallel.zero_stage = 1;
    config.parallel.bucket_size = 5000;
    config
}

/// Loads a checkpoint under `config` and saves it: the expected result of resharding.
fn saved_by_ranks(config: &RunConfig, from: &Path, dir: &Path) -> PathBuf {
    let paths = on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = trainer(config, world, &data(config))?;
        trainer.load(from)?;
        trainer.save(dir)
    });
    paths.unwrap().remove(0)
}

fn reshard(from: &Path, dir: &Path, config: &RunConfig) -> PathBuf {
    let saved = SavedGpt::open(from).unwrap();
    assert!(saved.reshard(dir, &config.parallel, &Origins::default(), &mut |_| true).unwrap());
    latest(dir).unwrap().unwrap().path
}

/// The files of a checkpoint, except the manifest, by name.
fn shards(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let manifest = Manifest::read(path).unwrap();
    manifest
        .files
        .keys()
        .map(|name| (name.clone(), std::fs::read(path.join(name)).unwrap()))
        .collect()
}

fn readers(style: Style) -> Vec<RunConfig> {
    let base = || tiny(style, 0.1);
    let mut zero = layout(base(), 4, 2, 1);
    zero.parallel.zero_stage = 1;
    zero.parallel.bucket_size = 3000;
    let mut uneven = layout(base(), 1, 1, 3);
    uneven.parallel.partition = PartitionMethod::Explicit(vec![1, 5, 2]);
    let mut of_parts = context(layout(base(), 2, 2, 1), 2);
    of_parts.parallel.bucket_size = 3000;
    let long = context(layout(base(), 1, 1, 2), 4);
    let interleaved = interleave(layout(base(), 1, 2, 2), 2);
    vec![
        layout(base(), 1, 4, 1),
        zero,
        of_parts,
        interleaved,
        long,
        uneven,
        layout(base(), 1, 1, 1),
    ]
}

#[test]
fn the_files_of_every_rank_are_those_that_a_run_of_the_layout_saves() {
    for style in [Style::Gpt2, Style::Llama] {
        let dir = tempfile::tempdir().unwrap();
        let source = first(style, &dir.path().join("first"));
        for (i, reader) in readers(style).iter().enumerate() {
            let expected = saved_by_ranks(reader, &source, &dir.path().join(format!("saved{i}")));
            let path = reshard(&source, &dir.path().join(format!("resharded{i}")), reader);
            assert!(
                shards(&path) == shards(&expected),
                "{style:?} {:?}: files differ",
                reader.parallel
            );
            let (ours, theirs) =
                (Manifest::read(&path).unwrap(), Manifest::read(&expected).unwrap());
            assert_eq!(ours.tensors, theirs.tensors);
            assert_eq!(ours.state["config"]["parallel"], theirs.state["config"]["parallel"]);
            assert_eq!(ours.state["progress"], theirs.state["progress"]);
        }
    }
}

#[test]
fn a_round_of_layouts_gives_the_first_files_and_each_resumes_with_the_same_loss() {
    let dir = tempfile::tempdir().unwrap();
    let config = writer(Style::Llama);
    let source = first(Style::Llama, &dir.path().join("first"));
    let uninterrupted = train_from(&config, Some(&source), 5).unwrap();
    let mut path = source.clone();
    let mut round = readers(Style::Llama);
    round.truncate(3); // dp 1 · tp 4, dp 4 · tp 2, and dp 2 · cp 2 · tp 2
    round.push(config);
    for (i, reader) in round.iter().enumerate() {
        path = reshard(&path, &dir.path().join(i.to_string()), reader);
        let resumed = train_from(reader, Some(&path), 5).unwrap();
        assert!(
            resumed.initial == uninterrupted.initial,
            "{:?}: the state differs",
            reader.parallel
        );
        let difference = largest_relative_difference(&resumed.losses, &uninterrupted.losses);
        assert!(difference <= 1e-4, "{:?}: losses differ by {difference:e}", reader.parallel);
    }
    assert!(shards(&path) == shards(&source));
}

#[test]
fn layouts_that_do_not_divide_the_model_are_refused_with_the_equation() {
    let dir = tempfile::tempdir().unwrap();
    let saved = SavedGpt::open(&first(Style::Gpt2, &dir.path().join("first"))).unwrap();
    assert_eq!(saved.tensor_parallel_sizes(), [1, 2, 4]);
    for (tp, pp, why) in [
        (3, 1, "num_attention_heads = 8 must be a multiple"),
        (1, 9, "num_layers = 8 cannot fill 9"),
    ] {
        let config = layout(tiny(Style::Gpt2, 0.0), 1, tp, pp);
        let to = dir.path().join("to");
        let refused = saved.reshard(&to, &config.parallel, &Origins::default(), &mut |_| true);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains(why), "{message}");
        assert!(!to.exists());
    }
}

#[test]
fn a_manifest_that_names_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = first(Style::Llama, &dir.path().join("first"));
    let file = path.join("manifest.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let (_, body) = text.split_once('\n').unwrap();
    for (from, to, why) in [
        ("\"num_layers\":8", "\"num_layers\":7", "it has decoder.layers.7."),
        ("\"num_layers\":8", "\"num_layers\":88888888888", "too large for"),
        ("\"num_attention_heads\":8", "\"num_attention_heads\":123456789012", "too large for"),
        ("\"num_query_groups\":4", "\"num_query_groups\":0", "impossible model"),
        ("\"head_dim\":4", "\"head_dim\":\"four\"", "no valid model"),
    ] {
        let body = body.replace(from, to);
        let first = format!("{{\"manifest_crc32c\":\"{:08x}\",\n", crc32c::crc32c(body.as_bytes()));
        std::fs::write(&file, first + &body).unwrap();
        let message =
            SavedGpt::open(&path).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message.contains(why), "{to}: {message:?}");
    }
}
