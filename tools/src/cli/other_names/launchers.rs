//! Flags of DeepSpeed's runner and torchrun, for `megatron launch`.

/// Names without dashes, and the advice for each. docs/reference/from-deepspeed.md and
/// from-torchrun.md list the same flags.
pub(super) const OTHER_LAUNCHERS: [(&[&str], &str); 10] = [
    (&["num-gpus", "num-accelerators"], "use --nproc-per-node, or --include with a --hostfile"),
    (&["num-nodes"], "use --include to select hosts of the --hostfile, or --nnodes"),
    (
        &["launcher"],
        "leave it out: a --hostfile's ranks are started over ssh. Slurm and MPI start `megatron pretrain` itself: `srun megatron pretrain …`",
    ),
    (&["launcher-args"], "use --ssh-args"),
    (
        &["no-ssh"],
        "start `megatron launch --nnodes N --node-rank I --master-addr HOST` on every machine",
    ),
    (
        &["no-ssh-check", "force-multi", "no-python", "no-local-rank"],
        "leave it out: this is always so, or cannot be changed here",
    ),
    (&["module"], "put the whole command after `--`: -- python -m MODULE"),
    (
        &["rdzv-backend", "rdzv-endpoint", "rdzv-id", "standalone"],
        "use --master-addr and --master-port",
    ),
    (
        &["elastic-training", "min-elastic-nodes", "max-elastic-nodes"],
        "the number of machines is fixed; --max-restarts restarts ranks",
    ),
    (
        &["bind-cores-to-rank", "bind-core-list", "enable-each-rank-log", "save-pid", "autotuning"],
        "this is not supported",
    ),
];

/// The advice for a flag of another launcher, by its name with dashes.
pub fn instead_of_launchers(name: &str) -> Option<&'static str> {
    OTHER_LAUNCHERS.iter().find(|(names, _)| names.contains(&name)).map(|(_, instead)| *instead)
}
