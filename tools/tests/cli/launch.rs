//! The supervisor, seen from outside: what it sets, shows, forwards, and how it ends ranks.

use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{is_alive, kill, megatron, pids, shells, stderr, stdout, wait_for};

/// A shell that writes its process id to pid.RANK and sleeps.
fn sleepers(folder: &std::path::Path, ranks: usize) -> std::process::Command {
    let script = format!(
        "echo $$ > {0}/tmp.$RANK && mv {0}/tmp.$RANK {0}/pid.$RANK; sleep 60",
        folder.display()
    );
    let mut command = shells(ranks, &script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn ranks_get_torchruns_variables() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR";
    let output = megatron()
        .args(["launch", "--nproc-per-node=2", "--nnodes=3", "--node-rank=2", "--master-addr=head"])
        .args(["--", "sh", "-c", script])
        .output()
        .unwrap();
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["[4]: 4/6 0/2 2 head", "[5]: 5/6 1/2 2 head"]);
}

#[test]
fn all_ranks_of_one_machine_meet_at_one_port() {
    let output = shells(2, "echo $MASTER_ADDR:$MASTER_PORT").output().unwrap();
    let text = stdout(&output);
    let places: Vec<&str> = text.lines().map(|l| l.split_once(": ").unwrap().1).collect();
    assert_eq!(places.len(), 2);
    assert_eq!(places[0], places[1]);
    assert!(places[0].starts_with("127.0.0.1:") && !places[0].ends_with(":0"), "{places:?}");
}

