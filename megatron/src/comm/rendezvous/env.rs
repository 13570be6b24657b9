//! A rank's place in the world from the variables that launchers set.
//!
//! `torchrun`'s names (PyTorch Elastic): RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

use std::path::Path;

use super::{RankInfo, Rendezvous};
use crate::{Error, Result};

fn number(name: &str, value: &str) -> Result<usize> {
    value.trim().parse().map_err(|_| Error::config(format!("{name}={value} is not a whole number")))
}

fn required(lookup: &impl Fn(&str) -> Option<String>, name: &str) -> Result<String> {
    lookup(name).ok_or_else(|| {
        Error::config(format!(
            "RANK is set but {name} is not; a launcher sets both (see torchrun). Unset RANK to start the ranks here"
        ))
    })
}

impl RankInfo {
    /// This process's place in the world; `None` if no launcher set RANK. `lookup` is given a variable's name.
    ///
    /// # Errors
    /// If variables are missing, no numbers, or contradict each other; the message names each with its value.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let Some(rank) = lookup("RANK") else { return Ok(None) };
        let rank = number("RANK", &rank)?;
        let world_size = number("WORLD_SIZE", &required(&lookup, "WORLD_SIZE")?)?;
        let optional = |name| lookup(name).map(|value| number(name, &value)).transpose();
        let info = Self {
            rank,
            world_size,
            local_rank: optional("LOCAL_RANK")?,
            local_world_size: optional("LOCAL_WORLD_SIZE")?,
            host: super::host::name(),
        };
        info.validate()?;
        Ok(Some(info))
    }

    /// The only rank of a world of one.
    pub fn alone() -> Self {
        Self { rank: 0, world_size: 1, local_rank: Some(0), local_world_size: Some(1), host: super::host::name() }
    }
}

/// `host` as the resolver takes it: an IPv6 address without the brackets that set it off from a port.
fn bare(host: &str) -> String {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host).into()
}

impl Rendezvous {
    /// MASTER_ADDR:MASTER_PORT, where rank 0 serves the store; the next port where torchrun's own agent has taken that
    /// one (TORCHELASTIC_USE_AGENT_STORE).
    ///
    /// # Errors
    /// If a variable is missing or no port.
    pub fn from_env(rank: usize, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let host = bare(&required(&lookup, "MASTER_ADDR")?);
        let port = number("MASTER_PORT", &required(&lookup, "MASTER_PORT")?)?;
        let agent = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let usable = port.checked_add(usize::from(agent)).and_then(|port| u16::try_from(port).ok());
        let port = usable.filter(|port| *port > 0).ok_or_else(|| {
            let why = if agent { " (the port after it is used, since torchrun's agent has taken it)" } else { "" };
            Error::config(format!("MASTER_PORT={port} is not a port{why}"))
        })?;
        Ok(Self::Tcp { host, port, is_host: rank == 0 })
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
        let lookup = |name: &str| {
            let entry = changes.iter().chain(&TORCHRUN).find(|(key, _)| *key == name)?;
            Some(entry.1.to_owned()).filter(|value| !value.is_empty())
        };
        let Some(info) = RankInfo::from_env(lookup)? else { return Ok(None) };
        let rendezvous = Rendezvous::from_env(info.rank, lookup)?;
        Ok(Some((info, rendezvous)))
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
