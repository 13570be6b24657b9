//! The variables of processes under each launcher, and the resulting places.

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
fn of(
    variables: &[(&str, &str)],
    changes: &[(&str, &str)],
) -> Result<Option<(RankInfo, Rendezvous)>> {
    place(|name: &str| {
        let entry = changes.iter().chain(variables).find(|(key, _)| *key == name)?;
        Some(entry.1.to_owned()).filter(|value| !value.is_empty())
    })
}

/// Task 5 of `srun -n 7` over three nodes, together with the allocation's variables of
/// `sbatch -n 9`.
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
    assert_eq!(
        (info.rank, info.world_size, info.local_rank, info.local_world_size),
        (5, 7, Some(1), Some(3))
    );
    // The job's last four digits.
    assert_eq!(rendezvous, Rendezvous::Tcp { host: "node01".into(), port: 19567, is_host: false });
    let told = [("SLURM_NODEID", "1"), ("MASTER_ADDR", "ib-node01"), ("MASTER_PORT", "7000")];
    let (info, rendezvous) = of(&SLURM, &told).unwrap().unwrap();
    assert_eq!(info.local_world_size, Some(2));
    assert_eq!(
        rendezvous,
        Rendezvous::Tcp { host: "ib-node01".into(), port: 7000, is_host: false }
    );
    let older = [
        ("SLURM_STEP_ID", ""),
        ("SLURM_STEPID", "3"),
        ("SLURM_STEP_NUM_TASKS", ""),
        ("SLURM_NODEID", ""),
    ];
    let (info, _) = of(&SLURM, &older).unwrap().unwrap();
    assert_eq!((info.world_size, info.local_world_size), (9, None));
}

#[test]
fn all_tasks_of_a_step_on_one_machine_meet_there() {
    let one = [("SLURM_STEP_TASKS_PER_NODE", "7"), ("SLURM_NODEID", "0")];
    let (info, rendezvous) = of(&SLURM, &one).unwrap().unwrap();
    assert!(
        info.one_host()
            && matches!(rendezvous, Rendezvous::Tcp { host, .. } if host == "127.0.0.1")
    );
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
        let pmi2: Vec<_> =
            [("PMI_RANK", "0"), ("PMI_SIZE", "1")].into_iter().chain(SLURM).collect();
        assert!(of(&pmi2, changes).unwrap().is_none(), "{why}, with MpiDefault=pmi2");
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
    let all: Vec<_> =
        OPEN_MPI.iter().chain(&HYDRA).chain(&SLURM).chain(&TORCHRUN).copied().collect();
    let (info, rendezvous) = of(&all, &[]).unwrap().unwrap();
    assert_eq!((info.rank, info.variables), (5, Variables::TORCHRUN));
    assert!(matches!(rendezvous, Rendezvous::Tcp { host, .. } if host == "node0"));
}

#[test]
fn ranks_of_mpi_meet_on_their_machine_or_where_they_are_told() {
    let (info, rendezvous) = of(&HYDRA, &[]).unwrap().unwrap();
    assert_eq!(
        (info.rank, info.world_size, info.local_rank, info.local_world_size),
        (3, 4, Some(3), Some(4))
    );
    assert_eq!(
        rendezvous,
        Rendezvous::Tcp { host: "127.0.0.1".into(), port: 29500, is_host: false }
    );
    let told = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "7000")];
    let (info, rendezvous) = of(&OPEN_MPI, &told).unwrap().unwrap();
    assert_eq!(
        (info.rank, info.world_size, info.local_rank, info.local_world_size),
        (3, 4, Some(1), Some(2))
    );
    assert_eq!(rendezvous, Rendezvous::Tcp { host: "node0".into(), port: 7000, is_host: false });
}

