//! `megatron launch --hostfile`: ranks on several machines, simulated by a program in place of ssh.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::site::{RANKS, SOON, Site, ended, free_port, refused};
use crate::support::{is_alive, kill, megatron, pids, stderr, stdout, wait_for};

/// Skips options, records host, options and line, and runs the line with a separate environment and
/// session, as sshd does: ending this script does not end that session.
const SSH: &str = r#"#!/bin/sh
options=
while :; do case $1 in -[op]) options="$options $1 $2"; shift 2;; -*) options="$options $1"; shift;; *) break;; esac; done
echo "$1$options" >> "$0.asked"
echo "$2" >> "$0.lines"
echo $$ > "$0.$1"
[ "$1" = down ] && { echo "ssh: connect to host down port 22: No route to host" >&2; exit 255; }
exec 3<&0
setsid env -i HOME="$HOME" PATH=/usr/bin:/bin TMPDIR="$TMPDIR" sh -c "$2" <&3 3<&- &
wait $!
"#;

const TWO: &str = "h0 slots=2\nh1 slots=2\n";

/// A folder with a hostfile and that program. Processes started in it are marked, so that a failed
/// test leaves nothing running.
struct Machines {
    site: Site,
}

impl Machines {
    fn new(hosts: &str) -> Self {
        let site = Site::new();
        site.write("hosts", hosts);
        site.write("ssh", SSH);
        fs::set_permissions(site.path("ssh"), fs::Permissions::from_mode(0o755)).unwrap();
        Self { site }
    }

    fn path(&self) -> PathBuf {
        self.site.path("hosts").parent().unwrap().to_path_buf()
    }

    /// `megatron launch` of `command` on these hosts, on a separate port unless `flags` give one.
    fn launch(&self, flags: &[&str], command: &[&str]) -> Command {
        let port = format!("--master-port={}", free_port());
        let names_one = flags.iter().any(|flag| flag.starts_with("--master-port"));
        let more = if names_one { vec![] } else { vec![port.as_str()] };
        self.launch_as_told(&[flags, &more].concat(), command)
    }

    fn launch_as_told(&self, flags: &[&str], command: &[&str]) -> Command {
        let mut launch = self.site.mark(megatron());
        launch.args(["launch", "--hostfile"]).arg(self.path().join("hosts"));
        launch
            .arg("--ssh-program")
            .arg(self.path().join("ssh"))
            .args(flags)
            .arg("--")
            .args(command);
        launch
    }

    fn run(&self, flags: &[&str], script: &str) -> Output {
        ended(vec![self.launch(flags, &["sh", "-c", script]).spawn().unwrap()], 3 * SOON).remove(0)
    }

    /// Ranks that write their process ids to pid.RANK and do `then`, and their launcher.
    fn waiting(&self, ranks: usize, flags: &[&str], then: &str) -> (std::process::Child, Vec<u32>) {
        let script = format!("echo $$ > tmp.$RANK && mv tmp.$RANK pid.$RANK; {then}");
        let launcher = self.launch(flags, &["sh", "-c", &script]).spawn().unwrap();
        let pids = pids(&self.path(), ranks);
        (launcher, pids)
    }
}

fn sorted_lines(output: &Output) -> Vec<String> {
    let mut lines: Vec<String> = stdout(output).lines().map(str::to_string).collect();
    lines.sort();
    lines
}

fn wait_for_the_end_of(pids: &[u32]) {
    wait_for("the ranks to end", || (!pids.iter().any(|&pid| is_alive(pid))).then_some(()));
}