#[test]
fn ranks_of_one_run_get_one_secret_that_no_other_run_has() {
    let secrets = |launch: &mut std::process::Command| -> Vec<String> {
        let text = stdout(&launch.output().unwrap());
        text.lines().map(|line| line.split_once(": ").unwrap().1.to_string()).collect()
    };
    let script = "echo $MEGATRON_RUN_SECRET";
    let [first, second] = [secrets(&mut shells(2, script)), secrets(&mut shells(2, script))];
    assert!(first.len() == 2 && first[0].len() == 64 && first[0] == first[1], "{first:?}");
    assert_ne!(first, second);
    let own = "0123456789abcdef0123456789abcdef";
    assert_eq!(secrets(shells(2, script).env("MEGATRON_RUN_SECRET", own)), [own, own]);
    // If the user starts the supervisors one by one, the user creates the secret.
    let words =
        ["launch", "--nnodes=2", "--node-rank=1", "--master-addr=head", "--", "sh", "-c", script];
    assert_eq!(secrets(megatron().args(words)), [""]);
    let output = shells(2, script).env("MEGATRON_RUN_SECRET", "short").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("MEGATRON_RUN_SECRET has 5 characters"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn the_command_begins_at_the_first_word_that_is_no_flag_of_the_launchers() {
    let script = "echo $RANK $*";
    for flags in [
        &["--nproc-per-node", "1", "--max-restarts=0"][..],
        &["--nproc_per_node=1", "--grace-period", "9"],
        &[],
    ] {
        let command = ["sh", "-c", script, "x", "--num-layers", "2", "--", "--nproc-per-node", "3"];
        let output = megatron().arg("launch").args(flags).args(command).output().unwrap();
        assert_eq!(
            stdout(&output),
            "[0]: 0 --num-layers 2 -- --nproc-per-node 3\n",
            "{}",
            stderr(&output)
        );
    }
    // Errors before the command are reported alone.
    let words = ["launch", "--standalone", "--nprocs", "2", "sh", "--num-layers", "2"];
    let said = stderr(&megatron().args(words).output().unwrap());
    assert!(said.contains("--standalone") && said.contains("--nprocs: no such flag"), "{said}");
    assert!(!said.contains("--num-layers"), "{said}");
}

#[test]
fn this_program_is_found_where_it_is_not_on_the_path() {
    let of = |command: &[&str]| {
        let output = megatron()
            .env("PATH", "/nowhere")
            .args(["launch", "--"])
            .args(command)
            .output()
            .unwrap();
        (output.status.success(), stdout(&output) + &stderr(&output))
    };
    let (ok, said) = of(&["megatron", "--version"]);
    assert!(ok && said.starts_with("[0]: megatron "), "{said}");
    for (command, advice) in [
        (
            "pretrain",
            "program pretrain is not on the PATH; a command of this program is `megatron pretrain …`",
        ),
        ("python3", "program python3 is not on the PATH; give its path"),
    ] {
        let (ok, said) = of(&[command, "x.toml"]);
        assert!(!ok && said.contains(advice), "{said}");
    }
}

#[test]
fn several_machines_need_to_know_where_they_meet() {
    let output = megatron().args(["launch", "--nnodes=2", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--nnodes 2 needs --master-addr"), "{}", stderr(&output));
}

#[test]
fn threads_of_the_user_are_kept() {
    let output =
        shells(1, "echo $RAYON_NUM_THREADS").env("RAYON_NUM_THREADS", "17").output().unwrap();
    assert_eq!(stdout(&output), "[0]: 17\n");
}

#[test]
fn ranks_may_have_as_many_files_open_as_whoever_launched_them() {
    let launch = "ulimit -Sn 123; exec \"$0\" launch --nproc-per-node=2 -- sh -c 'ulimit -Sn'";
    let mut command = std::process::Command::new("sh");
    let output = command.args(["-c", launch, env!("CARGO_BIN_EXE_megatron")]).output().unwrap();
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["[0]: 123", "[1]: 123"], "{}", stderr(&output));
}

#[test]
fn success_of_all_ranks_is_success() {
    let output = shells(3, "exit 0").output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn the_exit_code_and_last_words_of_the_failing_rank_are_reported() {
    let output = shells(3, "[ $RANK = 1 ] || exec sleep 60; echo no such thing >&2; exit 7")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));
    let text = stderr(&output);
    assert!(text.contains("error: rank 1 (pid ") && text.contains("exited with code 7"), "{text}");
    assert!(text.contains("its last line was: no such thing"), "{text}");
}

#[test]
fn a_killed_rank_ends_the_others_within_ten_seconds_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let child = sleepers(folder.path(), 3).spawn().unwrap();
    let pids = pids(folder.path(), 3);
    let start = Instant::now();
    kill(pids[2], "KILL");
    let output = child.wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(output.status.code(), Some(137));
    let text = stderr(&output);
    assert!(
        text.contains(&format!("error: rank 2 (pid {}) was killed by SIGKILL", pids[2])),
        "{text}"
    );
    assert!(!pids.iter().any(|&pid| is_alive(pid)));
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_when_another_fails() {
    let mut command = shells(
        2,
        "[ $RANK = 0 ] && { sleep 0.2; exit 3; }; trap '' TERM; while :; do sleep 1; done",
    );
    let start = Instant::now();
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn no_rank_outlives_a_supervisor_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "echo $$ > {0}/tmp.$RANK && mv {0}/tmp.$RANK {0}/pid.$RANK; exec sleep 60",
        folder.path().display()
    );
    let mut child = shells(2, &script).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pids = pids(folder.path(), 2);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the ranks to die", || (!pids.iter().any(|&pid| is_alive(pid))).then_some(()));
}

#[test]
fn nothing_that_a_rank_started_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("sleep 60 & echo $! > {}/pid.$RANK; exit 5", folder.path().display());
    let output = shells(1, &script).output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    let pid = pids(folder.path(), 1)[0];
    wait_for("the rank's child to die", || (!is_alive(pid)).then_some(()));
}

/// Starts ranks that run `trap` on SIGTERM, and waits until all of them are ready.
fn trapping(ranks: usize, trap: &str) -> Child {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap '{trap}' TERM; echo $$ > {}/pid.$RANK; while :; do sleep 0.05; done",
        folder.path().display()
    );
    let child =
        shells(ranks, &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), ranks);
    child
}

#[test]
fn sigint_and_sigterm_reach_ranks_as_sigterm() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let child = trapping(2, "echo saving; exit 143");
        kill(child.id(), signal);
        let output = child.wait_with_output().unwrap();
        assert_eq!(stdout(&output).matches("saving").count(), 2);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    }
}

