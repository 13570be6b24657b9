//! Checkpoints that cannot be used or written: the run ends with one message, and earlier
//! checkpoints are unchanged.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::site::{SOON, Site, ended, refused};
use crate::support::{kill, stderr, stdout};

const SAVE: [&str; 2] = ["--save=saved", "--load=saved"];

/// A site with the checkpoint of iteration 2 in `saved`.
fn saved() -> Site {
    let site = Site::new();
    site.succeed(&["--save=saved", "--train-iters=2"]);
    site
}

fn checkpoint(site: &Site) -> PathBuf {
    site.path("saved/iter_0000002")
}

/// Asserts that resuming is refused, also for ranks without a supervisor, and changes nothing.
fn both_refuse(site: &Site, flags: &[&str], parts: &[&str]) {
    let flags = [&SAVE[..], flags].concat();
    let before = site.files();
    refused(&ended(vec![site.pretrain(&flags).spawn().unwrap()], SOON)[0], parts);
    for output in ended(site.ranks(&flags), SOON) {
        refused(&output, parts);
    }
    site.assert_unchanged(&before);
    site.assert_nothing_left();
}

#[test]
fn a_shard_that_is_missing_truncated_or_flipped() {
    let site = saved();
    for rank in [0, 3] {
        let name = format!("rank_{rank:05}.safetensors");
        let shard = checkpoint(&site).join(&name);
        let whole = fs::read(&shard).unwrap();

        fs::remove_file(&shard).unwrap();
        both_refuse(&site, &[], &[&name]);
        fs::write(&shard, &whole[..whole.len() - 5]).unwrap();
        both_refuse(&site, &[], &[&name]);
        let mut flipped = whole.clone();
        flipped[whole.len() - 100] ^= 0x10;
        fs::write(&shard, flipped).unwrap();
        both_refuse(&site, &[], &[&name, "damaged", "use another checkpoint"]);
        fs::write(&shard, whole).unwrap();
    }
    site.succeed(&[&SAVE[..], &["--train-iters=3"]].concat());
}

#[test]
fn a_manifest_or_pointer_that_is_damaged() {
    let site = saved();
    let (manifest, pointer) = (
        checkpoint(&site).join("manifest.json"),
        site.path("saved/latest_checkpointed_iteration.txt"),
    );
    let whole = fs::read(&manifest).unwrap();
    fs::write(&manifest, &whole[..whole.len() / 2]).unwrap();
    both_refuse(&site, &[], &["manifest.json"]);
    fs::remove_file(&manifest).unwrap();
    both_refuse(&site, &[], &["manifest.json"]);
    fs::write(&manifest, whole).unwrap();
    fs::write(&pointer, "latest\n").unwrap();
    both_refuse(&site, &[], &["latest_checkpointed_iteration.txt", "\"latest\""]);
    fs::write(&pointer, "7\n").unwrap();
    both_refuse(&site, &[], &["iter_0000007", "is missing"]);
}

#[test]
fn a_checkpoint_of_another_architecture() {
    let site = saved();
    both_refuse(&site, &["--num-layers=6"], &["num_layers is 4 there and 6 here"]);
    let shorter = "for shorter samples add --max-position-embeddings 16";
    both_refuse(&site, &["--seq-length=8"], &["max_position_embeddings is 16", shorter]);
    both_refuse(&site, &["--seq-length=32"], &["learned 16 positions, the longest --seq-length"]);
    both_refuse(
        &site,
        &["--swiglu", "--tokenizer=train:300"],
        &["another architecture", "vocab_size is 257 there"],
    );
}

#[test]
fn a_checkpoint_that_the_run_does_not_continue_is_not_overwritten() {
    let site = saved();
    let before = site.files();
    for children in
        [vec![site.pretrain(&["--save=saved"]).spawn().unwrap()], site.ranks(&["--save=saved"])]
    {
        for output in ended(children, SOON) {
            refused(&output, &["iter_0000002", "would overwrite", "--load saved"]);
        }
    }
    site.assert_unchanged(&before);
    site.assert_nothing_left();
}

#[test]
fn a_folder_into_which_another_run_saves_is_refused_until_that_ends() {
    let site = saved();
    let flags = ["--save=saved", "--load=saved", "--save-interval=5", "--train-iters=100000"];
    let first = site.pretrain(&flags).spawn().unwrap();
    site.wait_for_step(6);
    for start in
        [|site: &Site, flags: &[&str]| vec![site.pretrain(flags).spawn().unwrap()], Site::ranks]
    {
        for output in ended(start(&site, &flags), SOON) {
            refused(&output, &["saved", "another run is saving", "save elsewhere"]);
        }
    }
    let step = site.last_step();
    site.wait_for_step(step + 5);
    kill(first.id(), "INT");
    let first = ended(vec![first], SOON).remove(0);
    assert_eq!(first.status.code(), Some(130), "{}", stderr(&first));
    let last = site.last_step().to_string();
    site.succeed(&["--save=saved", "--load=saved", &format!("--train-iters={last}")]);
    site.assert_nothing_left();
}

