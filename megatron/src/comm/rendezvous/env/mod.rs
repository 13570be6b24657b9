//! A rank's place in the world from the variables that launchers set.
//!
//! `torchrun`'s names (PyTorch Elastic): RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; and those of Open MPI's `mpirun`, of
//! MPICH's and Intel MPI's (hydra), and of Slurm's `srun` (`slurm`), where MASTER_ADDR and MASTER_PORT have defaults.

mod slurm;

use std::path::Path;

use super::{RankInfo, Rendezvous};
use crate::{Error, Result};

/// Gives a variable's value by its name.
trait Lookup: Fn(&str) -> Option<String> {}
impl<F: Fn(&str) -> Option<String>> Lookup for F {}

/// torchrun's port.
const DEFAULT_PORT: usize = 29_500;

/// The variables that told a rank its place, by which messages call its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variables {
    pub rank: &'static str,
    pub world_size: &'static str,
    pub local_rank: &'static str,
    pub local_world_size: &'static str,
}

impl Variables {
    /// torchrun's.
    pub const TORCHRUN: Self =
        Self { rank: "RANK", world_size: "WORLD_SIZE", local_rank: "LOCAL_RANK", local_world_size: "LOCAL_WORLD_SIZE" };
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

/// Who started this process as a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launcher {
    Torchrun,
    OpenMpi,
    Hydra,
    Slurm,
}

impl Launcher {
    /// The one nearest to this process. `mpirun` starts its helpers by `srun` in a Slurm job, one on each node, and ranks inherit what Slurm told those;
    /// the other way round, `srun` tells its own tasks PMI_RANK, too, but nothing of MPI's local ranks.
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
            is_set("PMI_RANK").then_some(Self::Hydra)
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

    /// What it is called, and the variable without which this process is no rank of it.
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

impl RankInfo {
    /// This process's place in the world; `None` if no launcher made it a rank. `lookup` is given a variable's name.
    ///
    /// # Errors
    /// If variables are missing, no numbers, or contradict each other; the message names each with its value.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let Some(launcher) = Launcher::found(&lookup) else { return Ok(None) };
        let variables = launcher.variables(&lookup);
        let rank = number(variables.rank, &required(&lookup, launcher, variables.rank)?)?;
        let world_size = number(variables.world_size, &required(&lookup, launcher, variables.world_size)?)?;
        let optional = |name| lookup(name).map(|value| number(name, &value)).transpose();
        let local_world_size = match launcher {
            Launcher::Slurm => slurm::tasks_here(&lookup)?,
            _ => optional(variables.local_world_size)?,
        };
        let local_rank = optional(variables.local_rank)?;
        let host = super::host::name();
        let info = Self { rank, world_size, local_rank, local_world_size, host, variables };
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
        }
    }
}

/// `host` as the resolver takes it: an IPv6 address without the brackets that set it off from a port.
fn bare(host: &str) -> String {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host).into()
}

fn no_address(info: &RankInfo, launcher: Launcher) -> Error {
    let Variables { world_size: size, local_world_size: local, .. } = info.variables;
    let here = info.local_world_size.map_or(format!("{local} is not set"), |here| format!("{local}={here}"));
    let option = if launcher == Launcher::OpenMpi { "-x MASTER_ADDR=HOST" } else { "-genv MASTER_ADDR HOST" };
    Error::config(format!(
        "MASTER_ADDR is not set, and ranks are on several machines ({size}={}, {here}); give all of them the machine of rank 0, \
         by a name or address at which the others reach it: mpirun {option}, or --rdzv tcp://HOST:PORT",
        info.world_size
    ))
}

