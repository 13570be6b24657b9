//! Diverging training ends with one message, and the last good checkpoint stays the latest.

use std::fs;

use crate::site::{SOON, Site, ended, refused};
use crate::support::{stderr, stdout};

/// After one step at this rate the weights are finite, but everything computed from them is not.
const DIVERGING: [&str; 2] = ["--lr=1e30", "--save=saved"];

fn latest(site: &Site) -> String {
    fs::read_to_string(site.path("saved/latest_checkpointed_iteration.txt"))
        .unwrap_or_default()
        .trim()
        .to_string()
}

#[test]
fn it_ends_after_ten_steps_in_a_row_on_any_layout_and_is_not_started_again() {
    let layouts: [&[&str]; 3] = [
        &[],
        &["--bf16", "--num-layers-per-virtual-pipeline-stage=1", "--async-save"],
        &[
            "--pipeline-model-parallel-size=1",
            "--data-parallel-size=2",
            "--use-distributed-optimizer",
        ],
    ];
    for layout in layouts {
        let site = Site::new();
        let often = ["--save-interval=1", "--load=saved", "--max-restarts=3"];
        let output = site.pretrain(&[&DIVERGING[..], &often, layout].concat()).output().unwrap();
        let parts = [
            "10 steps in a row were not finite, from step 2 on",
            "(max_nonfinite_steps = 10)",
            "--load saved --ckpt-step 1",
            "a lower --lr",
        ];
        refused(&output, &parts);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(!stderr(&output).contains("restarting all ranks"), "{}", stderr(&output));
        // The weights of all steps are finite, but those after the first are useless.
        assert_eq!((site.last_step(), latest(&site).as_str()), (11, "1"));
        let log = stdout(&output);
        let line = "step 2: no checkpoint is saved while steps are not finite; the latest is still that of step 1";
        assert_eq!(
            (log.matches(line).count(), log.matches("no checkpoint is saved").count()),
            (1, 1),
            "{log}"
        );
        site.assert_nothing_left();
    }
}

#[test]
fn good_checkpoints_stay_while_a_run_diverges() {
    for retention in [
        &["--most-recent-k=1"][..],
        &["--save-retain-interval=100"],
        &["--most-recent-k=2", "--async-save"],
    ] {
        let site = Site::new();
        site.succeed(&["--save=saved", "--save-interval=1", "--train-iters=3"]);
        let flags =
            ["--lr=1e30", "--save=saved", "--load=saved", "--save-interval=1", "--clip-grad=0"];
        // Ends within the steps that are not finite, and is saved.
        site.succeed(&[&flags[..], retention, &["--exit-interval=8"]].concat());
        let output = site
            .pretrain(&[&flags[..], retention, &["--max-nonfinite-steps=6"]].concat())
            .output()
            .unwrap();
        refused(&output, &["--load saved --ckpt-step 4", "clipped gradients (--clip-grad 1)"]);
        assert!(site.path("saved/iter_0000004/manifest.json").exists(), "{retention:?}");
        assert_eq!(latest(&site), "8", "{retention:?}");
    }
    // A checkpoint loaded from another folder is suggested too, but not one that only gave initial
    // weights.
    let site = Site::new();
    site.succeed(&["--save=base", "--train-iters=3"]);
    let flags = [&DIVERGING[..], &["--load=base"]].concat();
    refused(&site.pretrain(&flags).output().unwrap(), &["--load base --ckpt-step 3"]);
    let flags = [&flags[..], &["--finetune"]].concat();
    refused(&site.pretrain(&flags).output().unwrap(), &["Start again with a lower --lr"]);
}

#[test]
fn ranks_of_a_launcher_agree_on_the_step() {
    let site = Site::new();
    for output in ended(site.ranks(&DIVERGING), SOON) {
        refused(&output, &["from step 2 on"]);
    }
}

