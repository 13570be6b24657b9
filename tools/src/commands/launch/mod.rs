//! `megatron launch`: starts any command once per rank, on this machine or on the machines of a
//! hostfile.

mod args;

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use megatron::comm::RUN_SECRET;

pub use self::args::LaunchArgs;
use crate::error::{Error, Result};
use crate::fault::{OVER_STDIN, SUPERVISED};
use crate::launch::{
    Host, Hosts, Plan, Ranks, Style, Work, exported, free_port, is_here, is_loopback,
    read_hostfile, supervise,
};
use crate::ranks::{secret, secret_or_new};

/// The default port of torchrun and DeepSpeed.
const DEFAULT_PORT: u16 = 29500;
/// Options for ssh after the user's own arguments; ssh uses the first of each kind. BatchMode,
/// because several simultaneous password prompts are useless; ServerAliveInterval, to notice a lost
/// machine.
const SSH_ARGS: [&str; 4] = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=30"];
/// How much longer than its ranks another machine may take to stop.
const SLOWER: Duration = Duration::from_secs(10);

/// Starts the ranks on this machine or on those of a hostfile, and returns the exit code.
///
/// # Errors
/// If the command cannot be started, the hostfile cannot be used, or the port is in use.
pub fn run(launch: &LaunchArgs) -> Result<u8> {
    let Some(path) = &launch.hostfile else { return here(launch, vec![]) };
    let hosts = read_hostfile(path, launch.include.as_deref(), launch.exclude.as_deref())?;
    match &hosts[..] {
        [host] if is_here(host) => {
            let launch = LaunchArgs { nproc_per_node: host.slots.len() as u32, ..launch.clone() };
            let mut variables = named(&launch.export)?;
            variables.extend(host.visible_devices());
            here(&launch, variables)
        }
        _ => elsewhere(launch, path, hosts),
    }
}

/// The ranks of this machine.
fn here(launch: &LaunchArgs, variables: Vec<(OsString, OsString)>) -> Result<u8> {
    let port = match launch.master_port {
        Some(port) => port,
        None if launch.nnodes > 1 => DEFAULT_PORT,
        None => free_port()?,
    };
    if launch.node_rank == 0 && launch.master_port.is_some() {
        refuse_port_in_use(port)?;
    }
    supervise(&Plan {
        work: Work::Ranks(Ranks {
            command: launch.command.clone(),
            local_ranks: launch.nproc_per_node as usize,
            nodes: launch.nnodes as usize,
            node_rank: launch.node_rank as usize,
            master: (launch.master_addr.clone().unwrap_or_else(|| "127.0.0.1".to_string()), port),
            any_port: launch.master_port.is_none() && launch.nnodes == 1,
            serves_store: false,
            // If the user starts one supervisor per machine, only the user can create a common
            // secret.
            secret: if launch.nnodes > 1 { secret()? } else { secret_or_new()? },
            style: Style::Command,
            shares_gpus: crate::ranks::share_gpus(
                launch.nproc_per_node as usize,
                kernels::tensor::device::Choice::Auto,
            ),
            variables,
        }),
        // Long enough for ranks with the same cause of failure to report it.
        self_end: Duration::from_secs(1),
        stop_limit: Some(Duration::from_secs(launch.grace_period.into())),
        max_restarts: launch.max_restarts,
        advice: None,
        saves: false,
        over_stdin: std::env::var_os(SUPERVISED).is_some_and(|supervisor| supervisor == OVER_STDIN),
    })
}