#[test]
fn a_run_that_is_refused_leaves_the_other_ones_tokenizer_alone() {
    let site = Site::new();
    let flags =
        |tokenizer| ["--save=new", "--save-interval=100000", "--train-iters=100000", tokenizer];
    let first = site.pretrain(&flags("--tokenizer=train:300")).spawn().unwrap();
    site.wait_for_step(1);
    let tokenizer = fs::read(site.path("new/tokenizer.json")).unwrap();
    for start in
        [|site: &Site, flags: &[&str]| vec![site.pretrain(flags).spawn().unwrap()], Site::ranks]
    {
        for output in ended(start(&site, &flags("--tokenizer=train:257")), SOON) {
            refused(&output, &["new", "another run is saving"]);
        }
        assert!(fs::read(site.path("new/tokenizer.json")).unwrap() == tokenizer);
    }
    kill(first.id(), "INT");
    let first = ended(vec![first], SOON).remove(0);
    assert_eq!(first.status.code(), Some(130), "{}", stderr(&first));
}

/// `command` with a limit on file size, so that writes fail halfway, as on a full disk.
pub fn limited(site: &Site, command: &Command, kib: u32) -> Command {
    let mut shell = Command::new("sh");
    // With the signal ignored, a write beyond the limit is an error.
    shell.args(["-c", &format!("trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"", 2 * kib)]);
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    site.mark(shell)
}

#[test]
fn a_checkpoint_that_does_not_fit_leaves_the_last_one_as_it_was() {
    let site = saved();
    let before = site.files();
    let port = crate::site::free_port();
    // The limit also applies to shared memory, so ranks communicate over TCP.
    let tcp = "--distributed-backend=tcp";
    let flags = ["--save=saved", "--load=saved", "--save-interval=1", "--metrics=/dev/null", tcp];
    let supervised = vec![site.pretrain(&flags)];
    let meanwhile = vec![site.pretrain(&[&flags[..], &["--async-save"]].concat())];
    let joined = (0..crate::site::RANKS).map(|rank| site.rank(rank, port, &flags)).collect();
    for commands in [supervised, meanwhile, joined] {
        let children =
            commands.iter().map(|command| limited(&site, command, 64).spawn().unwrap()).collect();
        for output in ended(children, SOON) {
            refused(&output, &["saved/", "File too large"]);
        }
        site.assert_unchanged(&before);
        site.assert_nothing_left();
    }
}

#[test]
fn a_disk_that_is_full_from_the_start_leaves_nothing() {
    let site = Site::new();
    let output =
        ended(vec![limited(&site, &site.pretrain(&[]), 1).spawn().unwrap()], SOON).remove(0);
    refused(&output, &["cannot write", "File too large"]);
    assert!(stderr(&output).contains("cache"), "{}", stderr(&output));
    site.assert_nothing_left();
}

#[test]
fn a_folder_that_becomes_unwritable_ends_the_run_at_the_next_checkpoint() {
    let site = saved();
    // Root may write everywhere, so a file is put in the folder's place.
    let mut child =
        site.pretrain(&["--save=other", "--save-interval=1000", "--train-iters=100000"]);
    let child = child.spawn().unwrap();
    site.wait_for_step(5);
    fs::remove_dir(site.path("other")).unwrap();
    site.write("other", "in the way");
    for output in ended(vec![child], SOON * 6) {
        refused(&output, &["other", "is now a different folder"]);
    }
    assert_eq!(fs::read(site.path("other")).unwrap(), b"in the way");
    site.assert_nothing_left();
}

#[test]
fn another_run_starts_from_the_weights_alone_and_saves_elsewhere() {
    let site = saved();
    let before = site.files();
    let finetune = ["--load=saved", "--finetune"];
    // Its own steps would replace the other run's.
    let own = site.pretrain(&[&finetune[..], &["--save=saved"]].concat()).output().unwrap();
    refused(&own, &["already exists and this run would overwrite it"]);
    refused(
        &site.pretrain(&["--load=none", "--finetune"]).output().unwrap(),
        &["--finetune and --no-load-optim start from a checkpoint, but none holds none"],
    );
    refused(
        &site.pretrain(&["--finetune"]).output().unwrap(),
        &["= true (--finetune)", "has no effect without load"],
    );
    for flag in ["--finetune", "--no-load-optim"] {
        refused(
            &site
                .pretrain(&[flag, "--load=saved", "--save=saved", "--max-restarts=1"])
                .output()
                .unwrap(),
            &[flag, "max_restarts = 1 (--max-restarts)"],
        );
    }
    site.assert_unchanged(&before);
    let output = site.succeed(
        &[&finetune[..], &["--save=tuned", "--train-iters=3", "--no-load-optim"]].concat(),
    );
    assert!(
        stdout(&output).contains("starting from the weights in saved/iter_0000002"),
        "{}",
        stdout(&output)
    );
    let steps: Vec<u64> = site.losses().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [1, 2, 3]);
    let output =
        site.succeed(&["--load=saved", "--no-load-optim", "--train-iters=3", "--optimizer=sgd"]);
    assert!(
        stdout(&output).contains("(16 samples consumed), with a fresh optimizer"),
        "{}",
        stdout(&output)
    );
    assert_eq!(site.last_step(), 3);
}