#[test]
fn every_slot_of_every_host_is_a_rank() {
    let machines = Machines::new(&format!("# four GPUs\n{TWO}"));
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR:$MASTER_PORT ${CUDA_VISIBLE_DEVICES-all} $PWD";
    let flags = ["--ssh-port=2222", "--ssh-args=-A -o User=me"];
    let output = machines.launch_as_told(&flags, &["sh", "-c", script]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let folder = machines.path().display().to_string();
    let line = |host, rank| {
        format!("h{host}: [{rank}]: {rank}/4 {}/2 {host} h0:29500 all {folder}", rank % 2)
    };
    assert_eq!(sorted_lines(&output), [line(0, 0), line(0, 1), line(1, 2), line(1, 3)]);
    let asked = fs::read_to_string(machines.path().join("ssh.asked")).unwrap();
    let options = "-p 2222 -A -o User=me -o BatchMode=yes -o ServerAliveInterval=30";
    for host in ["h0", "h1"] {
        assert!(asked.lines().any(|line| line == format!("{host} {options}")), "{asked}");
    }
}

#[test]
fn included_slots_are_the_gpus_that_ranks_see() {
    let machines = Machines::new("h0 slots=4\nh1 slots=4\nh2 slots=4\n");
    let script = "echo $RANK/$WORLD_SIZE $CUDA_VISIBLE_DEVICES $MASTER_ADDR:$MASTER_PORT";
    let output = machines
        .run(&["--include=h2:3,1@h1:0,2", "--master-addr=ib1", "--master-port=7000"], script);
    let lines = ["h1: [0]: 0/4 0,2", "h1: [1]: 1/4 0,2", "h2: [2]: 2/4 3,1", "h2: [3]: 3/4 3,1"];
    assert_eq!(
        sorted_lines(&output),
        lines.map(|line| format!("{line} ib1:7000")),
        "{}",
        stderr(&output)
    );
    let output = machines
        .run(&["--exclude=h0@h1:0,2,3@h2:1,2,3"], "echo $RANK/$WORLD_SIZE $CUDA_VISIBLE_DEVICES");
    assert_eq!(sorted_lines(&output), ["h1: [0]: 0/2 1", "h2: [1]: 1/2 0"], "{}", stderr(&output));
}

#[test]
fn words_arrive_as_they_were() {
    let machines = Machines::new("h0 slots=1\n");
    let words = ["a  b", "it's", "$HOME `id` \\", "\"quoted\"", "", "*", "--flag=x;y&z"];
    let mut launch = machines.launch(&[], &["printf", "<%s>\\n"]);
    let output = launch.args(words).output().unwrap();
    let expected: Vec<String> = words.iter().map(|word| format!("h0: [0]: <{word}>")).collect();
    assert_eq!(stdout(&output).lines().collect::<Vec<_>>(), expected, "{}", stderr(&output));
}

#[test]
fn variables_that_matter_go_along() {
    let machines = Machines::new("h0 slots=1\n");
    let script = "echo $NCCL_DEBUG,$RAYON_NUM_THREADS,$OTHER,${SECRET-unset},$TOLD,${PATH%%:*}";
    let flags = ["--export=OTHER", "--export=TOLD=it's $5"];
    let mut launch = machines.launch(&flags, &["sh", "-c", script]);
    launch.envs([
        ("NCCL_DEBUG", "INFO"),
        ("RAYON_NUM_THREADS", "3"),
        ("OTHER", "a b"),
        ("SECRET", "x"),
    ]);
    let path = format!("/of/the/user:{}", std::env::var("PATH").unwrap());
    let output = launch.env("PATH", path).output().unwrap();
    assert_eq!(
        stdout(&output),
        "h0: [0]: INFO,3,a b,unset,it's $5,/of/the/user\n",
        "{}",
        stderr(&output)
    );
    refused(
        &machines.run(&["--export=NO_SUCH"], "true"),
        &["NO_SUCH is not set here", "--export NO_SUCH=VALUE"],
    );
    refused(&machines.run(&["--export=a b=c"], "true"), &["must be NAME or NAME=VALUE"]);
}

#[test]
fn the_runs_secret_reaches_all_hosts_and_no_command_line() {
    let machines = Machines::new(TWO);
    let script = "echo $MEGATRON_RUN_SECRET";
    // A secret created for the run, and one given by the user.
    for given in [None, Some("0123456789abcdef0123456789abcdef")] {
        let mut launch = machines.launch(&[], &["sh", "-c", script]);
        launch.envs(given.map(|secret| ("MEGATRON_RUN_SECRET", secret)));
        let output = launch.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let secrets: Vec<String> =
            sorted_lines(&output).iter().map(|l| l.rsplit(' ').next().unwrap().into()).collect();
        assert!(
            secrets.len() == 4
                && secrets[0].len() >= 32
                && secrets.iter().all(|s| *s == secrets[0]),
            "{secrets:?}"
        );
        assert_eq!(given.unwrap_or(&secrets[0]), secrets[0]);
        let lines = fs::read_to_string(machines.path().join("ssh.lines")).unwrap();
        assert!(lines.contains(script) && !lines.contains(&secrets[0]), "{lines}");
    }
    for export in ["--export=MEGATRON_RUN_SECRET", "--export=MEGATRON_RUN_SECRET=x"] {
        refused(
            &machines.run(&[export], "true"),
            &["--export MEGATRON_RUN_SECRET", "the other hosts receive the secret anyway"],
        );
    }
}

#[test]
fn a_rank_that_fails_ends_those_of_all_hosts_and_is_named_with_its_host() {
    let machines = Machines::new(TWO);
    let (launcher, pids) = machines.waiting(
        4,
        &[],
        "[ $RANK = 3 ] || exec sleep 60; sleep 1; echo no such thing >&2; exit 7",
    );
    let output = ended(vec![launcher], 2 * SOON).remove(0);
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let named = format!(
        "error: host h1: rank 3 (pid {}) exited with code 7; its last line was: no such thing",
        pids[3]
    );
    refused(&output, &[&named, "h1: [3]: no such thing"]);
    wait_for_the_end_of(&pids);
}

#[test]
fn a_launcher_that_is_asked_to_stop_has_ranks_save() {
    let machines = Machines::new(TWO);
    let (launcher, pids) =
        machines.waiting(4, &[], "trap 'echo saved; exit 143' TERM; while :; do sleep 0.05; done");
    kill(launcher.id(), "TERM");
    let output = ended(vec![launcher], SOON).remove(0);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
    assert_eq!(stdout(&output).matches(": saved").count(), 4, "{}", stdout(&output));
    wait_for_the_end_of(&pids);
}

#[test]
fn ranks_that_do_not_stop_are_killed_and_named_with_their_host() {
    let machines = Machines::new(TWO);
    let stubborn = "[ $RANK = 2 ] && trap '' TERM; while :; do sleep 0.05; done";
    let (launcher, pids) = machines.waiting(4, &["--grace-period=1"], stubborn);
    kill(launcher.id(), "TERM");
    let output = ended(vec![launcher], SOON).remove(0);
    assert_eq!(output.status.code(), Some(137));
    refused(&output, &["host h1: rank 2 did not stop within 1 s of the request, and was killed"]);
    wait_for_the_end_of(&pids);
}

#[test]
fn a_second_ctrl_c_kills_the_ranks_of_all_hosts() {
    let machines = Machines::new(TWO);
    let (launcher, pids) = machines.waiting(4, &[], "trap '' TERM; while :; do sleep 0.05; done");
    kill(launcher.id(), "INT");
    std::thread::sleep(std::time::Duration::from_millis(300));
    kill(launcher.id(), "INT");
    let output = ended(vec![launcher], SOON).remove(0);
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    wait_for_the_end_of(&pids);
}

#[test]
fn no_rank_outlives_a_launcher_that_is_killed() {
    let machines = Machines::new(TWO);
    let (mut launcher, pids) =
        machines.waiting(4, &["--grace-period=1"], "trap '' TERM; while :; do sleep 0.05; done");
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    wait_for_the_end_of(&pids);
}

#[test]
fn no_rank_outlives_its_connection() {
    let machines = Machines::new(TWO);
    let (launcher, pids) =
        machines.waiting(4, &["--grace-period=1"], "while :; do sleep 0.05; done");
    let ssh: u32 =
        fs::read_to_string(machines.path().join("ssh.h1")).unwrap().trim().parse().unwrap();
    kill(ssh, "KILL");
    // At once, not only after the launcher has finished with the other host.
    wait_for_the_end_of(&pids[2..]);
    assert!(is_alive(pids[0]));
    let output = ended(vec![launcher], 2 * SOON).remove(0);
    assert_eq!(output.status.code(), Some(137));
    refused(&output, &["/ssh to host h1 was killed by SIGKILL", "; the other hosts were stopped"]);
    wait_for_the_end_of(&pids);
}

#[test]
fn a_host_that_cannot_start_its_ranks_is_named_with_what_to_do() {
    let machines = Machines::new(TWO);
    let output = machines.run(&["--remote-program=/no/such/megatron"], "true");
    refused(
        &output,
        &[
            "host h",
            " cannot run /no/such/megatron: ",
            "install this program there",
            "--remote-program",
        ],
    );
    let output = machines.launch(&[], &["/no/such/command"]).output().unwrap();
    refused(&output, &["host h", "cannot start rank ", "(/no/such/command)"]);
    let machines = Machines::new("h0 slots=1\ndown slots=1\n");
    let output = machines.run(&[], "exec sleep 60");
    assert_eq!(output.status.code(), Some(255));
    refused(
        &output,
        &[
            "ssh to host down failed or lost its connection: ssh: connect to host down port 22: No route",
            "down true` must work",
        ],
    );
    fs::remove_file(machines.path().join("ssh")).unwrap();
    refused(&machines.run(&[], "true"), &["cannot start host h0 (", "/ssh): No such file"]);
}

#[test]
fn a_host_starts_its_ranks_again_by_itself() {
    let machines = Machines::new("h0 slots=2\n");
    let output = machines.run(
        &["--max-restarts=1"],
        "echo $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 5",
    );
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(sorted_lines(&output), ["h0: [0]: 0", "h0: [0]: 1", "h0: [1]: 0", "h0: [1]: 1"]);
    let text = stderr(&output);
    assert!(
        text.contains("h0: error: rank ") && text.contains("h0: restarting all ranks (restart 1"),
        "{text}"
    );
    let output = machines.run(&["--max-restarts=1"], "exit 5");
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stderr(&output).lines().last().unwrap().starts_with("error: rank "),
        "{}",
        stderr(&output)
    );
}

