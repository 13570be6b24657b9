//! The place in a world that a launcher gives a process, in torchrun's environment variables.

use crate::error::{Error, Result};

/// One rank's place in the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherEnv {
    /// RANK.
    pub rank: usize,
    /// WORLD_SIZE.
    pub world_size: usize,
    /// LOCAL_RANK: the rank within this machine.
    pub local_rank: usize,
    /// LOCAL_WORLD_SIZE: ranks on this machine.
    pub local_world_size: usize,
}

impl LauncherEnv {
    /// What the environment says; `None` if no launcher started this process, that is, if RANK is not set.
    ///
    /// # Errors
    /// If RANK is set and the rest is missing or does not fit.
    pub fn read() -> Result<Option<Self>> {
        Self::from_vars(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let number = |name: &str| match var(name) {
            None => Ok(None),
            Some(text) => text
                .trim()
                .parse::<usize>()
                .map(Some)
                .map_err(|_| Error::usage(format!("{name} = {text:?} (environment) must be a whole number"))),
        };
        let Some(rank) = number("RANK")? else {
            return Ok(None);
        };
        let Some(world_size) = number("WORLD_SIZE")? else {
            return Err(Error::usage(
                "RANK is set (environment), WORLD_SIZE is not: set both, as torchrun does, or unset RANK to start the ranks here",
            ));
        };
        if rank >= world_size {
            return Err(Error::usage(format!(
                "RANK = {rank} (environment) must be below WORLD_SIZE = {world_size} (environment)"
            )));
        }
        // SLURM-like launchers set only the first two; then the world is taken to be on one machine.
        let local_rank = number("LOCAL_RANK")?.unwrap_or(rank);
        let local_world_size = number("LOCAL_WORLD_SIZE")?.unwrap_or(world_size);
        if local_rank >= local_world_size {
            return Err(Error::usage(format!(
                "LOCAL_RANK = {local_rank} (environment) must be below LOCAL_WORLD_SIZE = {local_world_size} (environment)"
            )));
        }
        Ok(Some(Self { rank, world_size, local_rank, local_world_size }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Option<LauncherEnv>> {
        LauncherEnv::from_vars(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn without_rank_there_is_no_launcher() {
        assert_eq!(read(&[("WORLD_SIZE", "4")]).unwrap(), None);
    }

    #[test]
    fn torchruns_variables_give_the_place() {
        let place =
            read(&[("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")]).unwrap();
        let expected = LauncherEnv { rank: 5, world_size: 8, local_rank: 1, local_world_size: 4 };
        assert_eq!(place, Some(expected));
    }

    #[test]
    fn a_rank_outside_of_the_world_is_refused() {
        assert!(read(&[("RANK", "4"), ("WORLD_SIZE", "4")]).unwrap_err().to_string().contains("RANK = 4"));
    }

    #[test]
    fn a_rank_without_a_world_is_refused() {
        assert!(read(&[("RANK", "4")]).unwrap_err().to_string().contains("WORLD_SIZE"));
    }

    #[test]
    fn text_in_place_of_a_number_is_refused() {
        assert!(read(&[("RANK", "first"), ("WORLD_SIZE", "4")]).unwrap_err().to_string().contains("\"first\""));
    }
}