/// Runs this command on each of `hosts`, which the hostfile `path` lists.
fn elsewhere(launch: &LaunchArgs, path: &Path, hosts: Vec<Host>) -> Result<u8> {
    if let Some(host) = hosts.iter().find(|host| hosts.len() > 1 && is_loopback(&host.name)) {
        return Err(Error::usage(format!(
            "{}: {} means a different machine on each host; give a name or address that the other machines reach",
            path.display(),
            host.name
        )));
    }
    let found = |what: &str, result: std::io::Result<std::path::PathBuf>| {
        result.map_err(|source| Error::Io { action: format!("find {what}"), source })
    };
    let program = match &launch.remote_program {
        Some(program) => program.clone(),
        None => found("the program that is running", std::env::current_exe())?,
    };
    let options = options(launch, &hosts);
    let named = named(&launch.export)?;
    let mut exports = exported(std::env::vars_os());
    exports.retain(|(name, _)| named.iter().all(|(other, _)| other != name));
    exports.extend(named);
    supervise(&Plan {
        work: Work::Hosts(Hosts {
            hosts,
            ssh: launch.ssh_program.clone(),
            ssh_args: ssh_args(launch),
            program: program.into_os_string(),
            folder: found("the folder of this command", std::env::current_dir())?,
            exports,
            secret: secret_or_new()?,
            options,
            command: launch.command.clone(),
        }),
        // Supervisors of the other machines end their ranks in this time, and report why.
        self_end: Duration::from_secs(5),
        stop_limit: Some(Duration::from_secs(launch.grace_period.into()) + SLOWER),
        max_restarts: 0,
        advice: None,
        saves: false,
        over_stdin: false,
    })
}

fn ssh_args(launch: &LaunchArgs) -> Vec<OsString> {
    let port = launch.ssh_port.map(|port| ["-p".to_string(), port.to_string()]);
    let own = launch.ssh_args.iter().flat_map(|words| words.split_whitespace()).map(OsString::from);
    port.into_iter()
        .flatten()
        .map(OsString::from)
        .chain(own)
        .chain(SSH_ARGS.map(OsString::from))
        .collect()
}

/// Options of `megatron launch` that are the same on all hosts.
fn options(launch: &LaunchArgs, hosts: &[Host]) -> Vec<OsString> {
    let several = hosts.len() > 1;
    let address = launch.master_addr.clone().or_else(|| several.then(|| hosts[0].name.clone()));
    let port = launch.master_port.or_else(|| several.then_some(DEFAULT_PORT));
    let numbers = [
        ("--master-port", port.map(u32::from)),
        ("--grace-period", Some(launch.grace_period)),
        ("--max-restarts", Some(launch.max_restarts)),
    ];
    let numbers =
        numbers.into_iter().filter_map(|(name, number)| Some((name, number?.to_string())));
    let given = address.map(|address| ("--master-addr", address)).into_iter().chain(numbers);
    given.flat_map(|(name, value)| [OsString::from(name), OsString::from(value)]).collect()
}

/// The variables that `--export` names.
fn named(exports: &[String]) -> Result<Vec<(OsString, OsString)>> {
    let pair = |export: &String| {
        let (name, value) = export
            .split_once('=')
            .map_or((export.as_str(), None), |(name, value)| (name, Some(value)));
        if name.is_empty() || !name.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphanumeric())
        {
            return Err(Error::usage(format!("--export {export}: must be NAME or NAME=VALUE")));
        }
        if name == RUN_SECRET {
            return Err(Error::usage(format!(
                "--export {name}: every user of a machine can read command lines; leave it out, \
                 since the other hosts receive the secret anyway"
            )));
        }
        let value = value.map(OsString::from).or_else(|| std::env::var_os(name));
        let unset = || {
            Error::usage(format!(
                "--export {export}: {name} is not set here; give --export {name}=VALUE"
            ))
        };
        Ok((OsString::from(name), value.ok_or_else(unset)?))
    };
    exports.iter().map(pair).collect()
}

fn refuse_port_in_use(port: u16) -> Result<()> {
    TcpListener::bind(("0.0.0.0", port)).map(drop).map_err(|source| {
        Error::Launch(format!(
            "port {port} (--master-port) cannot be used: {source}; choose another with --master-port, or leave it out"
        ))
    })
}
