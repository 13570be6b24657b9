//! `megatron launch`: any command, once per rank.

use std::net::TcpListener;
use std::time::Duration;

use crate::cli::LaunchArgs;
use crate::error::{Error, Result};
use crate::launch::{Plan, Style, free_port, supervise};

/// torchrun's port.
const DEFAULT_PORT: u16 = 29500;

/// Starts the ranks of this machine and returns the exit code to end with.
///
/// # Errors
/// If the command cannot be started, or the port is in use.
pub fn run(launch: &LaunchArgs) -> Result<u8> {
    let port = match launch.master_port {
        Some(port) => port,
        None if launch.nnodes > 1 => DEFAULT_PORT,
        None => free_port()?,
    };
    if launch.node_rank == 0 && launch.master_port.is_some() {
        refuse_port_in_use(port)?;
    }
    supervise(&Plan {
        command: launch.command.clone(),
        local_ranks: launch.nproc_per_node as usize,
        nodes: launch.nnodes as usize,
        node_rank: launch.node_rank as usize,
        master: (launch.master_addr.clone().unwrap_or_else(|| "127.0.0.1".to_string()), port),
        any_port: launch.master_port.is_none() && launch.nnodes == 1,
        serves_store: false,
        style: Style::Command,
        // Long enough for ranks that end of the same cause to say so.
        self_end: Duration::from_secs(1),
        stop_limit: Some(Duration::from_secs(launch.grace_period.into())),
        max_restarts: launch.max_restarts,
        advice: None,
        shares_gpus: crate::ranks::share_gpus(launch.nproc_per_node as usize, kernels::device::Choice::Auto),
    })
}

fn refuse_port_in_use(port: u16) -> Result<()> {
    TcpListener::bind(("0.0.0.0", port)).map(drop).map_err(|source| {
        Error::Launch(format!(
            "port {port} (--master-port) cannot be used: {source}; choose another with --master-port, or leave it out"
        ))
    })
}
