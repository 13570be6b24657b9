//! Derives a rank's place in the world from the variables of launchers.
//!
//! Supported are `torchrun` (PyTorch Elastic): RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
//! MASTER_ADDR, MASTER_PORT; Open MPI's `mpirun`; MPICH and Intel MPI (hydra); and Slurm's `srun`
//! (`slurm`). For the last three, MASTER_ADDR and MASTER_PORT have defaults.

mod slurm;

use std::path::Path;

use super::{RankInfo, Rendezvous};
use crate::text::printable;
use crate::{Error, Result};

/// Returns a variable's value by its name.
trait Lookup: Fn(&str) -> Option<String> {}
impl<F: Fn(&str) -> Option<String>> Lookup for F {}

/// torchrun's port.
const DEFAULT_PORT: usize = 29_500;

/// The names of the variables that gave a rank its place; messages use these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variables {
    /// For [`RankInfo::rank`].
    pub rank: &'static str,
    /// For [`RankInfo::world_size`].
    pub world_size: &'static str,
    /// For [`RankInfo::local_rank`].
    pub local_rank: &'static str,
    /// For [`RankInfo::local_world_size`].
    pub local_world_size: &'static str,
}

impl Variables {
    /// torchrun's.
    pub const TORCHRUN: Self = Self {
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world_size: "LOCAL_WORLD_SIZE",
    };
    const OPEN_MPI: Self = Self {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    };
    const HYDRA: Self = Self {
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world_size: "MPI_LOCALNRANKS",
    };
}

/// The launcher that started this process as a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launcher {
    Torchrun,
    OpenMpi,
    Hydra,
    Slurm,
}

impl Launcher {
    /// The innermost launcher of this process. In a Slurm job `mpirun` starts one helper per node
    /// with `srun`, and ranks inherit the helpers' Slurm variables. Conversely, `srun` (with
    /// MpiDefault=pmi2) sets PMI_RANK for its own tasks, shells among them, but no MPI variables
    /// for local ranks.
    fn found(lookup: &impl Lookup) -> Option<Self> {
        let is_set = |name| lookup(name).is_some();
        if is_set("RANK") {
            Some(Self::Torchrun)
        } else if is_set("OMPI_COMM_WORLD_RANK") {
            Some(Self::OpenMpi)
        } else if is_set("PMI_RANK") && is_set("MPI_LOCALRANKID") {
            Some(Self::Hydra)
        } else if slurm::is_task(lookup) {
            Some(Self::Slurm)
        } else {
            (is_set("PMI_RANK") && !is_set("SLURM_JOB_ID")).then_some(Self::Hydra)
        }
    }

    fn variables(self, lookup: &impl Lookup) -> Variables {
        match self {
            Self::Torchrun => Variables::TORCHRUN,
            Self::OpenMpi => Variables::OPEN_MPI,
            Self::Hydra => Variables::HYDRA,
            Self::Slurm => Variables {
                rank: "SLURM_PROCID",
                world_size: slurm::tasks_variable(lookup),
                local_rank: "SLURM_LOCALID",
                local_world_size: slurm::tasks_per_node_variable(lookup),
            },
        }
    }

    /// The launcher's name, and the variable that every one of its ranks has.
    fn known_by(self) -> (&'static str, &'static str) {
        match self {
            Self::Torchrun => ("torchrun", "RANK"),
            Self::OpenMpi => ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK"),
            Self::Hydra => ("MPICH's mpirun", "PMI_RANK"),
            Self::Slurm => ("srun", "SLURM_STEP_ID"),
        }
    }
}

fn number(name: &str, value: &str) -> Result<usize> {
    value.trim().parse().map_err(|_| Error::config(format!("{name}={value} is not a whole number")))
}

fn required(lookup: &impl Lookup, launcher: Launcher, name: &str) -> Result<String> {
    lookup(name).ok_or_else(|| {
        let (who, mark) = launcher.known_by();
        Error::config(format!(
            "{} is set but {name} is not; a launcher sets both (see {who}). Unset {mark} to start the ranks here",
            launcher.variables(lookup).rank
        ))
    })
}

/// The value of WORLD_SIZE, if it announces several ranks and no variable gives this process's
/// rank.
fn world_without_rank(lookup: &impl Lookup) -> Option<String> {
    let size = lookup("WORLD_SIZE").filter(|size| size.trim() != "1")?;
    Launcher::found(lookup).is_none().then_some(size)
}

/// The message for a WORLD_SIZE that has no effect.
pub fn ignored_world(lookup: impl Fn(&str) -> Option<String>) -> Option<String> {
    let size = world_without_rank(&lookup)?;
    Some(format!(
        "note: WORLD_SIZE={} is ignored: RANK is not set, so no launcher started this process; the ranks are started here",
        printable(size)
    ))
}

