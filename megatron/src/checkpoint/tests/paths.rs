//! Tests of which checkpoint a path means, and of its parent folder.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::*;
use crate::checkpoint::{
    Later, Manifest, checkpoints_folder, existing, last_save, later, resumable, same_folder,
    to_load,
};
use crate::config::CheckpointConfig;

const POINTER: &str = "latest_checkpointed_iteration.txt";

#[test]
fn a_run_starts_afresh_only_where_there_is_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    assert_eq!(resumable(dir.path()).unwrap(), None);
    assert_eq!(resumable(&at("missing")).unwrap(), None);
    // Only existing checkpoints have such names.
    assert!(message(resumable(&at("iter_0000007")).unwrap_err()).contains("holds no checkpoint"));

    save_small(dir.path(), 10);
    save_small(dir.path(), 20);
    assert_eq!(resumable(dir.path()).unwrap(), Some(at("iter_0000020")));
    assert_eq!(resumable(&at("iter_0000010")).unwrap(), Some(at("iter_0000010")));

    fs::remove_file(at(POINTER)).unwrap();
    let refusal = message(resumable(dir.path()).unwrap_err());
    for part in ["20, 10", POINTER, "give the folder", "write its number"] {
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    fs::remove_dir_all(at("iter_0000010")).unwrap();
    assert_eq!(resumable(dir.path()).unwrap(), Some(at("iter_0000020")));
    // An incomplete checkpoint does not count as missing.
    fs::remove_file(at("iter_0000020/manifest.json")).unwrap();
    assert!(resumable(dir.path()).is_err());
}

#[test]
fn models_of_others_are_not_taken_for_no_checkpoint() {
    for file in ["config.json", "model-00001-of-00002.safetensors"] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(file), "{}").unwrap();
        assert!(
            message(resumable(dir.path()).unwrap_err())
                .contains("start from it with --init-from-hf")
        );
    }
    for file in ["mp_rank_00", ".metadata", "common.pt"] {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("iter_0000100").join(file)).unwrap();
        fs::write(dir.path().join(POINTER), "100").unwrap();
        let path = resumable(dir.path()).unwrap().unwrap();
        assert!(
            message(Manifest::read(&path).unwrap_err()).contains("is a checkpoint of Megatron-LM")
        );
    }
}

#[test]
fn a_checkpoint_exists_with_and_without_a_pointer() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(existing(dir.path()).unwrap(), None);
    save_small(dir.path(), 10);
    let path = dir.path().join("iter_0000010");
    assert_eq!(existing(dir.path()).unwrap(), Some(path.clone()));
    fs::remove_file(dir.path().join(POINTER)).unwrap();
    assert_eq!(existing(dir.path()).unwrap(), Some(path));
}

#[test]
fn links_and_dots_lead_to_what_lies_beside_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let one = root.join("run/iter_0000010");
    fs::create_dir_all(&one).unwrap();
    symlink(&one, root.join("best")).unwrap();
    fs::create_dir(root.join("collected")).unwrap();
    symlink(&one, root.join("collected/iter_0000010")).unwrap();
    for (path, folder) in [
        (one.clone(), "run"),
        (one.join("."), "run"),
        (root.join("best"), "run"),
        // A link with the name of a checkpoint counts as one in its folder, wherever it points.
        (root.join("collected/iter_0000010"), "collected"),
    ] {
        assert_eq!(checkpoints_folder(&path).unwrap(), root.join(folder), "{}", path.display());
    }
    assert_eq!(checkpoints_folder(Path::new("iter_0000010")).unwrap(), PathBuf::from("."));
    assert!(checkpoints_folder(&root.join("missing")).is_err());

    assert!(same_folder(&root.join("best"), &root.join("run/../run/iter_0000010")));
    assert!(same_folder(Path::new("missing"), Path::new("missing")));
    assert!(!same_folder(&root.join("run"), &one) && !same_folder(&root.join("missing"), &root));
}

#[test]
fn a_step_that_is_asked_for_is_found_and_what_lies_beyond_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |step: u64| dir.path().join(format!("iter_{step:07}"));
    let config = |load: PathBuf, ckpt_step| CheckpointConfig {
        load: Some(load),
        save: Some(dir.path().into()),
        ckpt_step,
        ..CheckpointConfig::default()
    };
    let whole = |ckpt_step| config(dir.path().into(), ckpt_step);
    assert_eq!(to_load(&whole(None)).unwrap(), None);
    assert!(message(to_load(&whole(Some(20))).unwrap_err()).contains("holds no checkpoint"));
    for step in [10, 20, 30] {
        save_small(dir.path(), step);
    }
    assert_eq!(to_load(&whole(None)).unwrap(), Some(at(30)));
    assert_eq!(to_load(&whole(Some(20))).unwrap(), Some(at(20)));
    let refusal = message(to_load(&whole(Some(25))).unwrap_err());
    assert!(
        refusal.contains("iter_0000025: does not exist; existing iterations are 30, 20, 10"),
        "{refusal}"
    );
    assert!(
        message(to_load(&config(at(10), Some(10))).unwrap_err())
            .contains("the folder of one iteration")
    );

    let beyond = Some(Later { latest: 30, iterations: vec![20, 30] });
    assert_eq!(later(&config(at(10), None), &at(10), 10).unwrap(), beyond);
    assert_eq!(later(&whole(None), &at(30), 30).unwrap(), None);
    let elsewhere = CheckpointConfig { save: Some("elsewhere".into()), ..whole(Some(10)) };
    assert_eq!(later(&elsewhere, &at(10), 10).unwrap(), None);
}

#[test]
fn a_save_is_noticed_also_where_it_replaces_the_latest() {
    let dir = tempfile::tempdir().unwrap();
    let none = last_save(dir.path());
    save_small(dir.path(), 10);
    let first = last_save(dir.path());
    assert_eq!(first, last_save(dir.path()));
    save_small(dir.path(), 10);
    assert!(none != first && first != last_save(dir.path()));
}
