//! Tests of which checkpoints stay after a newer one is complete.

use std::fs;

use super::*;
use crate::checkpoint::remove_old;
use crate::config::Retention;

fn retention(interval: Option<u64>, most_recent: Option<u64>) -> Retention {
    Retention { interval, most_recent }
}

/// The steps of the checkpoints in `dir`, which holds nothing else except the pointer.
fn steps(dir: &Path) -> Vec<u64> {
    let names = names(dir);
    let steps: Vec<u64> =
        names.iter().filter_map(|name| name.strip_prefix("iter_")?.parse().ok()).collect();
    assert_eq!(names.len(), steps.len() + 1, "{names:?}");
    steps
}

#[test]
fn multiples_and_the_latest_stay() {
    for (interval, most_recent, expected) in [
        (None, None, &[2, 4, 6, 8, 10][..]),
        (Some(4), None, &[4, 8, 10]),
        (None, Some(1), &[10]),
        (None, Some(3), &[6, 8, 10]),
        (Some(4), Some(2), &[4, 8, 10]),
        (Some(6), Some(2), &[6, 8, 10]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for step in [2, 4, 6, 8, 10] {
            save_small(dir.path(), step);
            remove_old(dir.path(), step, &retention(interval, most_recent), None, |_| true)
                .unwrap();
        }
        assert_eq!(steps(dir.path()), expected, "{interval:?} {most_recent:?}");
        assert_eq!(latest_iteration(dir.path()), Some(10));
    }
}

#[test]
fn what_a_run_saved_while_it_went_wrong_takes_no_good_checkpoints_place() {
    for (interval, expected) in [(None, &[6, 8, 10, 12][..]), (Some(4), &[4, 6, 8, 10, 12])] {
        let dir = tempfile::tempdir().unwrap();
        [2, 4, 6, 8, 10, 12].into_iter().for_each(|step| drop(save_small(dir.path(), step)));
        let wrong = [8, 10].map(|step| dir.path().join(format!("iter_{step:07}")));
        let is_healthy = |folder: &Path| !wrong.iter().any(|wrong| wrong == folder);
        remove_old(dir.path(), 12, &retention(interval, Some(2)), None, is_healthy).unwrap();
        assert_eq!(steps(dir.path()), expected, "{interval:?}");
    }
}

#[test]
fn nothing_goes_before_the_newest_is_what_the_pointer_names() {
    let dir = tempfile::tempdir().unwrap();
    [2, 4].into_iter().for_each(|step| drop(save_small(dir.path(), step)));
    assert!(
        remove_old(dir.path(), 6, &retention(None, Some(1)), None, |_| true).unwrap().is_empty()
    );
    assert_eq!(steps(dir.path()), [2, 4]);
}

#[test]
fn later_steps_and_the_checkpoint_that_is_named_to_be_loaded_stay() {
    let dir = tempfile::tempdir().unwrap();
    [1, 2, 6, 4].into_iter().for_each(|step| drop(save_small(dir.path(), step)));
    let loaded = dir.path().join("iter_0000002");
    assert_eq!(
        remove_old(dir.path(), 4, &retention(None, Some(1)), Some(&loaded), |_| true).unwrap(),
        [1]
    );
    assert_eq!(steps(dir.path()), [2, 4, 6]);
    // A parent folder does not name the loaded checkpoint.
    assert_eq!(
        remove_old(dir.path(), 4, &retention(None, Some(1)), Some(dir.path()), |_| true).unwrap(),
        [2]
    );
}

#[test]
fn a_link_goes_and_what_it_leads_to_stays() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save_small(elsewhere.path(), 2);
    std::os::unix::fs::symlink(
        elsewhere.path().join("iter_0000002"),
        dir.path().join("iter_0000002"),
    )
    .unwrap();
    save_small(dir.path(), 4);
    assert_eq!(remove_old(dir.path(), 4, &retention(None, Some(1)), None, |_| true).unwrap(), [2]);
    assert_eq!((steps(dir.path()), steps(elsewhere.path())), (vec![4], vec![2]));
    assert!(fs::symlink_metadata(dir.path().join(".iter_0000002.tmp")).is_err());
}