impl RankInfo {
    /// This process's place in the world; `None` if no launcher made it a rank. `lookup` returns a
    /// variable's value by name.
    ///
    /// # Errors
    /// If variables are missing, not numbers, or contradictory; the message names each with its
    /// value.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        if let (Some(size), Some(address)) = (world_without_rank(&lookup), lookup("MASTER_ADDR")) {
            // Each of many such processes would start the whole run, and all would save to one
            // folder.
            return Err(Error::config(format!(
                "WORLD_SIZE={size} and MASTER_ADDR={address} are set but RANK is not; a launcher sets all of them (see torchrun). Set RANK, or \
                 unset WORLD_SIZE to start the ranks here"
            )));
        }
        let Some(launcher) = Launcher::found(&lookup) else { return Ok(None) };
        let variables = launcher.variables(&lookup);
        let rank = number(variables.rank, &required(&lookup, launcher, variables.rank)?)?;
        let world_size =
            number(variables.world_size, &required(&lookup, launcher, variables.world_size)?)?;
        let optional = |name| lookup(name).map(|value| number(name, &value)).transpose();
        let local_world_size = match launcher {
            Launcher::Slurm => slurm::tasks_here(&lookup)?,
            _ => optional(variables.local_world_size)?,
        };
        let local_rank = optional(variables.local_rank)?;
        let host = super::host::name();
        let in_pod = lookup("KUBERNETES_SERVICE_HOST").is_some();
        let info = Self { rank, world_size, local_rank, local_world_size, host, variables, in_pod };
        info.validate()?;
        Ok(Some(info))
    }

    /// The only rank of a world of one.
    pub fn alone() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            local_rank: Some(0),
            local_world_size: Some(1),
            host: super::host::name(),
            variables: Variables::TORCHRUN,
            in_pod: false,
        }
    }
}

/// `host` in the form of the resolver: an IPv6 address without the brackets that separate it from a
/// port.
fn bare(host: &str) -> String {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host).into()
}

fn no_address(info: &RankInfo, launcher: Launcher) -> Error {
    let Variables { world_size: size, local_world_size: local, .. } = info.variables;
    let here = info
        .local_world_size
        .map_or(format!("{local} is not set"), |here| format!("{local}={here}"));
    let option = if launcher == Launcher::OpenMpi {
        "-x MASTER_ADDR=HOST"
    } else {
        "-genv MASTER_ADDR HOST"
    };
    Error::config(format!(
        "MASTER_ADDR is not set, and ranks are on several machines ({size}={}, {here}); give all \
         ranks a name or address at which they reach the machine of rank 0: mpirun {option}, or \
         --rdzv tcp://HOST:PORT",
        info.world_size
    ))
}

impl Rendezvous {
    /// MASTER_ADDR:MASTER_PORT, where rank 0 serves the store. If torchrun's own agent uses that
    /// port (TORCHELASTIC_USE_AGENT_STORE), the next port.
    ///
    /// MPI and Slurm set neither variable. The default address is this machine if all ranks are on
    /// it, else the first node of a Slurm step. The default port is 29500. In a Slurm job it is
    /// 15000 plus the last four digits of the job's number.
    ///
    /// # Errors
    /// If a variable without a default is missing, or the port is not a port number.
    pub fn from_env(info: &RankInfo, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let launcher = Launcher::found(&lookup).unwrap_or(Launcher::Torchrun);
        let host = match (lookup("MASTER_ADDR"), launcher) {
            (Some(host), _) => host,
            (None, Launcher::Torchrun) => required(&lookup, launcher, "MASTER_ADDR")?,
            (None, _) if info.one_host() => "127.0.0.1".into(),
            (None, Launcher::Slurm) => slurm::first_node(&lookup)?,
            (None, Launcher::OpenMpi | Launcher::Hydra) => return Err(no_address(info, launcher)),
        };
        let host = bare(&host);
        let port = match (lookup("MASTER_PORT"), launcher) {
            (Some(port), _) => number("MASTER_PORT", &port)?,
            (None, Launcher::Torchrun) => {
                number("MASTER_PORT", &required(&lookup, launcher, "MASTER_PORT")?)?
            }
            (None, Launcher::Slurm) => slurm::port(&lookup)?.unwrap_or(DEFAULT_PORT),
            (None, Launcher::OpenMpi | Launcher::Hydra) => DEFAULT_PORT,
        };
        let agent = lookup("TORCHELASTIC_USE_AGENT_STORE")
            .is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let usable = port.checked_add(usize::from(agent)).and_then(|port| u16::try_from(port).ok());
        let port = usable.filter(|port| *port > 0).ok_or_else(|| {
            let why = if agent {
                " (the next port is used, because torchrun's agent uses this one)"
            } else {
                ""
            };
            Error::config(format!("MASTER_PORT={port} is not a port{why}"))
        })?;
        Ok(Self::Tcp { host, port, is_host: info.rank == 0 })
    }

    /// Parses `tcp://HOST:PORT`, where rank 0 serves the store, or `file:///DIR`, the absolute path
    /// of a folder that all ranks share.
    ///
    /// # Errors
    /// If `url` is neither.
    pub fn from_url(rank: usize, url: &str) -> Result<Self> {
        // Ranks may have different working directories.
        if let Some(dir) = url.strip_prefix("file://").filter(|dir| Path::new(dir).is_absolute()) {
            return Ok(Self::File { dir: dir.into() });
        }
        let address = url.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
        let parsed = address.and_then(|(host, port)| {
            Some((host, port.parse::<u16>().ok().filter(|port| *port > 0)?))
        });
        match parsed {
            Some((host, port)) if !bare(host).is_empty() => {
                Ok(Self::Tcp { host: bare(host), port, is_host: rank == 0 })
            }
            _ => Err(Error::config(format!(
                "rendezvous {url} must be tcp://HOST:PORT or file:///DIR"
            ))),
        }
    }
}

#[cfg(test)]
mod tests;
