//! The command line of `megatron launch`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::error::{Error, Result};

/// Start any command once per rank, like torchrun, or on the hosts of a hostfile, like DeepSpeed's
/// runner
///
/// Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT,
/// prefixes every line of output with the rank, forwards SIGINT, SIGTERM and SIGHUP as SIGTERM, and
/// stops all ranks of this machine when one fails. Its exit code is that of the first rank that
/// failed, or 128 + the signal that killed it. Ranks that are asked to stop have 30 s to save
/// (--grace-period). Ranks that take longer are killed, and the exit code is then 137.
///
/// With --hostfile it starts itself over ssh on every host, in the same folder and with the same
/// PATH. It also prefixes lines with the host, and stops all hosts when one fails. If it or a
/// connection dies, the ranks are asked to stop.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  megatron launch --nproc-per-node 4 -- megatron pretrain run.toml
  megatron launch --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr node0 -- megatron pretrain run.toml
  megatron launch --hostfile hosts --exclude node7:3@node9 -- megatron pretrain run.toml")]
pub struct LaunchArgs {
    /// Ranks on this machine
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub nproc_per_node: u32,
    /// Machines
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub nnodes: u32,
    /// Number of this machine, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub node_rank: u32,
    /// Name or address at which other machines reach rank 0's [default: 127.0.0.1 on one machine;
    /// with a hostfile, its first host]
    #[arg(long, value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Port where ranks meet [default: a free port on one machine, 29500 on several]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub master_port: Option<u16>,
    /// Seconds that ranks have to save after they are asked to stop, before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace_period: u32,
    /// How often to restart all ranks of this machine after one fails; with several machines, give
    /// each the same number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_restarts: u32,
    /// File of machines, one per line as `HOST slots=N`, with one rank per slot; # begins a comment
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nproc_per_node", "nnodes", "node_rank"])]
    pub hostfile: Option<PathBuf>,
    /// Hosts and slots of the hostfile to use, `HOST[:SLOT,…]@…`; slots are the GPUs that the
    /// host's ranks see
    #[arg(long, value_name = "HOSTS", conflicts_with = "exclude")]
    pub include: Option<String>,
    /// Hosts and slots of the hostfile to leave out
    #[arg(long, value_name = "HOSTS")]
    pub exclude: Option<String>,
    /// ssh, or a program that takes the same arguments
    #[arg(long, value_name = "PROGRAM", default_value = "ssh")]
    pub ssh_program: OsString,
    /// Port of ssh on the hosts
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub ssh_port: Option<u16>,
    /// More arguments for ssh, as one word, such as '-i key -o StrictHostKeyChecking=no'
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true)]
    pub ssh_args: Option<String>,
    /// Environment variable to pass to ranks on other hosts, with its value here if none is given.
    /// Always passed: PATH, LD_LIBRARY_PATH, OMP_NUM_THREADS, RAYON_NUM_THREADS and variables that
    /// begin with NCCL_, UCX_, MEGATRON_, CUDA_, RUST_, PYTHON or TORCH_
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub export: Vec<String>,
    /// Path of this program on the hosts [default: its path here]
    #[arg(long, value_name = "PATH")]
    pub remote_program: Option<PathBuf>,
    /// The command: everything from the first word that is not one of these flags, or after `--`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

impl LaunchArgs {
    /// Refuses contradictory flags.
    ///
    /// # Errors
    /// If flags contradict each other.
    pub fn check(&self) -> Result<()> {
        let of_hosts = [
            ("--include", self.include.is_some()),
            ("--exclude", self.exclude.is_some()),
            ("--ssh-program", self.ssh_program != "ssh"),
            ("--ssh-port", self.ssh_port.is_some()),
            ("--ssh-args", self.ssh_args.is_some()),
            ("--export", !self.export.is_empty()),
            ("--remote-program", self.remote_program.is_some()),
        ];
        if self.hostfile.is_none()
            && let Some((flag, _)) = of_hosts.into_iter().find(|(_, given)| *given)
        {
            return Err(Error::usage(format!(
                "{flag} has no effect without --hostfile: it is about the hosts that the file lists"
            )));
        }
        if self.node_rank >= self.nnodes {
            return Err(Error::usage(format!(
                "--node-rank {} must be below --nnodes {}; machines are counted from 0",
                self.node_rank, self.nnodes
            )));
        }
        if self.nnodes > 1 && self.master_addr.is_none() {
            return Err(Error::usage(format!(
                "--nnodes {} needs --master-addr: the name or address at which other machines reach the machine of --node-rank 0",
                self.nnodes
            )));
        }
        Ok(())
    }
}