#[test]
fn a_bad_variable_of_another_launcher_is_named_as_it_is_called_there() {
    for (variables, changes, expected) in [
        (
            &SLURM[..],
            &[("SLURM_PROCID", "7")][..],
            "SLURM_PROCID=7 must be below SLURM_STEP_NUM_TASKS=7",
        ),
        (&SLURM, &[("SLURM_PROCID", "x")], "SLURM_PROCID=x"),
        (&SLURM, &[("SLURM_STEP_NUM_TASKS", ""), ("SLURM_NTASKS", "-")], "SLURM_NTASKS=-"),
        (
            &SLURM,
            &[("SLURM_STEP_NUM_TASKS", ""), ("SLURM_NTASKS", "")],
            "Unset SLURM_STEP_ID to start",
        ),
        (&SLURM, &[("SLURM_NODEID", "3")], "SLURM_NODEID=3 must be below 3"),
        (
            &SLURM,
            &[("SLURM_NODEID", "0"), ("SLURM_LOCALID", "2")],
            "SLURM_LOCALID=2 must be below SLURM_STEP_TASKS",
        ),
        (
            &SLURM,
            &[("SLURM_NODEID", "0"), ("SLURM_STEP_TASKS_PER_NODE", "4(2)")],
            "SLURM_STEP_TASKS_PER_NODE=4(2)",
        ),
        (&SLURM, &[("SLURM_STEP_NODELIST", "node[1")], "SLURM_STEP_NODELIST=node[1"),
        (
            &SLURM,
            &[("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", "")],
            "MASTER_ADDR is not set",
        ),
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
        (
            &HYDRA,
            &[("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "1")],
            "mpirun -genv MASTER_ADDR HOST",
        ),
    ] {
        let message = of(variables, changes).unwrap_err().to_string();
        assert!(message.contains(expected), "{changes:?}: {message}");
    }
}

#[test]
fn the_variables_of_torchrun_are_understood() {
    let (info, rendezvous) = parse(&[]).unwrap().unwrap();
    assert_eq!(
        (info.rank, info.world_size, info.local_rank, info.local_world_size),
        (5, 8, Some(1), Some(4))
    );
    assert_eq!(rendezvous, Rendezvous::Tcp { host: "node0".into(), port: 29500, is_host: false });
    let (_, rendezvous) = parse(&[("RANK", "0"), ("LOCAL_RANK", "0")]).unwrap().unwrap();
    assert!(matches!(rendezvous, Rendezvous::Tcp { is_host: true, .. }));
}

#[test]
fn ranks_are_on_one_host_only_if_a_launcher_says_so() {
    // Kubeflow's PyTorchJob gives no information about hosts, and tells rank 0 that MASTER_ADDR is
    // localhost.
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
fn a_world_size_without_a_rank_is_told_or_refused_where_others_may_be_told_the_same() {
    let told = |changes: &[(&str, &str)]| {
        let lookup = |name: &str| {
            changes.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        };
        RankInfo::from_env(lookup).map(|place| (place.is_some(), ignored_world(lookup)))
    };
    let (is_rank, note) = told(&[("WORLD_SIZE", "8"), ("MASTER_PORT", "1")]).unwrap();
    assert!(!is_rank && note.unwrap().contains("WORLD_SIZE=8 is ignored: RANK is not set"));
    let refusal = told(&[("WORLD_SIZE", "8"), ("MASTER_ADDR", "a")]).unwrap_err().to_string();
    assert!(
        refusal.contains("WORLD_SIZE=8 and MASTER_ADDR=a are set but RANK is not"),
        "{refusal}"
    );
    // A world of one needs no rank. Ranks of MPI, Slurm and torchrun have their numbers.
    assert_eq!(told(&[("WORLD_SIZE", "1"), ("MASTER_ADDR", "a")]).unwrap(), (false, None));
    assert_eq!(told(&[]).unwrap(), (false, None));
    for variables in [&TORCHRUN[..], &HYDRA] {
        let both: Vec<_> =
            variables.iter().copied().chain([("WORLD_SIZE", "8"), ("MASTER_ADDR", "a")]).collect();
        assert_eq!(told(&both).unwrap(), (true, None));
    }
}

#[test]
fn urls_name_a_port_or_a_folder() {
    let tcp = Rendezvous::Tcp { host: "node0".into(), port: 1234, is_host: true };
    assert_eq!(Rendezvous::from_url(0, "tcp://node0:1234").unwrap(), tcp);
    assert_eq!(
        Rendezvous::from_url(1, "file:///a/b").unwrap(),
        Rendezvous::File { dir: "/a/b".into() }
    );
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
        (
            &[("MASTER_PORT", "65535"), ("TORCHELASTIC_USE_AGENT_STORE", "True")],
            "MASTER_PORT=65535",
        ),
    ] {
        let message = parse(changes).unwrap_err().to_string();
        assert!(message.contains(expected), "{changes:?}: {message}");
    }
}
