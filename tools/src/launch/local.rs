//! The ranks of this machine: their command and environment variables.

use std::ffi::{OsStr, OsString};
use std::io;
use std::process::{Command, Stdio};

use megatron::comm::rendezvous::{Clients, StoreServer};
use megatron::comm::{RUN_SECRET, Secret};

use super::failure::Who;
use super::plan::{MAX_RESTARTS, OWN_RANKS, RESTART_COUNT, STORE_SERVED, Style};
use super::{started, watch};
use crate::error::{Error, Result};
use crate::fault::{SUPERVISED, tell};

/// The commands' names.
pub const COMMANDS: [&str; 16] = [
    "pretrain",
    "generate",
    "eval",
    "reshard",
    "inspect",
    "launch",
    "preprocess",
    "tokenizer",
    "import",
    "export",
    "convert-config",
    "timeline",
    "bench",
    "doctor",
    "completions",
    "man",
];

/// How many hardware queues CUDA gives a process. Streams that share a queue run in the order of
/// issue, so a receive that waits for its message would block computation that other ranks wait
/// for.
pub const GPU_QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// The maximum of CUDA.
pub const MOST_GPU_QUEUES: usize = 32;
/// Unless this is 0, NCCL (2.22 and later) connects ranks for each algorithm when an operation
/// first uses it, not when the group is created. That is in the middle of a step, where ranks may
/// be at different operations.
pub const NCCL_CONNECTS_LATE: &str = "NCCL_RUNTIME_CONNECT";

/// The name of this program.
const OWN_NAME: &str = "megatron";

/// Ranks of this machine.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// Program and arguments of every rank.
    pub command: Vec<OsString>,
    /// Ranks on this machine.
    pub local_ranks: usize,
    /// Machines, all with the same number of ranks.
    pub nodes: usize,
    /// The number of this machine.
    pub node_rank: usize,
    /// MASTER_ADDR and MASTER_PORT.
    pub master: (String, u16),
    /// Whether any free port can be used.
    pub any_port: bool,
    /// Whether this process, instead of rank 0, serves the store there, at a port it chooses.
    pub serves_store: bool,
    /// The secret with which ranks prove that they belong to this run.
    pub secret: Secret,
    pub style: Style,
    /// Several ranks use one GPU, which NCCL refuses unless each rank claims to be on another host.
    pub shares_gpus: bool,
    /// More variables of all ranks.
    pub variables: Vec<(OsString, OsString)>,
}

impl Ranks {
    /// The rank of local rank `index`.
    pub fn rank(&self, index: usize) -> usize {
        self.node_rank * self.local_ranks + index
    }

    /// Serves the store where ranks meet next, if this process is to serve it. Serving it here
    /// instead of in rank 0 leaves no moment in which another program can take the port.
    ///
    /// # Errors
    /// If the loopback interface refuses to listen.
    pub fn serve(&mut self) -> Result<Option<StoreServer>> {
        if !self.serves_store {
            return Ok(None);
        }
        let (ranks, secret) = (self.local_ranks, self.secret.clone());
        let clients = Clients { ranks, one_host: true, in_pod: false, secret, notify: Some(tell) };
        let store = StoreServer::bind("127.0.0.1", 0, clients)?;
        self.master = ("127.0.0.1".into(), store.address().port());
        Ok(Some(store))
    }

    /// The command of local rank `index` with torchrun's variables, for ranks that were restarted
    /// `restarts` times of at most `max_restarts`.
    ///
    /// # Errors
    /// If the device does not exist.
    pub fn command(&self, index: usize, restarts: u32, max_restarts: u32) -> Result<Command> {
        let (program, arguments) = self
            .command
            .split_first()
            .ok_or_else(|| Error::usage("no command to start; put it after `--`"))?;
        let mut command = Command::new(meant(program));
        let numbers = [
            ("RANK", self.rank(index)),
            ("WORLD_SIZE", self.nodes * self.local_ranks),
            ("LOCAL_RANK", index),
            ("LOCAL_WORLD_SIZE", self.local_ranks),
            ("GROUP_RANK", self.node_rank),
            ("GROUP_WORLD_SIZE", self.nodes),
            ("ROLE_RANK", self.rank(index)),
            ("ROLE_WORLD_SIZE", self.nodes * self.local_ranks),
            ("MASTER_PORT", usize::from(self.master.1)),
        ];
        command.args(arguments).envs(numbers.map(|(name, number)| (name, number.to_string())));
        command
            .env(MAX_RESTARTS, max_restarts.to_string())
            .env(RESTART_COUNT, restarts.to_string());
        command
            .env("MASTER_ADDR", &self.master.0)
            .env("ROLE_NAME", "default")
            .env(SUPERVISED, watch::supervisor());
        command.env(started::STARTED_AT, started::for_ranks());
        // It describes the port of this process's own launcher; ranks use the port given here.
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        if self.shares_gpus {
            command.env("NCCL_HOSTID", format!("rank-{}", self.rank(index)));
        }
        if std::env::var_os(GPU_QUEUES).is_none() {
            command.env(GPU_QUEUES, MOST_GPU_QUEUES.to_string());
        }
        if std::env::var_os(NCCL_CONNECTS_LATE).is_none() {
            command.env(NCCL_CONNECTS_LATE, "0");
        }
        match self.style {
            Style::Run => command.env(OWN_RANKS, "1"),
            Style::Command => command.env_remove(OWN_RANKS),
        };
        if let Some(secret) = self.secret.reveal() {
            // Other users cannot see the environment of this user's processes.
            command.env(RUN_SECRET, secret);
        }
        if self.serves_store {
            command.env(STORE_SERVED, "1");
        }
        let threads =
            (std::thread::available_parallelism().map_or(1, usize::from) / self.local_ranks).max(1);
        for name in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"] {
            if std::env::var_os(name).is_none() {
                command.env(name, threads.to_string());
            }
        }
        let inherits = self.style == Style::Run && index == 0;
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        command.stdout(if inherits { Stdio::inherit() } else { Stdio::piped() });
        Ok(command)
    }

    /// The prefix of its lines.
    pub fn prefix(&self, index: usize) -> String {
        match self.style {
            Style::Command => format!("[{}]: ", self.rank(index)),
            Style::Run if index == 0 => String::new(),
            Style::Run => format!("[rank {}] ", self.rank(index)),
        }
    }
}

/// The program that a word names: this program if the word is its name and no other such program is
/// on the `PATH`.
fn meant(word: &OsStr) -> OsString {
    match std::env::current_exe() {
        Ok(own) if word == OWN_NAME && !is_on_path(word) => own.into_os_string(),
        _ => word.to_os_string(),
    }
}

fn is_on_path(name: &OsStr) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}

/// The error of a program that could not be started.
pub fn not_started(who: &Who, program: &OsStr, source: io::Error) -> Error {
    let name = program.to_string_lossy();
    if source.kind() != io::ErrorKind::NotFound || name.contains('/') {
        return Error::Io { action: format!("start {who} ({name})"), source };
    }
    let is_ours = COMMANDS.iter().any(|command| program == *command);
    let advice = match is_ours {
        true => format!("; a command of this program is `{OWN_NAME} {name} …`"),
        false => "; give its path".to_string(),
    };
    Error::Launch(format!("cannot start {who}: program {name} is not on the PATH{advice}"))
}
