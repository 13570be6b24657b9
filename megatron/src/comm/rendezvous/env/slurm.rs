//! The variables of a Slurm job step (srun(1), "OUTPUT ENVIRONMENT VARIABLES").
//!
//! A process may have Slurm's variables without being one of several ranks. The shell of `salloc`,
//! the script of `sbatch`, an interactive step, and their child processes have the allocation's
//! numbers (SLURM_NTASKS=8, SLURM_PROCID=0) but are one process. A process is a rank if it has
//! both:
//!
//! - SLURM_STEP_ID, which `srun` sets for its tasks and `salloc` and `sbatch` do not, with the
//!   number of a regular step. Slurm's own steps have the highest numbers (slurm.h: 0xfffffffa for
//!   an interactive step, 0xfffffffb for a batch script, …).
//! - More than one task in that step. The only task of a step, such as `srun --pty bash`, is a
//!   shell, or a program that may start its own ranks or be the only rank.
//!
//! PyTorch Lightning checks the job's name (`bash`, `interactive`). That is less reliable, because
//! tasks inherit it from the allocation.

use super::{Lookup, number};
use crate::{Error, Result};

/// Steps with at least this number are Slurm's own.
const FIRST_RESERVED_STEP: u32 = 0xffff_fff0;

/// Whether this process is one of several tasks of a step.
pub fn is_task(lookup: &impl Lookup) -> bool {
    let step = first(lookup, &["SLURM_STEP_ID", "SLURM_STEPID"])
        .and_then(|(_, id)| id.trim().parse::<u32>().ok());
    step.is_some_and(|id| id < FIRST_RESERVED_STEP)
        && lookup("SLURM_PROCID").is_some()
        && lookup(tasks_variable(lookup)).is_none_or(|tasks| tasks.trim() != "1")
}

/// The variable with the number of tasks. The step's variable is right even if `--preserve-env`
/// keeps the allocation's value in the other one.
pub fn tasks_variable(lookup: &impl Lookup) -> &'static str {
    first(lookup, &["SLURM_STEP_NUM_TASKS"]).map_or("SLURM_NTASKS", |(name, _)| name)
}

/// The variable with the number of tasks on each node.
pub fn tasks_per_node_variable(lookup: &impl Lookup) -> &'static str {
    first(lookup, &["SLURM_STEP_TASKS_PER_NODE"]).map_or("SLURM_TASKS_PER_NODE", |(name, _)| name)
}

/// Number of tasks on this node, if Slurm gives both the numbers of all nodes and this node's
/// index.
///
/// # Errors
/// If the values are not such numbers.
pub fn tasks_here(lookup: &impl Lookup) -> Result<Option<usize>> {
    let name = tasks_per_node_variable(lookup);
    let (Some(list), Some(node)) = (lookup(name), lookup("SLURM_NODEID")) else { return Ok(None) };
    let node = number("SLURM_NODEID", &node)?;
    let runs = parse_tasks(&list).ok_or_else(|| {
        Error::config(format!(
            "{name}={list} is not a list of tasks per node, such as 4(x2),3 for 4, 4 and 3"
        ))
    })?;
    let mut before = 0usize;
    for (tasks, nodes) in runs {
        before = before.saturating_add(nodes);
        if node < before {
            return Ok(Some(tasks));
        }
    }
    Err(Error::config(format!(
        "SLURM_NODEID={node} must be below {before}, the nodes of {name}={list}"
    )))
}

/// Parses `4(x2),3` as [(4, 2), (3, 1)]: a number of tasks, and how many nodes have it.
fn parse_tasks(list: &str) -> Option<Vec<(usize, usize)>> {
    let run = |run: &str| match run.trim().split_once("(x") {
        Some((tasks, nodes)) => Some((tasks.parse().ok()?, nodes.strip_suffix(')')?.parse().ok()?)),
        None => Some((run.trim().parse().ok()?, 1)),
    };
    list.split(',').map(run).collect()
}

/// The step's first node, on which Slurm puts task 0 (except with `--distribution=arbitrary`).
///
/// # Errors
/// If no variable lists the nodes, or the variable does not hold a list of nodes.
pub fn first_node(lookup: &impl Lookup) -> Result<String> {
    let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) = first(lookup, &names) else {
        return Err(Error::config(format!(
            "MASTER_ADDR is not set, and its default, the first node of {}, is not set either; set \
             MASTER_ADDR to the machine of SLURM_PROCID=0",
            names.join(", ")
        )));
    };
    first_of(&list).ok_or_else(|| {
        Error::config(format!(
            "{name}={list} is not a list of nodes, such as node[01-03,7]; set MASTER_ADDR to the machine of SLURM_PROCID=0"
        ))
    })
}

/// The first name of a list such as `node[01-03,7],gpu-a[1-2]b`: every pair of brackets is replaced
/// by the first value in it.
fn first_of(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        name.push_str(&rest[..end]);
        match rest[end..].chars().next() {
            Some('[') => {
                let (inside, after) = rest[end + 1..].split_once(']')?;
                let number = inside.split([',', '-']).next().unwrap_or_default();
                if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                name.push_str(number);
                rest = after;
            }
            Some(']') => return None,
            _ => return Some(name).filter(|name| !name.is_empty()),
        }
    }
}

/// 15000 + the job's number modulo 10000, so that jobs on the same machine use different ports.
/// PyTorch Lightning uses the same rule.
///
/// # Errors
/// If the job's number is not a number.
pub fn port(lookup: &impl Lookup) -> Result<Option<usize>> {
    let job = first(lookup, &["SLURM_JOB_ID", "SLURM_JOBID"]);
    job.map(|(name, id)| Ok(15_000 + number(name, &id)? % 10_000)).transpose()
}

/// The first of `names` that is set, with its value.
fn first(lookup: &impl Lookup, names: &[&'static str]) -> Option<(&'static str, String)> {
    names.iter().find_map(|name| Some((*name, lookup(name)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_node_of_a_list_is_found() {
        for (list, first) in [
            ("n1", "n1"),
            ("node[01-03,7],gpu-a[1-2]b", "node01"),
            ("node[7,01-03]", "node7"),
            ("gpu-a[1-2]b,node3", "gpu-a1b"),
            ("r[1-2]n[005-006].site", "r1n005.site"),
            ("login,node[1-2]", "login"),
        ] {
            assert_eq!(first_of(list).as_deref(), Some(first), "{list}");
        }
        for bad in ["", ",n1", "node[1-2", "node]1[", "node[]", "node[a-b]", "node[[1]]"] {
            assert_eq!(first_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn tasks_on_nodes_are_counted() {
        assert_eq!(parse_tasks("4(x2),3"), Some(vec![(4, 2), (3, 1)]));
        assert_eq!(parse_tasks("2"), Some(vec![(2, 1)]));
        for bad in ["", "4(x2", "4(2)", "a", "4,,3"] {
            assert_eq!(parse_tasks(bad), None, "{bad}");
        }
    }
}
