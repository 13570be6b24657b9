//! Tests of resharding: the same state in another layout's files, or nothing at all.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::layouts::check_loads;
use super::*;
use crate::checkpoint::{Float, Manifest, StreamWriter, locate, lock_folder, reshard, verify};
use crate::params::ParamShare;

/// The shares that each rank of a layout writes.
fn plan(model: &[ParamSpec], layout: &Layout) -> Vec<Vec<ParamShare>> {
    let of_rank = |rank| {
        let shards =
            layout.owned(model, rank).into_iter().filter(|shard| shard.kind == StateKind::Param);
        let share = |shard: ShardRef| {
            let ShardRef { name, global_shape, pieces, .. } = shard;
            ParamShare { name, global_shape, pieces }
        };
        shards.map(share).collect()
    };
    (0..layout.world_size()).map(of_rank).collect()
}

fn run(source: &Path, dir: &Path, model: &[ParamSpec], layout: &Layout) -> Result<PathBuf> {
    let source = Manifest::read(source)?;
    let mut bytes = 0;
    let state = serde_json::json!({ "changed": true });
    assert!(reshard(&source, dir, &state, plan(model, layout), &[], &mut |part| {
        bytes += part;
        true
    })?);
    assert_eq!(bytes, source.data_bytes());
    locate(dir, None)
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    names(folder)
        .into_iter()
        .map(|name| (name.clone(), fs::read(folder.join(name)).unwrap()))
        .collect()
}

fn saved(dir: &Path, model: &[ParamSpec], layout: &Layout) -> PathBuf {
    save_as(dir, 10, model, layout).into_iter().for_each(|result| result.unwrap());
    dir.join("iter_0000010")
}

#[test]
fn what_a_random_layout_saved_any_other_random_layout_has_after_resharding() {
    for seed in 100..125 {
        let mut random = Random::new(seed);
        let model = model(1 + random.below(12), 1 + random.below(2));
        let dir = tempfile::tempdir().unwrap();
        let (from, to) =
            (Layout::random(&mut random, model.len()), Layout::random(&mut random, model.len()));
        let source = saved(&dir.path().join("a"), &model, &from);
        let before = contents(&source);
        let path = run(&source, &dir.path().join("b"), &model, &to).unwrap();
        let context = format!("seed {seed}, {from:?} → {to:?}");
        let manifest = verify(&path).unwrap();
        assert_eq!(manifest.state, serde_json::json!({ "changed": true }));
        assert_eq!(manifest.files.len(), to.world_size(), "{context}");
        check_loads(&path, &model, &to, &context);
        check_loads(&path, &model, &Layout::random(&mut random, model.len()), &context);
        assert_eq!(contents(&source), before, "{context}: the source changed");
    }
}

#[test]
fn there_and_back_again_gives_the_same_files() {
    for seed in 200..210 {
        let mut random = Random::new(seed);
        let model = model(7, 2);
        let dir = tempfile::tempdir().unwrap();
        let (here, there) =
            (Layout::random(&mut random, model.len()), Layout::random(&mut random, model.len()));
        let first = run(
            &saved(&dir.path().join("0"), &model, &there),
            &dir.path().join("1"),
            &model,
            &here,
        )
        .unwrap();
        let second = run(&first, &dir.path().join("2"), &model, &there).unwrap();
        let third = run(&second, &dir.path().join("3"), &model, &here).unwrap();
        assert_eq!(contents(&first), contents(&third), "seed {seed}, {here:?} → {there:?}");
    }
}

/// A checkpoint of one rank, and the plan of two.
struct Case {
    dir: tempfile::TempDir,
    model: Vec<ParamSpec>,
    two: Layout,
}

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = save_small(&dir.path().join("from"), 10);
        let two = Layout { tp: 2, ..Layout::single(model.len()) };
        Self { dir, model, two }
    }

    fn from(&self) -> PathBuf {
        self.dir.path().join("from/iter_0000010")
    }

    fn to(&self) -> PathBuf {
        self.dir.path().join("to")
    }

    fn run(&self) -> Result<PathBuf> {
        run(&self.from(), &self.to(), &self.model, &self.two)
    }
}