#[test]
fn ranks_that_end_well_after_a_signal_are_a_success() {
    let mut child = trapping(2, "exit 0");
    kill(child.id(), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_second_signal_stops_at_once() {
    let mut child = trapping(2, "");
    kill(child.id(), "INT");
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none());
    kill(child.id(), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn signals_that_schedulers_repeat_leave_ranks_the_time_to_save() {
    // A scheduler repeats SIGTERM; systemd sends SIGHUP after it.
    for (first, more) in
        [("TERM", ["TERM", "HUP"]), ("HUP", ["TERM", "HUP"]), ("INT", ["TERM", "TERM"])]
    {
        let child = trapping(1, "sleep 1; echo saved; exit 143");
        kill(child.id(), first);
        for signal in more {
            std::thread::sleep(Duration::from_millis(200));
            kill(child.id(), signal);
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(stdout(&output), "[0]: saved\n", "{first}, {more:?}: {}", stderr(&output));
    }
}

#[test]
fn a_hangup_that_comes_with_ctrl_c_leaves_ranks_the_time_to_save() {
    for _ in 0..3 {
        let child = trapping(1, "sleep 1; echo saved; exit 143");
        let both = format!("kill -INT {0}; kill -HUP {0}", child.id());
        assert!(std::process::Command::new("sh").args(["-c", &both]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(stdout(&output), "[0]: saved\n", "{}", stderr(&output));
        assert_eq!(output.status.code(), Some(130));
    }
}

#[test]
fn what_a_script_started_may_still_save_when_the_script_dies_of_the_signal() {
    let folder = tempfile::tempdir().unwrap();
    let inner = "trap \"sleep 1; echo saved; exit 143\" TERM; echo $$ > $0/pid.$RANK; while :; do sleep 0.05; done";
    let script = format!("sh -c '{inner}' {}; true", folder.path().display());
    let child = shells(2, &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 2);
    kill(child.id(), "TERM");
    let output = child.wait_with_output().unwrap();
    assert_eq!(stdout(&output).matches("saved").count(), 2, "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(143));
}

/// Ranks print endlessly without a reader, so even the message about stopping is not read.
#[test]
fn ranks_save_and_stop_though_nobody_reads_what_they_print() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap 'echo saving; echo > {0}/saved.$RANK; exit 143' TERM; echo $$ > {0}/pid.$RANK; while :; do echo 123456789; done",
        folder.path().display()
    );
    let mut child =
        shells(2, &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 2);
    std::thread::sleep(Duration::from_millis(500)); // the pipes are full
    kill(child.id(), "TERM");
    let code = wait_for("the launcher to end", || child.try_wait().unwrap());
    assert_eq!(code.code(), Some(143));
    assert!(folder.path().join("saved.0").exists() && folder.path().join("saved.1").exists());
}

/// Ranks that wait for the reader, and one that ended long before.
#[test]
fn nothing_is_lost_on_someone_who_reads_late() {
    for (ranks, lines) in [(2, 200000), (1, 18000)] {
        let script = format!("seq {lines}");
        let child =
            shells(ranks, &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(stdout(&output).lines().count(), ranks * lines);
        assert!(stdout(&output).ends_with(&format!("]: {lines}\n")));
    }
}

#[test]
fn ranks_that_do_not_stop_in_time_are_killed_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "[ $RANK = 1 ] && trap '' TERM; echo $$ > {}/pid.$RANK; while :; do sleep 0.05; done",
        folder.path().display()
    );
    let mut launch = megatron();
    launch.args(["launch", "--nproc-per-node=2", "--grace-period=2", "--", "sh", "-c", &script]);
    let child = launch.stderr(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 2);
    kill(child.id(), "TERM");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(137));
    assert!(
        stderr(&output).contains("error: rank 1 did not stop within 2 s"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn ctrl_c_stops_a_run_at_once_that_sigterm_is_stopping() {
    let mut child = trapping(1, "");
    kill(child.id(), "TERM");
    std::thread::sleep(Duration::from_millis(200));
    kill(child.id(), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn signals_that_are_ignored_at_the_start_have_no_effect() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap 'exit 143' TERM; echo $$ > {}/pid.$RANK; while :; do sleep 0.05; done",
        folder.path().display()
    );
    let mut command = std::process::Command::new("sh");
    // As `nohup megatron … &` in a script does.
    command.args(["-c", "trap '' HUP INT; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_megatron")]);
    command.args(["launch", "--", "sh", "-c", &script]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    pids(folder.path(), 1);
    for signal in ["HUP", "INT"] {
        kill(child.id(), signal);
        std::thread::sleep(Duration::from_millis(200));
        assert!(child.try_wait().unwrap().is_none(), "ended by SIG{signal}");
    }
    kill(child.id(), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

/// A line with which a rank of this program tells its supervisor that it misses another rank.
const MISSES_A_PEER: &str =
    r#"printf '\036{"message":"rank 1 died","blames_a_peer":true}\n' >&2; exit 1"#;

/// Stops a run in which rank 1 runs `rank_1` on SIGTERM, and rank 0 then misses it.
fn stopped_early(rank_1: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "if [ $RANK = 1 ]; then {rank_1}; else trap '{}' TERM; fi; echo $$ > {}/pid.$RANK; while :; do sleep 0.05; done",
        MISSES_A_PEER.replace('\'', "'\\''"),
        folder.path().display()
    );
    let child = shells(2, &script).stderr(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 2);
    kill(child.id(), "TERM");
    child.wait_with_output().unwrap()
}

#[test]
fn a_run_that_is_stopped_while_it_starts_does_not_fail() {
    // The rank does not handle signals yet and dies of the signal.
    let output = stopped_early(":");
    assert_eq!(output.status.code(), Some(143));
    assert!(!stderr(&output).contains("error: "), "{}", stderr(&output));
}

#[test]
fn a_rank_that_hangs_when_it_shall_stop_is_a_failure() {
    let output = stopped_early("trap '' TERM");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).ends_with("error: rank 0: rank 1 died\n"), "{}", stderr(&output));
}

#[test]
fn ranks_that_somebody_else_asked_to_stop_have_not_failed() {
    for code in [129, 130, 143] {
        let output =
            shells(2, &format!("[ $RANK = 0 ] && exit {code} || exit 0")).output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(code), ""));
    }
    // A rank that did not stop itself may have lost its work.
    let output = shells(2, "[ $RANK = 0 ] && exit 143 || exec sleep 60").output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    assert!(stderr(&output).contains("error: rank 0"), "{}", stderr(&output));
}

#[test]
fn ranks_may_print_to_a_terminal_that_stops_background_processes() {
    const SIGTTOU: u32 = 22;
    let output = shells(1, "grep SigIgn /proc/self/status").output().unwrap();
    let text = stdout(&output);
    let ignored =
        u64::from_str_radix(text.trim().rsplit(char::is_whitespace).next().unwrap(), 16).unwrap();
    assert!(ignored >> (SIGTTOU - 1) & 1 == 1, "{text}");
}

#[test]
fn the_port_of_torchruns_agent_is_no_business_of_the_ranks() {
    let output = shells(1, "echo ${TORCHELASTIC_USE_AGENT_STORE-unset}")
        .env("TORCHELASTIC_USE_AGENT_STORE", "True")
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "[0]: unset\n");
}

#[test]
fn a_command_that_does_not_exist_is_named() {
    let output = megatron().args(["launch", "--", "/no/such/program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("cannot start rank 0 (/no/such/program)"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output =
        megatron().args(["launch", "--master-port", &port, "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains(&format!("port {port} (--master-port) cannot be used")),
        "{}",
        stderr(&output)
    );
}

#[test]
fn errors_of_all_ranks_become_one_message() {
    let program = env!("CARGO_BIN_EXE_megatron");
    let output = megatron()
        .args(["launch", "--nproc-per-node", "3", "--", program, "pretrain", "/no/run.toml"])
        .output()
        .unwrap();
    let text = stderr(&output);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("cannot read the run file /no/run.toml")
            && text.ends_with("(on all ranks)\n"),
        "{text}"
    );
}