#[test]
fn this_machine_alone_needs_no_ssh() {
    let machines = Machines::new("localhost slots=4\n");
    fs::remove_file(machines.path().join("ssh")).unwrap();
    let flags = ["--include=localhost:1,3", "--export=TOLD=x"];
    let output =
        machines.run(&flags, "echo $RANK/$WORLD_SIZE $MASTER_ADDR $CUDA_VISIBLE_DEVICES $TOLD");
    assert_eq!(
        sorted_lines(&output),
        ["[0]: 0/2 127.0.0.1 1,3 x", "[1]: 1/2 127.0.0.1 1,3 x"],
        "{}",
        stderr(&output)
    );
}

#[test]
fn this_machine_among_others_needs_no_ssh_either() {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let machines = Machines::new(&format!("{} slots=1\nh1 slots=1\n", name.trim()));
    let (launcher, pids) =
        machines.waiting(2, &[], "trap 'exit 143' TERM; while :; do sleep 0.05; done");
    assert!(!fs::read_to_string(machines.path().join("ssh.asked")).unwrap().contains(name.trim()));
    kill(launcher.id(), "TERM");
    let output = ended(vec![launcher], SOON).remove(0);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    wait_for_the_end_of(&pids);
}

#[test]
fn hosts_that_cannot_be_used_are_refused() {
    for (hosts, flags, parts) in [
        ("h0 slots=2\nh0 slots=2\n", &[][..], &["hosts:2: h0 is listed twice"][..]),
        ("h0 slots=2\nh1 slots=4\n", &[], &["h0 2, h1 4", "--include h0:0,1@h1:0,1"]),
        (TWO, &["--include=h2"], &["--include h2: there is no host `h2`"]),
        (TWO, &["--exclude=h0:2"], &["h0 has no slot `2`"]),
        (TWO, &["--include=h0", "--exclude=h1"], &["--exclude", "cannot be used with"]),
        (TWO, &["--nnodes=2"], &["--nnodes", "cannot be used with"]),
        (
            "localhost slots=1\nh1 slots=1\n",
            &[],
            &["localhost means a different machine on each host"],
        ),
        (TWO, &["--num_gpus=2"], &["use --nproc-per-node, or --include"]),
        (TWO, &["--launcher_args=x"], &["use --ssh-args"]),
    ] {
        let output = Machines::new(hosts).run(flags, "true");
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        refused(&output, parts);
    }
    let output = megatron().args(["launch", "--hostfile=/no/such", "--", "true"]).output().unwrap();
    refused(&output, &["cannot read the hostfile /no/such"]);
}

