//! A rank's place in the world from the variables that launchers set.
//!
//! `torchrun`'s names (PyTorch Elastic): RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

use super::{RankInfo, Rendezvous};
use crate::{Error, Result};

/// What the environment says of this rank; `None` if no launcher set RANK and WORLD_SIZE.
///
/// `lookup` is given a variable's name. Rank 0 serves the store at MASTER_ADDR:MASTER_PORT; where torchrun's own agent
/// has taken that port (TORCHELASTIC_USE_AGENT_STORE), at the next one.
///
/// # Errors
/// If variables are missing, no numbers, or contradict each other; the message names each with its value.
pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<(RankInfo, Rendezvous)>> {
    let required = |name: &str, beside: &str| {
        lookup(name).ok_or_else(|| {
            Error::config(format!("{beside} is set but {name} is not; a launcher sets both (see torchrun)"))
        })
    };
    let number = |name: &str, value: String| {
        value.trim().parse::<usize>().map_err(|_| Error::config(format!("{name}={value} is not a whole number")))
    };
    if lookup("RANK").is_none() && lookup("WORLD_SIZE").is_none() {
        return Ok(None);
    }
    let rank = number("RANK", required("RANK", "WORLD_SIZE")?)?;
    let world_size = number("WORLD_SIZE", required("WORLD_SIZE", "RANK")?)?;
    let optional = |name, default| lookup(name).map_or(Ok(default), |value| number(name, value));
    let info = RankInfo {
        rank,
        world_size,
        // Without word of hosts, all ranks are taken to be on one.
        local_rank: optional("LOCAL_RANK", rank)?,
        local_world_size: optional("LOCAL_WORLD_SIZE", world_size)?,
        host: super::host::name(),
    };
    info.validate()?;
    let host = required("MASTER_ADDR", "RANK")?;
    let port = number("MASTER_PORT", required("MASTER_PORT", "RANK")?)?;
    let agent = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let usable = u16::try_from(port + usize::from(agent)).ok().filter(|port| *port > 0);
    let port = usable.ok_or_else(|| {
        let why = if agent { " (the port after it is used, since torchrun's agent has taken it)" } else { "" };
        Error::config(format!("MASTER_PORT={port} is not a port{why}"))
    })?;
    Ok(Some((info, Rendezvous::Tcp { host, port, is_host: rank == 0 })))
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
        from_env(|name| {
            let entry = changes.iter().chain(&TORCHRUN).find(|(key, _)| *key == name)?;
            Some(entry.1.to_owned()).filter(|value| !value.is_empty())
        })
    }

    #[test]
    fn the_variables_of_torchrun_are_understood() {
        let (info, rendezvous) = parse(&[]).unwrap().unwrap();
        assert_eq!((info.rank, info.world_size, info.local_rank, info.local_world_size), (5, 8, 1, 4));
        assert_eq!(rendezvous, Rendezvous::Tcp { host: "node0".into(), port: 29500, is_host: false });
        let (_, rendezvous) = parse(&[("RANK", "0"), ("LOCAL_RANK", "0")]).unwrap().unwrap();
        assert!(matches!(rendezvous, Rendezvous::Tcp { is_host: true, .. }));
    }

    #[test]
    fn the_port_of_the_agents_store_is_avoided() {
        let (_, rendezvous) = parse(&[("TORCHELASTIC_USE_AGENT_STORE", "True")]).unwrap().unwrap();
        assert!(matches!(rendezvous, Rendezvous::Tcp { port: 29501, .. }));
    }

    #[test]
    fn without_a_launcher_there_is_no_rank() {
        assert!(from_env(|_| None).unwrap().is_none());
        assert!(parse(&[("RANK", ""), ("WORLD_SIZE", "")]).unwrap().is_none());
    }

    #[test]
    fn a_bad_variable_is_named_with_its_value() {
        for (changes, expected) in [
            (&[("RANK", "x")][..], "RANK=x"),
            (&[("RANK", "")], "RANK is not"),
            (&[("WORLD_SIZE", "")], "WORLD_SIZE is not"),
            (&[("RANK", "8")], "RANK=8"),
            (&[("WORLD_SIZE", "0")], "WORLD_SIZE=0"),
            (&[("LOCAL_RANK", "4")], "LOCAL_RANK=4"),
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
