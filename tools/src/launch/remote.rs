//! Starts a supervisor on each of several machines: `megatron launch` over ssh.
//!
//! All machines need this program and this folder at the same paths, through a shared file system
//! or equal installations. ssh passes one line to the remote user's shell, so every word is quoted.

use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use megatron::comm::rendezvous::this_host;
use megatron::comm::{RUN_SECRET, Secret};

use super::hostfile::Host;
use super::process::{Exit, signal_name};
use crate::fault::{OVER_STDIN, SUPERVISED};

/// Variables that are passed on: search paths of libraries and commands, and settings of
/// communication and kernels.
const NAMES: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"];
/// Prefixes of further variables. DeepSpeed's runner has NCCL, PYTHON, MV2, UCX and MLFLOW.
const PREFIXES: [&str; 7] = ["NCCL_", "UCX_", "MEGATRON_", "CUDA_", "RUST_", "PYTHON", "TORCH_"];
/// Variables that are not passed on: those of this machine or of this process's parent, and the
/// secret, which a command line would show to every user.
const OWN: [&str; 6] = [
    "CUDA_VISIBLE_DEVICES",
    SUPERVISED,
    super::OWN_RANKS,
    super::STORE_SERVED,
    super::started::STARTED_AT,
    RUN_SECRET,
];

/// Exit codes of the remote line: this program's code for a missing folder, and those of `env`.
const NO_FOLDER: i32 = 124;
const NOT_EXECUTABLE: i32 = 126;
const NOT_FOUND: i32 = 127;
/// ssh's own exit code.
const SSH_FAILED: i32 = 255;

/// Machines, and the command for each.
#[derive(Clone, Debug)]
pub struct Hosts {
    pub hosts: Vec<Host>,
    /// ssh, or a program that takes the same arguments: options, a host, a line for its shell.
    pub ssh: OsString,
    pub ssh_args: Vec<OsString>,
    /// The path of this program on the machines.
    pub program: OsString,
    pub folder: PathBuf,
    /// Variables to set on the machines.
    pub exports: Vec<(OsString, OsString)>,
    /// The secret with which ranks prove that they belong to this run. It is sent over the
    /// supervisors' standard input.
    pub secret: Secret,
    /// Options of `megatron launch` that all hosts have in common.
    pub options: Vec<OsString>,
    /// What every rank runs.
    pub command: Vec<OsString>,
}