#[test]
fn a_run_over_two_hosts_comes_to_the_losses_of_one() {
    let site = Site::new();
    site.succeed(&[]);
    let expected = site.losses();
    fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let machines = Machines::new(TWO);
    let (program, port) =
        (env!("CARGO_BIN_EXE_megatron"), format!("--master-port={}", free_port()));
    let command = [program, "pretrain", "run.toml", "--distributed-timeout-minutes=0.5"];
    let mut launch = site.mark(machines.launch(&["--master-addr=127.0.0.1", &port], &command));
    let output = launch.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("h0: [0]: model: "), "{}", stdout(&output));
    assert_eq!(site.losses(), expected);
    // Killing a rank on one host ends those on the other.
    fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let command = [&command[..], &["--train-iters=1000000", "--log-interval=1000000"]].concat();
    let launcher =
        site.mark(machines.launch(&["--master-addr=127.0.0.1", &port], &command)).spawn().unwrap();
    site.wait_for_step(3);
    let ranks = site.supervised_ranks();
    assert_eq!(ranks.len(), RANKS);
    kill(ranks[3], "KILL");
    let output = ended(vec![launcher], 2 * SOON).remove(0);
    assert_eq!(output.status.code(), Some(137));
    refused(
        &output,
        &[&format!("error: host h1: rank 3 (pid {}) was killed by SIGKILL", ranks[3])],
    );
    site.assert_nothing_left();
}
