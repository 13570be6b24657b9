//! Ranks started by `srun` and `mpirun`, which set other variables than torchrun.

use std::collections::BTreeMap;
use std::process::Command;

use crate::site::{SOON, Site, ended, refused};
use crate::support::stderr;

/// The site's run as two ranks.
const TWO: [&str; 2] = ["--pipeline-model-parallel-size=1", "--distributed-timeout-minutes=0.5"];

type Variables = BTreeMap<&'static str, String>;

/// The variables that `srun -n 2` sets for task `rank`, together with those of `salloc`'s shell
/// around it.
fn srun(rank: usize) -> Variables {
    let job = std::process::id().to_string();
    let words = [
        ("SLURM_JOB_NAME", "interactive"),
        ("SLURM_JOB_NODELIST", "node[01-02]"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_STEP_TASKS_PER_NODE", "2"),
        ("SLURM_STEP_NODELIST", "node01"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_NODEID", "0"),
    ];
    let mut variables: Variables =
        words.into_iter().map(|(name, word)| (name, word.to_string())).collect();
    variables.extend([
        ("SLURM_JOB_ID", job),
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_LOCALID", rank.to_string()),
    ]);
    variables
}

/// The variables that Open MPI's `mpirun -n 2` sets for rank `rank`.
fn open_mpi(rank: usize) -> Variables {
    BTreeMap::from([
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", "2".to_string()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2".to_string()),
    ])
}

fn told(site: &Site, variables: Variables) -> Command {
    let mut command = site.pretrain(&TWO);
    command.envs(variables);
    command
}

/// Asserts that two processes with these variables reach the same losses as a run that starts its
/// own ranks.
fn train_together(variables: impl Fn(usize) -> Variables) {
    let site = Site::new();
    site.succeed(&TWO);
    let expected = site.losses();
    std::fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let ranks = [0, 1].map(|rank| told(&site, variables(rank)).spawn().unwrap());
    for output in ended(ranks.into(), 3 * SOON) {
        assert!(output.status.success(), "{}", stderr(&output));
    }
    assert_eq!(site.losses(), expected);
    site.assert_nothing_left();
}

#[test]
fn tasks_of_srun_train_together() {
    train_together(srun);
}

#[test]
fn ranks_of_mpirun_train_together() {
    let port = crate::site::free_port().to_string();
    train_together(|rank| {
        open_mpi(rank).into_iter().chain([("MASTER_PORT", port.clone())]).collect()
    });
}

#[test]
fn a_shell_in_an_allocation_starts_its_own_ranks() {
    let step = [
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
    ];
    let mut script_of_sbatch = srun(0);
    script_of_sbatch.retain(|name, _| !step.contains(name));
    let mut interactive_step_of_salloc = srun(0);
    let one_task = [
        ("SLURM_STEP_ID", "4294967290"),
        ("SLURM_STEP_NUM_TASKS", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "1"),
    ];
    interactive_step_of_salloc.extend(one_task.map(|(name, value)| (name, value.to_string())));
    for mut variables in [script_of_sbatch, interactive_step_of_salloc] {
        let site = Site::new();
        variables.insert("SLURM_NTASKS", "3".to_string());
        let output = told(&site, variables).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(site.last_step(), 20);
    }
}

#[test]
fn what_cannot_be_used_is_named_as_its_launcher_calls_it() {
    let site = Site::new();
    let with = |mut variables: Variables, name: &'static str, value: &str| {
        variables.insert(name, value.to_string());
        told(&site, variables).output().unwrap()
    };
    let cases = [
        (
            with(srun(1), "SLURM_STEP_NUM_TASKS", "3"),
            "SLURM_STEP_NUM_TASKS = 3 (environment) must be a multiple of",
        ),
        (with(srun(1), "SLURM_PROCID", "2"), "SLURM_PROCID=2 must be below SLURM_STEP_NUM_TASKS=2"),
        (
            with(open_mpi(1), "OMPI_COMM_WORLD_SIZE", "3"),
            "OMPI_COMM_WORLD_SIZE = 3 (environment) must be a multiple of",
        ),
        (with(open_mpi(1), "OMPI_COMM_WORLD_LOCAL_SIZE", "1"), "OMPI_COMM_WORLD_LOCAL_RANK=1"),
    ];
    for (output, message) in &cases {
        refused(output, &[message]);
    }
    // With two machines, no variable tells where the first one is.
    let mut variables = open_mpi(1);
    variables.extend([
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0".into()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "1".into()),
    ]);
    let message = [
        "MASTER_ADDR is not set",
        "OMPI_COMM_WORLD_LOCAL_SIZE=1",
        "mpirun -x MASTER_ADDR=HOST",
        "--rdzv",
    ];
    refused(&told(&site, variables).output().unwrap(), &message);
}

#[test]
fn a_port_that_another_program_has_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let site = Site::new();
    let variables: Variables =
        open_mpi(0).into_iter().chain([("MASTER_PORT", port.to_string())]).collect();
    refused(
        &told(&site, variables).output().unwrap(),
        &[&format!("port {port} of 127.0.0.1 is in use"), "MASTER_PORT"],
    );
}