/// The variables that are passed to ranks on other machines.
pub fn exported(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Vec<(OsString, OsString)> {
    let goes_along = |name: &str| {
        NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let chosen = variables.filter(|(name, _)| {
        name.to_str().is_some_and(|name| goes_along(name) && !OWN.contains(&name))
    });
    chosen.collect()
}

/// Whether `name` means a different machine on each host, such as localhost.
pub fn is_loopback(name: &str) -> bool {
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether `host` is this machine, with this process's user.
pub fn is_here(host: &Host) -> bool {
    let here = this_host();
    let is_short_for =
        |short: &str, long: &str| long.split_once('.').is_some_and(|(first, _)| first == short);
    let same =
        host.name == here || is_short_for(&host.name, &here) || is_short_for(&here, &host.name);
    host.destination == host.name && (is_loopback(&host.name) || same)
}

impl Hosts {
    /// The command that starts the supervisor of host `index`, without ssh if that is this machine.
    pub fn command(&self, index: usize) -> Command {
        let host = &self.hosts[index];
        let words = self.launch_words(index);
        let variables = self.variables(host);
        let mut command = if is_here(host) {
            let mut command = Command::new(&self.program);
            command.args(words).envs(variables);
            command
        } else {
            let mut command = Command::new(&self.ssh);
            command.args(&self.ssh_args).arg(&host.destination).arg(self.line(variables, words));
            command
        };
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn launch_words(&self, index: usize) -> Vec<OsString> {
        let numbers = [
            ("--nnodes", self.hosts.len()),
            ("--node-rank", index),
            ("--nproc-per-node", self.hosts[index].slots.len()),
        ];
        let mut words = vec![OsString::from("launch")];
        words.extend(
            numbers.into_iter().flat_map(|(name, number)| [name.into(), number.to_string().into()]),
        );
        words.extend_from_slice(&self.options);
        words.push("--".into());
        words.extend_from_slice(&self.command);
        words
    }

    fn variables(&self, host: &Host) -> Vec<(OsString, OsString)> {
        let mut variables = self.exports.clone();
        variables.push((SUPERVISED.into(), OVER_STDIN.into()));
        variables.extend(host.visible_devices());
        variables
    }

    /// The line for the remote shell.
    fn line(&self, variables: Vec<(OsString, OsString)>, words: Vec<OsString>) -> OsString {
        let mut line = OsString::from("cd ");
        line.push(quoted(self.folder.as_os_str()));
        line.push(format!(" || exit {NO_FOLDER}; exec env"));
        let assigned = variables.into_iter().map(|(mut name, value)| {
            name.push("=");
            name.push(value);
            name
        });
        for word in assigned.chain([self.program.clone()]).chain(words) {
            line.push(" ");
            line.push(quoted(&word));
        }
        line
    }

    /// Explains the exit of host `index`, if its supervisor could not report the reason.
    pub fn explain(&self, index: usize, exit: Exit, last_line: Option<&str>) -> Option<String> {
        let Host { name, destination, .. } = &self.hosts[index];
        let (ssh, program) = (self.ssh.to_string_lossy(), self.program.to_string_lossy());
        let said =
            last_line.map_or(String::new(), |line| format!(": {}", line.trim_end_matches('.')));
        let why = match exit {
            Exit::Code(NO_FOLDER) => format!(
                "host {name} has no folder {}{said}; run this command in a folder that all hosts have",
                self.folder.display()
            ),
            Exit::Code(NOT_FOUND | NOT_EXECUTABLE) => format!(
                "host {name} cannot run {program}{said}; install this program there at the same path, or give its path with --remote-program"
            ),
            Exit::Code(SSH_FAILED) => format!(
                "{ssh} to host {name} failed or lost its connection{said}; `{ssh} {destination} \
                 true` must work from here without a password"
            ),
            Exit::Signal(signal) => {
                format!("{ssh} to host {name} was killed by {}{said}", signal_name(signal))
            }
            Exit::Code(_) => return None,
        };
        Some(why)
    }
}

/// `word` quoted so that any POSIX shell reads one word with the same bytes.
fn quoted(word: &OsStr) -> OsString {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_=+./:,@%".contains(byte);
    if !word.is_empty() && word.as_bytes().iter().all(plain) {
        return word.to_os_string();
    }
    let mut text = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            // Closes the quotes, adds a quote, and opens quotes again.
            b'\'' => text.extend_from_slice(b"'\\''"),
            byte => text.push(byte),
        }
    }
    text.push(b'\'');
    OsStr::from_bytes(&text).to_os_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_gives_every_word_back_as_it_was() {
        let words: [&[u8]; 9] = [
            b"",
            b"a b",
            b"it's",
            b"\"$HOME\"",
            b"`id` $(id)",
            b"back\\slash\n\ttab",
            b"~ * ? [a] {b} !",
            b"plain-1",
            b"\xff'",
        ];
        let mut line = OsString::from("printf '%s\\0'");
        for word in words {
            line.push(" ");
            line.push(quoted(OsStr::from_bytes(word)));
        }
        let output = Command::new("sh").arg("-c").arg(line).output().unwrap();
        let given: Vec<&[u8]> = output.stdout.split(|byte| *byte == 0).collect();
        assert_eq!(given[..words.len()], words);
    }

    #[test]
    fn a_folder_that_is_not_there_is_told_by_its_exit_code() {
        let host = Host { destination: "me@h".into(), name: "h".into(), slots: vec![0], all: 1 };
        let [ssh, program] = ["ssh", "/bin/true"].map(OsString::from);
        let (ssh_args, exports, options, command) = (vec![], vec![], vec![], vec!["x".into()]);
        let (folder, secret) = ("/no such".into(), Secret::default());
        let mut hosts = Hosts {
            hosts: vec![host],
            ssh,
            ssh_args,
            program,
            folder,
            exports,
            secret,
            options,
            command,
        };
        let run = |hosts: &Hosts| {
            let words: Vec<OsString> =
                hosts.command(0).get_args().map(OsStr::to_os_string).collect();
            assert_eq!(words[0], "me@h");
            Exit::Code(
                Command::new("sh")
                    .arg("-c")
                    .arg(&words[1])
                    .output()
                    .unwrap()
                    .status
                    .code()
                    .unwrap(),
            )
        };
        let why = hosts.explain(0, run(&hosts), Some("sh: cannot cd")).unwrap();
        assert!(
            why.starts_with("host h has no folder /no such: sh: cannot cd; run this command"),
            "{why}"
        );
        hosts.folder = "/".into();
        assert_eq!(run(&hosts), Exit::Code(0));
    }

    #[test]
    fn variables_of_communication_go_along_and_those_of_this_machine_do_not() {
        let here = [
            "NCCL_DEBUG",
            "PATH",
            "HOME",
            "CUDA_VISIBLE_DEVICES",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            SUPERVISED,
            "MEGATRON_SIMD",
            RUN_SECRET,
            "RANK",
        ];
        let exported = exported(here.into_iter().map(|name| (name.into(), "1".into())));
        let names: Vec<_> = exported.iter().map(|(name, _)| name.to_str().unwrap()).collect();
        assert_eq!(names, ["NCCL_DEBUG", "PATH", "CUDA_DEVICE_MAX_CONNECTIONS", "MEGATRON_SIMD"]);
    }

    #[test]
    fn this_machine_is_recognized_by_its_names() {
        let host = |destination: &str| {
            let name = destination.rsplit('@').next().unwrap().to_string();
            Host { destination: destination.to_string(), name, slots: vec![0], all: 1 }
        };
        assert!(
            is_here(&host(&this_host()))
                && is_here(&host("localhost"))
                && is_here(&host("127.0.0.1"))
        );
        assert!(
            !is_here(&host(&format!("someone@{}", this_host()))) && !is_here(&host("no-such-host"))
        );
    }
}
