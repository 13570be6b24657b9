//! Tests of saves that fail or are killed, and of checkpoints that do not fit.

use std::fs;
use std::process::Command;

use super::*;
use crate::checkpoint::Manifest;

const POINTER: &str = "latest_checkpointed_iteration.txt";

#[test]
fn without_a_pointer_there_is_nothing_to_resume_from() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(latest(dir.path()).unwrap(), None);
    assert_eq!(latest(&dir.path().join("missing")).unwrap(), None);
}

#[test]
fn a_pointer_that_is_no_iteration_is_refused_with_its_content() {
    let dir = tempfile::tempdir().unwrap();
    for garbage in ["release", "", "-3", "12 13", "\u{0}\u{1}", "99999999999999999999999"] {
        fs::write(dir.path().join(POINTER), garbage).unwrap();
        let message = message(latest(dir.path()).unwrap_err());
        assert!(
            message.contains(POINTER) && message.contains(&format!("{:?}", garbage.trim())),
            "{message}"
        );
    }
}

#[test]
fn a_pointer_to_a_missing_checkpoint_names_both() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(POINTER), "40\n").unwrap();
    let message = message(latest(dir.path()).unwrap_err());
    assert!(message.contains("iter_0000040") && message.contains(POINTER), "{message}");
}

#[test]
fn a_save_that_was_killed_leaves_the_old_checkpoint_and_the_next_save_cleans_up() {
    let dir = tempfile::tempdir().unwrap();
    let model = save_small(dir.path(), 10);
    let temp = dir.path().join(".iter_0000020.tmp");
    fs::create_dir(&temp).unwrap();
    fs::write(temp.join("rank_00000.safetensors"), b"half a fi").unwrap();
    let Latest { iteration, path } = latest(dir.path()).unwrap().unwrap();
    assert_eq!(iteration, 10);
    assert!(load_small(&path, &model).unwrap());
    save_small(dir.path(), 30);
    assert_eq!(names(dir.path()), ["iter_0000010", "iter_0000030", POINTER]);
    assert_eq!(latest_iteration(dir.path()), Some(30));
}

#[test]
fn a_checkpoint_of_the_same_iteration_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let marker = dir.path().join("iter_0000010/marker");
    fs::write(&marker, "").unwrap();
    let model = save_small(dir.path(), 10);
    assert!(!marker.exists());
    assert!(load_small(&latest(dir.path()).unwrap().unwrap().path, &model).unwrap());
    assert_eq!(names(dir.path()), ["iter_0000010", POINTER]);
}

#[test]
fn a_replacement_that_was_killed_between_its_renames_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let model = save_small(dir.path(), 10);
    fs::rename(dir.path().join("iter_0000010"), dir.path().join(".iter_0000010.old")).unwrap();
    assert!(load_small(&latest(dir.path()).unwrap().unwrap().path, &model).unwrap());
    save_small(dir.path(), 20);
    assert_eq!(names(dir.path()), ["iter_0000010", "iter_0000020", POINTER]);
}

#[test]
fn folders_of_others_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    for name in [".iter_x.tmp", ".iter_0000001.tmp.bak", "iter_0000003.tmp"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    save_small(dir.path(), 10);
    assert_eq!(names(dir.path()).len(), 5);
}

/// Two ranks save halves of one tensor of eight elements; the second half is `second`.
fn save_halves(dir: &Path, second: Piece) -> Vec<Result<()>> {
    on_ranks(2, |world| {
        let first = Piece { offset: vec![0], shape: vec![4], flat: 0..4, local: 0 };
        let shard = ShardRef {
            name: "w".into(),
            kind: StateKind::Param,
            global_shape: vec![8],
            partition: None,
            pieces: vec![if world.rank() == 0 { first } else { second.clone() }],
            data: Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap().into(),
        };
        save(dir, 20, &[shard], &serde_json::Value::Null, world)
    })
}

/// Checks that a save failed on every rank with a reason that contains `why`, and that only
/// iteration 10 exists.
fn check_refused(dir: &Path, results: Vec<Result<()>>, why: &str) {
    for result in results {
        let message = message(result.unwrap_err());
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(names(dir), ["iter_0000010", POINTER]);
    assert_eq!(latest_iteration(dir), Some(10));
}

#[test]
fn shards_that_leave_a_hole_are_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let results =
        save_halves(dir.path(), Piece { offset: vec![5], shape: vec![3], flat: 0..3, local: 0 });
    check_refused(dir.path(), results, "w (param): nothing holds 1 of its 8 elements");
}

#[test]
fn shards_that_overlap_are_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let results =
        save_halves(dir.path(), Piece { offset: vec![3], shape: vec![4], flat: 0..4, local: 0 });
    check_refused(dir.path(), results, "rank_00001.safetensors");
}

#[test]
fn a_piece_outside_its_data_is_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let results =
        save_halves(dir.path(), Piece { offset: vec![4], shape: vec![4], flat: 0..4, local: 1 });
    check_refused(dir.path(), results, "4 elements from 1 on are not in data of 4");
}

#[test]
fn ranks_that_disagree_about_a_tensor_are_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let results = on_ranks(2, |world| {
        let shard = ShardRef {
            name: "w".into(),
            kind: StateKind::Param,
            global_shape: vec![8 + world.rank()],
            partition: None,
            pieces: vec![],
            data: Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap().into(),
        };
        save(dir.path(), 20, &[shard], &serde_json::Value::Null, world)
    });
    check_refused(dir.path(), results, "[8] on rank 0, but f32 [9] on rank 1");
}