#[test]
fn a_damaged_source_is_named_and_leaves_nothing() {
    let case = Case::new();
    let file = case.from().join("rank_00000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x10;
    fs::write(&file, bytes).unwrap();
    let message = message(case.run().unwrap_err());
    assert!(
        message.contains("from/iter_0000010/rank_00000.safetensors") && message.contains("damaged"),
        "{message}"
    );
    assert!(names(&case.to()).is_empty());
    assert_eq!(latest(&case.to()).unwrap(), None);
}

#[test]
fn a_wish_to_stop_leaves_nothing() {
    let case = Case::new();
    let source = Manifest::read(&case.from()).unwrap();
    let mut left = 5;
    let done =
        reshard(&source, &case.to(), &source.state, plan(&case.model, &case.two), &[], &mut |_| {
            left -= 1;
            left > 0
        });
    assert!(!done.unwrap());
    assert_eq!(left, 0);
    assert!(names(&case.to()).is_empty());
}

#[test]
fn what_a_killed_attempt_left_is_no_checkpoint_and_is_removed_by_the_next() {
    let case = Case::new();
    let temp = case.to().join(".iter_0000010.tmp");
    fs::create_dir_all(&temp).unwrap();
    fs::write(temp.join("rank_00000.safetensors"), b"half a fi").unwrap();
    assert!(message(locate(&case.to(), None).unwrap_err()).contains("holds no checkpoint"));
    let path = case.run().unwrap();
    verify(&path).unwrap();
    assert_eq!(names(&case.to()), ["iter_0000010", "latest_checkpointed_iteration.txt"]);
}

#[test]
fn a_folder_that_holds_a_checkpoint_is_left_alone() {
    let case = Case::new();
    let whole = |name: &str| case.to().join(name);
    for there in ["iter_0000010", "iter_0000007", ".iter_0000003.old"] {
        fs::create_dir_all(whole(there)).unwrap();
        let message = message(case.run().unwrap_err());
        assert!(message.contains(there) && message.contains("already exists"), "{message}");
        assert_eq!(names(&case.to()), [there]);
        fs::remove_dir(whole(there)).unwrap();
    }
    let source = Manifest::read(&case.from()).unwrap();
    let onto_itself =
        reshard(&source, &case.dir.path().join("from"), &source.state, vec![], &[], &mut |_| true);
    assert!(message(onto_itself.unwrap_err()).contains("already exists"));
    verify(&case.from()).unwrap();
}

#[test]
fn sidecar_files_are_copied_and_never_replace_other_files() {
    let case = Case::new();
    let source = Manifest::read(&case.from()).unwrap();
    let run = || {
        let ranks = plan(&case.model, &case.two);
        reshard(
            &source,
            &case.to(),
            &source.state,
            ranks,
            &["tokenizer.json", "merges.txt"],
            &mut |_| true,
        )
    };
    let (beside, there) =
        (case.dir.path().join("from/tokenizer.json"), case.to().join("tokenizer.json"));
    fs::write(&beside, "the model's").unwrap();
    fs::create_dir(case.to()).unwrap();
    fs::write(&there, "another").unwrap();
    let message = message(run().unwrap_err());
    assert!(
        message.contains("to/tokenizer.json") && message.contains("from/tokenizer.json"),
        "{message}"
    );
    assert!(message.contains("move this file away"), "{message}");
    assert_eq!(names(&case.to()), ["tokenizer.json"]);
    assert_eq!(fs::read_to_string(&there).unwrap(), "another");
    // The same file, or a link to it, may already exist and is not changed.
    for link in [true, false] {
        fs::remove_dir_all(case.to()).unwrap();
        fs::create_dir(case.to()).unwrap();
        if link {
            std::os::unix::fs::symlink(&beside, &there).unwrap();
        }
        assert!(run().unwrap());
        assert_eq!(there.is_symlink(), link);
        assert_eq!(fs::read_to_string(&there).unwrap(), "the model's");
        assert_eq!(
            names(&case.to()),
            ["iter_0000010", "latest_checkpointed_iteration.txt", "tokenizer.json"]
        );
        assert_eq!(fs::read_to_string(&beside).unwrap(), "the model's");
    }
}

#[test]
fn a_folder_into_which_a_run_saves_is_left_alone() {
    let case = Case::new();
    // A temporary folder that the run is about to use.
    fs::create_dir_all(case.to().join(".iter_0000003.tmp")).unwrap();
    let dir = case.to();
    let run = || lock_folder(&dir, &threads::world(1)[0]);
    let held = run().unwrap();
    let streamed = || {
        StreamWriter::create(&dir, 0, [("a".to_string(), StateKind::Param, vec![2], Float::F32)])
    };
    for refused in [case.run().map(drop), streamed().map(drop)] {
        let message = message(refused.unwrap_err());
        assert!(message.contains("another run is saving there"), "{message}");
        assert_eq!(names(&dir), [".iter_0000003.tmp"]);
    }
    drop(held);
    // And the reverse.
    let writer = streamed().unwrap();
    assert!(message(run().unwrap_err()).contains("another run is saving"));
    drop(writer);
    case.run().unwrap();
    let message = message(streamed().map(drop).unwrap_err());
    assert!(message.contains("already exists"), "{message}");
}

#[test]
fn a_plan_that_is_not_the_checkpoints_is_refused_and_leaves_nothing() {
    let case = Case::new();
    for (model, why) in
        [(model(8, 1), "has shape [7, 6] in it and [8, 6]"), (model(7, 2), "it lacks layers.1.")]
    {
        let layout = Layout { tp: 2, ..Layout::single(model.len()) };
        let message = message(run(&case.from(), &case.to(), &model, &layout).unwrap_err());
        assert!(message.contains(why), "{message}");
    }
    let source = Manifest::read(&case.from()).unwrap();
    let mut ranks = plan(&case.model, &case.two);
    ranks[1].pop();
    let message = message(
        reshard(&source, &case.to(), &source.state, ranks, &[], &mut |_| true).unwrap_err(),
    );
    assert!(message.contains("do not form a complete tensor: layers.0.fused.weight"), "{message}");
    assert!(names(&case.to()).is_empty());
}

#[test]
fn a_checkpoint_is_found_by_its_own_folder_by_iteration_and_by_the_pointer() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    save_small(dir.path(), 20);
    let (ten, twenty) = (dir.path().join("iter_0000010"), dir.path().join("iter_0000020"));
    assert_eq!(locate(dir.path(), None).unwrap(), twenty);
    assert_eq!(locate(dir.path(), Some(10)).unwrap(), ten);
    assert_eq!(locate(&ten, None).unwrap(), ten);
    assert!(
        message(locate(dir.path(), Some(30)).unwrap_err()).contains("iter_0000030: does not exist")
    );
    assert!(message(locate(&ten, Some(20)).unwrap_err()).contains("the folder of one iteration"));
}
