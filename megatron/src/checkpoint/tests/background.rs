//! Tests of saves that are written while training continues.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use super::*;
use crate::checkpoint::{Saving, begin};
use crate::params::FileBacked;

const POINTER: &str = "latest_checkpointed_iteration.txt";

fn state() -> serde_json::Value {
    serde_json::json!({ "consumed_samples": 160 })
}

fn wait_until_written(saving: &Saving) {
    while !saving.is_written() {
        sleep(Duration::from_millis(1));
    }
}

/// Every file under a folder with its contents.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    names(folder)
        .into_iter()
        .map(|name| (name.clone(), fs::read(folder.join(name)).unwrap()))
        .collect()
}

#[test]
fn what_appears_is_the_state_as_it_was_and_not_before_all_have_finished() {
    let mut random = Random::new(7);
    for iteration in [20, 21, 22, 23] {
        let (dir, at_once) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        save_small(dir.path(), 10);
        let model = model(7, 2);
        let layout = Layout::random(&mut random, model.len());
        on_ranks(layout.world_size(), |world| {
            let shards = layout.owned(&model, world.rank());
            save(at_once.path(), iteration, &shards, &state(), world).unwrap();
            let saving = begin(dir.path(), iteration, &shards, state(), world).unwrap();
            assert_eq!(saving.iteration(), iteration);
            for shard in &shards {
                let data = match &shard.data {
                    Elements::Tensor(data) => data,
                    Elements::Halves { high, .. } => high.in_memory().unwrap(),
                    Elements::FileBacked(_) => unreachable!(),
                };
                data.slice_set(&data.zeros_like().unwrap(), 0, 0).unwrap();
            }
            wait_until_written(&saving);
            assert_eq!(latest_iteration(dir.path()), Some(10));
            world.barrier().unwrap();
            saving.finish(world).unwrap();
        });
        let folder = format!("iter_{iteration:07}");
        assert!(
            contents(&dir.path().join(&folder)) == contents(&at_once.path().join(&folder)),
            "{layout:?}"
        );
        assert_eq!(names(dir.path()), ["iter_0000010", &folder, POINTER]);
        assert_eq!(latest_iteration(dir.path()), Some(iteration));
    }
}

/// Starts a save on two ranks, breaks it, and finishes: all ranks learn why, and the old checkpoint
/// stays.
fn spoilt(second: fn(&Path) -> Elements, spoil: fn(&Path), why: &str) {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let messages = on_ranks(2, |world| {
        let rank = world.rank();
        let whole = Elements::Tensor(Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap());
        let shard = ShardRef {
            name: "w".into(),
            kind: StateKind::Param,
            global_shape: vec![8],
            partition: None,
            pieces: vec![Piece { offset: vec![4 * rank], shape: vec![4], flat: 0..4, local: 0 }],
            data: if rank == 0 { whole } else { second(dir.path()) },
        };
        let saving = begin(dir.path(), 20, &[shard], state(), world).unwrap();
        wait_until_written(&saving);
        world.barrier().unwrap();
        if rank == 0 {
            spoil(&dir.path().join(".iter_0000020.tmp"));
        }
        message(saving.finish(world).unwrap_err())
    });
    assert!(messages.iter().all(|message| message.contains(why)), "{messages:?}");
    assert_eq!(names(dir.path()), ["iter_0000010", POINTER]);
    assert_eq!(latest_iteration(dir.path()), Some(10));
}

fn zeros(_: &Path) -> Elements {
    Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap().into()
}

#[test]
fn a_rank_that_cannot_copy_its_state_is_told_of_on_all() {
    let file_backed =
        |dir: &Path| FileBacked::zeros(dir, &[(4, DType::F32)]).unwrap().remove(0).into();
    spoilt(file_backed, |_| {}, "kept in files");
}

#[test]
fn a_folder_that_vanishes_meanwhile_is_told_of_on_all() {
    spoilt(zeros, |temp| fs::remove_dir_all(temp).unwrap(), ".iter_0000020.tmp");
}

#[test]
fn what_is_not_finished_does_not_appear_and_is_cleaned_up_by_the_next_save() {
    let dir = tempfile::tempdir().unwrap();
    let model = save_small(dir.path(), 10);
    let layout = Layout::single(model.len());
    on_ranks(1, |world| {
        drop(begin(dir.path(), 20, &layout.owned(&model, 0), state(), world).unwrap())
    });
    // After the drop, nothing is written to the folder any more.
    assert!(dir.path().join(".iter_0000020.tmp/rank_00000.safetensors").exists());
    assert_eq!(latest_iteration(dir.path()), Some(10));
    save_small(dir.path(), 30);
    assert_eq!(names(dir.path()), ["iter_0000010", "iter_0000030", POINTER]);
}
