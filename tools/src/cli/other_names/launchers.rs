//! Flags of DeepSpeed's runner and torchrun, for `megatron launch`.

use super::{DEEPSPEED, TORCHRUN};

/// Names without dashes, and the advice for each.
type Flags = &'static [(&'static [&'static str], &'static str)];

/// DeepSpeed's flags, which docs/reference/from-deepspeed.md lists.
const OF_DEEPSPEED: Flags = &[
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
        &["elastic-training", "min-elastic-nodes", "max-elastic-nodes"],
        "the number of machines is fixed; --max-restarts restarts ranks",
    ),
    (
        &["bind-cores-to-rank", "bind-core-list", "enable-each-rank-log", "save-pid", "autotuning"],
        "this is not supported",
    ),
];

/// torchrun's flags, which docs/reference/from-torchrun.md lists.
const OF_TORCHRUN: Flags = &[
    (
        &["rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"],
        "use --master-addr and --master-port",
    ),
    (&["standalone"], "leave it out: ranks of one machine find a free port"),
    (
        &["log-dir", "redirects", "tee", "role", "monitor-interval", "start-method", "local-addr"],
        "leave it out: every line is printed with its rank, and ranks are processes of one kind",
    ),
];

/// All flags, each table with its page.
pub(super) const OTHER_LAUNCHERS: [(Flags, &str); 2] =
    [(OF_DEEPSPEED, DEEPSPEED), (OF_TORCHRUN, TORCHRUN)];

/// The advice for a flag of another launcher, by its name with dashes, and the page about it.
pub fn instead_of_launchers(name: &str) -> Option<(&'static str, &'static str)> {
    OTHER_LAUNCHERS.into_iter().find_map(|(flags, page)| {
        let (_, instead) = flags.iter().find(|(names, _)| names.contains(&name))?;
        Some((*instead, page))
    })
}