#[test]
fn a_folder_that_cannot_be_made_fails_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "not a folder").unwrap();
    let model = model(7, 1);
    let layout = Layout { tp: 2, ..Layout::single(model.len()) };
    for result in save_as(&file, 10, &model, &layout) {
        assert!(message(result.unwrap_err()).contains("cannot create"));
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "not a folder");
}

#[test]
fn a_pointer_that_cannot_move_takes_the_new_checkpoint_back() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let marker = dir.path().join("iter_0000010/marker");
    fs::write(&marker, "").unwrap();
    let pointer = dir.path().join(POINTER);
    fs::remove_file(&pointer).unwrap();
    fs::create_dir_all(pointer.join("in the way")).unwrap();
    let model = model(7, 1);
    for result in save_as(dir.path(), 10, &model, &Layout { tp: 2, ..Layout::single(model.len()) })
    {
        assert!(message(result.unwrap_err()).contains("cannot update"));
    }
    assert!(marker.exists());
    assert_eq!(names(dir.path()), ["iter_0000010", POINTER]);
}

#[test]
fn a_lost_rank_fails_the_save_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let model = model(7, 1);
    let layout = Layout { tp: 2, ..Layout::single(model.len()) };
    let results = on_ranks(2, |world| match world.rank() {
        0 => Some(save(dir.path(), 20, &layout.owned(&model, 0), &serde_json::Value::Null, world)),
        _ => None, // leaves
    });
    assert!(results[0].as_ref().unwrap().is_err());
    assert_eq!(names(dir.path()), ["iter_0000010", POINTER]);
}

/// Passes the folder to the process that
/// [`a_disk_that_fills_up_fails_on_every_rank_and_leaves_nothing`] starts.
const CHILD_DIR: &str = "CHECKPOINT_TEST_CHILD_DIR";

/// Runs in a process with a file-size limit of 32 KiB; rank 1 of three has more than that to write.
fn save_beyond_the_limit(dir: &Path) {
    let results = on_ranks(3, |world| {
        let len = if world.rank() == 1 { 1 << 15 } else { 16 };
        let shard = ShardRef {
            name: format!("w{}", world.rank()),
            kind: StateKind::Param,
            global_shape: vec![len],
            partition: None,
            pieces: vec![Piece { offset: vec![0], shape: vec![len], flat: 0..len, local: 0 }],
            data: Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap().into(),
        };
        save(dir, 20, &[shard], &serde_json::Value::Null, world)
    });
    for (rank, result) in results.into_iter().enumerate() {
        let message = message(result.unwrap_err());
        assert!(message.contains("rank_00001.safetensors: File too large"), "{message}");
        assert_eq!(message.contains("because of rank 1"), rank != 1, "{message}");
    }
}

#[test]
fn a_disk_that_fills_up_fails_on_every_rank_and_leaves_nothing() {
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        return save_beyond_the_limit(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    let model = save_small(dir.path(), 10);
    // The limit applies to a whole process, so the save runs in a separate one, which ignores the
    // signal of the limit.
    let name =
        "checkpoint::tests::faults::a_disk_that_fills_up_fails_on_every_rank_and_leaves_nothing";
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" --exact \"$1\""])
        .arg(std::env::current_exe().unwrap())
        .arg(name)
        .env(CHILD_DIR, dir.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    assert_eq!(names(dir.path()), ["iter_0000010", POINTER]);
    assert!(load_small(&latest(dir.path()).unwrap().unwrap().path, &model).unwrap());
}

#[test]
fn a_checkpoint_of_another_architecture_is_refused_with_the_first_differences() {
    let dir = tempfile::tempdir().unwrap();
    let model = save_small(dir.path(), 10);
    let mut other = super::model(9, 3);
    other.remove(1);
    let manifest = Manifest::read(&dir.path().join("iter_0000010")).unwrap();
    let expected = |model: &[ParamSpec]| -> Result<()> {
        manifest.check_matches(
            model.iter().map(|spec| (spec.name.as_str(), StateKind::Param, spec.shape.as_slice())),
        )
    };
    expected(&model).unwrap(); // although the checkpoint also holds moments
    let message = message(expected(&other).unwrap_err());
    for part in [
        "embedding.weight (param) has shape [7, 6] in it and [9, 6] in the model",
        "it lacks layers.1.norm.weight (param)",
        "and 7 more differences",
        "the architectures differ",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let surplus = expected(&model[1..]).unwrap_err().to_string();
    assert!(
        surplus.contains("it has embedding.weight (param), which the model does not have"),
        "{surplus}"
    );
}

#[test]
fn loading_what_is_missing_or_of_another_shape_fills_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 10);
    let path = dir.path().join("iter_0000010");
    let lacking = message(load_small(&path, &super::model(7, 2)).unwrap_err());
    assert!(lacking.contains("it lacks layers.1."), "{lacking}");
    let other = super::model(8, 1);
    let layout = Layout::single(other.len());
    let shards = layout.empty(&other, 0);
    let message = message(load(&path, &shards).unwrap_err());
    assert!(message.contains("[7, 6]") && message.contains("[8, 6]"), "{message}");
    assert!(shards.iter().all(|shard| elements(shard).iter().all(|&x| x == UNTOUCHED)));
}