impl Rendezvous {
    /// MASTER_ADDR:MASTER_PORT, where rank 0 serves the store; the next port where torchrun's own agent has taken that
    /// one (TORCHELASTIC_USE_AGENT_STORE). MPI and Slurm set neither: the address is then this machine where all ranks are on it, and else the first node
    /// of a Slurm step; the port is 29500, and 15000 + the last four digits of the number of a Slurm job.
    ///
    /// # Errors
    /// If a variable is missing that has no default, or is no port.
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
            (None, Launcher::Torchrun) => number("MASTER_PORT", &required(&lookup, launcher, "MASTER_PORT")?)?,
            (None, Launcher::Slurm) => slurm::port(&lookup)?.unwrap_or(DEFAULT_PORT),
            (None, Launcher::OpenMpi | Launcher::Hydra) => DEFAULT_PORT,
        };
        let agent = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let usable = port.checked_add(usize::from(agent)).and_then(|port| u16::try_from(port).ok());
        let port = usable.filter(|port| *port > 0).ok_or_else(|| {
            let why = if agent { " (the port after it is used, since torchrun's agent has taken it)" } else { "" };
            Error::config(format!("MASTER_PORT={port} is not a port{why}"))
        })?;
        Ok(Self::Tcp { host, port, is_host: info.rank == 0 })
    }

    /// `tcp://HOST:PORT`, where rank 0 serves the store, or `file:///DIR`, a folder that all ranks share, from the root on.
    ///
    /// # Errors
    /// If `url` is neither.
    pub fn from_url(rank: usize, url: &str) -> Result<Self> {
        // Ranks may have been started in different folders.
        if let Some(dir) = url.strip_prefix("file://").filter(|dir| Path::new(dir).is_absolute()) {
            return Ok(Self::File { dir: dir.into() });
        }
        let address = url.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
        let parsed = address.and_then(|(host, port)| Some((host, port.parse::<u16>().ok().filter(|port| *port > 0)?)));
        match parsed {
            Some((host, port)) if !bare(host).is_empty() => {
                Ok(Self::Tcp { host: bare(host), port, is_host: rank == 0 })
            }
            _ => Err(Error::config(format!("rendezvous {url} must be tcp://HOST:PORT or file:///DIR"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
    ];

    /// torchrun's variables with `changes`; an empty value unsets one.
    fn parse(changes: &[(&str, &str)]) -> Result<Option<(RankInfo, Rendezvous)>> {
        of(&TORCHRUN, changes)
    }

    fn place(lookup: impl Fn(&str) -> Option<String> + Copy) -> Result<Option<(RankInfo, Rendezvous)>> {
        let Some(info) = RankInfo::from_env(lookup)? else { return Ok(None) };
        let rendezvous = Rendezvous::from_env(&info, lookup)?;
        Ok(Some((info, rendezvous)))
    }

    /// `variables` with `changes`; an empty value unsets one.
    fn of(variables: &[(&str, &str)], changes: &[(&str, &str)]) -> Result<Option<(RankInfo, Rendezvous)>> {
        place(|name: &str| {
            let entry = changes.iter().chain(variables).find(|(key, _)| *key == name)?;
            Some(entry.1.to_owned()).filter(|value| !value.is_empty())
        })
    }

    /// Task 5 of `srun -n 7` over three nodes, amid what `sbatch -n 9` says of its allocation.
    const SLURM: [(&str, &str); 10] = [
        ("SLURM_JOB_ID", "1234567"),
        ("SLURM_JOB_NAME", "interactive"),
        ("SLURM_JOB_NODELIST", "other,node[01-04]"),
        ("SLURM_NTASKS", "9"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_TASKS", "7"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2),3"),
        ("SLURM_STEP_NODELIST", "node[01-03]"),
        ("SLURM_PROCID", "5"),
        ("SLURM_LOCALID", "1"),
    ];

    const OPEN_MPI: [(&str, &str); 4] = [
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];

    const HYDRA: [(&str, &str); 4] =
        [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "4")];

    #[test]
    fn tasks_of_a_slurm_step_are_ranks() {
        let (info, rendezvous) = of(&SLURM, &[("SLURM_NODEID", "2")]).unwrap().unwrap();
        assert_eq!((info.rank, info.world_size, info.local_rank, info.local_world_size), (5, 7, Some(1), Some(3)));
        // The job's last four digits.
        assert_eq!(rendezvous, Rendezvous::Tcp { host: "node01".into(), port: 19567, is_host: false });
        let told = [("SLURM_NODEID", "1"), ("MASTER_ADDR", "ib-node01"), ("MASTER_PORT", "7000")];
        let (info, rendezvous) = of(&SLURM, &told).unwrap().unwrap();
        assert_eq!(info.local_world_size, Some(2));
        assert_eq!(rendezvous, Rendezvous::Tcp { host: "ib-node01".into(), port: 7000, is_host: false });
        let older = [("SLURM_STEP_ID", ""), ("SLURM_STEPID", "3"), ("SLURM_STEP_NUM_TASKS", ""), ("SLURM_NODEID", "")];
        let (info, _) = of(&SLURM, &older).unwrap().unwrap();
        assert_eq!((info.world_size, info.local_world_size), (9, None));
    }

    #[test]
    fn all_tasks_of_a_step_on_one_machine_meet_there() {
        let one = [("SLURM_STEP_TASKS_PER_NODE", "7"), ("SLURM_NODEID", "0")];
        let (info, rendezvous) = of(&SLURM, &one).unwrap().unwrap();
        assert!(info.one_host() && matches!(rendezvous, Rendezvous::Tcp { host, .. } if host == "127.0.0.1"));
    }

    #[test]
    fn a_process_in_an_allocation_that_is_no_task_starts_its_own_ranks() {
        for (changes, why) in [
            (&[("SLURM_STEP_ID", "")][..], "salloc's shell and sbatch's script have no step"),
            (&[("SLURM_STEP_ID", "4294967291")], "the batch step"),
            (&[("SLURM_STEP_ID", "4294967290")], "an interactive step"),
            (&[("SLURM_STEP_NUM_TASKS", "1")], "srun --pty bash"),
            (&[("SLURM_PROCID", "")], "a shell by ssh"),
        ] {
            assert!(of(&SLURM, changes).unwrap().is_none(), "{why}");
        }
    }

    #[test]
    fn ranks_of_mpirun_are_told_apart_from_the_helpers_that_slurm_started_for_it() {
        for mpi in [&OPEN_MPI, &HYDRA] {
            let inherited: Vec<_> = mpi.iter().chain(&SLURM).copied().collect();
            assert_eq!(of(&inherited, &[("MASTER_ADDR", "a")]).unwrap().unwrap().0.world_size, 4);
        }
        // srun --mpi=pmi2
        let pmi: Vec<_> = [("PMI_RANK", "5"), ("PMI_SIZE", "7")].into_iter().chain(SLURM).collect();
        let (info, _) = of(&pmi, &[("SLURM_NODEID", "2")]).unwrap().unwrap();
        assert_eq!((info.variables.rank, info.local_world_size), ("SLURM_PROCID", Some(3)));
    }

    #[test]
    fn torchruns_variables_come_before_all_others() {
        let all: Vec<_> = OPEN_MPI.iter().chain(&HYDRA).chain(&SLURM).chain(&TORCHRUN).copied().collect();
        let (info, rendezvous) = of(&all, &[]).unwrap().unwrap();
        assert_eq!((info.rank, info.variables), (5, Variables::TORCHRUN));
        assert!(matches!(rendezvous, Rendezvous::Tcp { host, .. } if host == "node0"));
    }

    #[test]
    fn ranks_of_mpi_meet_on_their_machine_or_where_they_are_told() {
        let (info, rendezvous) = of(&HYDRA, &[]).unwrap().unwrap();
        assert_eq!((info.rank, info.world_size, info.local_rank, info.local_world_size), (3, 4, Some(3), Some(4)));
        assert_eq!(rendezvous, Rendezvous::Tcp { host: "127.0.0.1".into(), port: 29500, is_host: false });
        let told = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "7000")];
        let (info, rendezvous) = of(&OPEN_MPI, &told).unwrap().unwrap();
        assert_eq!((info.rank, info.world_size, info.local_rank, info.local_world_size), (3, 4, Some(1), Some(2)));
        assert_eq!(rendezvous, Rendezvous::Tcp { host: "node0".into(), port: 7000, is_host: false });
    }

    #[test]
    fn a_bad_variable_of_another_launcher_is_named_as_it_is_called_there() {
        for (variables, changes, expected) in [
            (&SLURM[..], &[("SLURM_PROCID", "7")][..], "SLURM_PROCID=7 must be below SLURM_STEP_NUM_TASKS=7"),
            (&SLURM, &[("SLURM_PROCID", "x")], "SLURM_PROCID=x"),
            (&SLURM, &[("SLURM_STEP_NUM_TASKS", ""), ("SLURM_NTASKS", "-")], "SLURM_NTASKS=-"),
            (&SLURM, &[("SLURM_STEP_NUM_TASKS", ""), ("SLURM_NTASKS", "")], "Unset SLURM_STEP_ID to start"),
            (&SLURM, &[("SLURM_NODEID", "3")], "SLURM_NODEID=3 must be below 3"),
            (
                &SLURM,
                &[("SLURM_NODEID", "0"), ("SLURM_LOCALID", "2")],
                "SLURM_LOCALID=2 must be below SLURM_STEP_TASKS",
            ),
            (&SLURM, &[("SLURM_NODEID", "0"), ("SLURM_STEP_TASKS_PER_NODE", "4(2)")], "SLURM_STEP_TASKS_PER_NODE=4(2)"),
            (&SLURM, &[("SLURM_STEP_NODELIST", "node[1")], "SLURM_STEP_NODELIST=node[1"),
            (&SLURM, &[("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", "")], "MASTER_ADDR is not set"),
            (&SLURM, &[("SLURM_JOB_ID", "a")], "SLURM_JOB_ID=a"),
            (&SLURM, &[("MASTER_PORT", "0")], "MASTER_PORT=0"),
            (
                &OPEN_MPI,
                &[("OMPI_COMM_WORLD_RANK", "4")],
                "OMPI_COMM_WORLD_RANK=4 must be below OMPI_COMM_WORLD_SIZE=4",
            ),
            (&OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "")], "Unset OMPI_COMM_WORLD_RANK to start"),
            (&OPEN_MPI, &[], "mpirun -x MASTER_ADDR=HOST, or --rdzv"),
            (&HYDRA, &[("PMI_SIZE", "")], "PMI_RANK is set but PMI_SIZE is not"),
            (&HYDRA, &[("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "1")], "mpirun -genv MASTER_ADDR HOST"),
        ] {
            let message = of(variables, changes).unwrap_err().to_string();
            assert!(message.contains(expected), "{changes:?}: {message}");
        }
    }

    #[test]
    fn the_variables_of_torchrun_are_understood() {
        let (info, rendezvous) = parse(&[]).unwrap().unwrap();
        assert_eq!((info.rank, info.world_size, info.local_rank, info.local_world_size), (5, 8, Some(1), Some(4)));
        assert_eq!(rendezvous, Rendezvous::Tcp { host: "node0".into(), port: 29500, is_host: false });
        let (_, rendezvous) = parse(&[("RANK", "0"), ("LOCAL_RANK", "0")]).unwrap().unwrap();
        assert!(matches!(rendezvous, Rendezvous::Tcp { is_host: true, .. }));
    }

    #[test]
    fn ranks_are_on_one_host_only_if_a_launcher_says_so() {
        // Kubeflow's PyTorchJob says nothing of hosts, and tells rank 0 that MASTER_ADDR is localhost.
        for (local, one_host) in [("8", true), ("4", false), ("", false)] {
            let (info, _) = parse(&[("LOCAL_WORLD_SIZE", local)]).unwrap().unwrap();
            assert_eq!(info.one_host(), one_host, "LOCAL_WORLD_SIZE={local}");
        }
    }

    #[test]
    fn the_port_of_the_agents_store_is_avoided() {
        let (_, rendezvous) = parse(&[("TORCHELASTIC_USE_AGENT_STORE", "True")]).unwrap().unwrap();
        assert!(matches!(rendezvous, Rendezvous::Tcp { port: 29501, .. }));
    }

    #[test]
    fn without_a_launcher_there_is_no_rank() {
        assert!(RankInfo::from_env(|_| None).unwrap().is_none());
        assert!(parse(&[("RANK", ""), ("WORLD_SIZE", "")]).unwrap().is_none());
    }

    #[test]
    fn urls_name_a_port_or_a_folder() {
        let tcp = Rendezvous::Tcp { host: "node0".into(), port: 1234, is_host: true };
        assert_eq!(Rendezvous::from_url(0, "tcp://node0:1234").unwrap(), tcp);
        assert_eq!(Rendezvous::from_url(1, "file:///a/b").unwrap(), Rendezvous::File { dir: "/a/b".into() });
        for bad in [
            "node0:1234",
            "tcp://node0",
            "tcp://:1",
            "tcp://node0:0",
            "tcp://node0:70000",
            "file://",
            "file://runs/meet",
        ] {
            assert!(Rendezvous::from_url(0, bad).unwrap_err().to_string().contains(bad), "{bad}");
        }
    }

    #[test]
    fn addresses_of_ipv6_may_have_brackets() {
        let expected = Rendezvous::Tcp { host: "::1".into(), port: 29500, is_host: false };
        assert_eq!(Rendezvous::from_url(5, "tcp://[::1]:29500").unwrap(), expected);
        for host in ["[::1]", "::1"] {
            assert_eq!(parse(&[("MASTER_ADDR", host)]).unwrap().unwrap().1, expected);
        }
    }

    #[test]
    fn a_bad_variable_is_named_with_its_value() {
        for (changes, expected) in [
            (&[("RANK", "x")][..], "RANK=x"),
            (&[("WORLD_SIZE", "")], "WORLD_SIZE is not"),
            (&[("RANK", "8")], "RANK=8"),
            (&[("WORLD_SIZE", "0")], "WORLD_SIZE=0"),
            (&[("LOCAL_RANK", "4")], "LOCAL_RANK=4"),
            (&[("LOCAL_RANK", "8"), ("LOCAL_WORLD_SIZE", "")], "LOCAL_RANK=8"),
            (&[("LOCAL_WORLD_SIZE", "-1")], "LOCAL_WORLD_SIZE=-1"),
            (&[("MASTER_ADDR", "")], "MASTER_ADDR is not"),
            (&[("MASTER_PORT", "70000")], "MASTER_PORT=70000"),
            (&[("MASTER_PORT", "65535"), ("TORCHELASTIC_USE_AGENT_STORE", "True")], "MASTER_PORT=65535"),
        ] {
            let message = parse(changes).unwrap_err().to_string();
            assert!(message.contains(expected), "{changes:?}: {message}");
        }
    }
}