#[test]
fn how_many_steps_it_takes_is_a_setting_under_megatrons_names_too() {
    let (check, no_check) =
        ("--check-for-nan-in-loss-and-grad", "--no-check-for-nan-in-loss-and-grad");
    for (flags, ends) in [
        (&[check][..], Some(2)),
        (&["--max-nonfinite-steps=3"], Some(4)),
        (&[check, no_check, "--max-nonfinite-steps=3"], Some(4)),
        (&[no_check, check], Some(2)),
        (&["--max-nonfinite-steps=0"], None),
    ] {
        let site = Site::new();
        let output = site.pretrain(&[&DIVERGING[..], flags].concat()).output().unwrap();
        match ends {
            Some(_) => refused(&output, &["step 2"]),
            None => assert!(output.status.success(), "{flags:?}: {}", stderr(&output)),
        }
        assert_eq!(site.last_step(), ends.unwrap_or(20), "{flags:?}");
    }
    let site = Site::new();
    site.edit(
        "train_iters = 20",
        &format!("train_iters = 20\n{} = true", check[2..].replace('-', "_")),
    );
    refused(&site.pretrain(&DIVERGING).output().unwrap(), &["step 2 is not finite"]);
    assert!(
        site.pretrain(&[&DIVERGING[..], &[no_check]].concat())
            .output()
            .is_ok_and(|o| o.status.code() == Some(1))
    );
    assert_eq!(site.last_step(), 11);
    let both = site.pretrain(&["--max-nonfinite-steps=4"]).output().unwrap();
    refused(
        &both,
        &["run.toml:", "max_nonfinite_steps = 4 (--max-nonfinite-steps)", "give only one"],
    );
}

#[test]
fn a_row_goes_on_where_the_run_does() {
    let site = Site::new();
    let flags = [&DIVERGING[..], &["--load=saved"]].concat();
    site.succeed(&[&flags[..], &["--exit-interval=6"]].concat());
    refused(&site.pretrain(&flags).output().unwrap(), &["10 steps in a row", "from step 2 on"]);
    assert_eq!(site.last_step(), 11);
}

#[test]
fn overflows_count_once_the_loss_scale_cannot_fall() {
    let site = Site::new();
    let first = "--check-for-nan-in-loss-and-grad";
    let falling =
        ["--fp16", "--initial-loss-scale=1099511627776", "--hysteresis=1", "--train-iters=40"];
    let log = stdout(&site.succeed(&[&falling[..], &[first]].concat()));
    assert!(log.matches("number of skipped iterations:   1").count() > 10, "{log}");
    for (flags, parts) in [
        (
            &["--loss-scale=1099511627776", "--max-nonfinite-steps=4"][..],
            ["from step 1 on", "--loss-scale"],
        ),
        (
            // The first overflow only uses up the hysteresis.
            &["--initial-loss-scale=1099511627776", "--min-loss-scale=1099511627776", first],
            ["step 1 is not finite", "a lower --lr"],
        ),
    ] {
        refused(&site.pretrain(&[&["--fp16"], flags].concat()).output().unwrap(), &parts);
    }
}

#[test]
fn parameters_that_are_not_finite_are_never_saved() {
    // At this rate, one step leaves no finite weight.
    let infinite = ["--lr=1e39", "--load=saved", "--save=saved"];
    for (precision, more) in [
        ("--bf16=false", &["--train-iters=3"][..]),
        ("--bf16=false", &["--save-interval=1", "--use-distributed-optimizer", "--async-save"]),
        ("--bf16", &["--exit-interval=3"]),
        ("--fp16", &["--train-iters=3"]),
    ] {
        let site = Site::new();
        site.succeed(&["--save=saved", "--train-iters=2", precision]);
        let before = site.files();
        let flags = [&infinite[..], &[precision, "--metrics=other.jsonl"], more].concat();
        let output = site.pretrain(&flags).output().unwrap();
        let parts = [
            "after step 3 the parameter ",
            " holds NaN or infinity",
            "saved/iter_0000003 is not written, the latest is still that of step 2",
            "--load saved --ckpt-step 2",
        ];
        refused(&output, &parts);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        fs::remove_file(site.path("other.jsonl")).unwrap();
        site.assert_unchanged(&before);
        site.assert_nothing_left();
    }
}
