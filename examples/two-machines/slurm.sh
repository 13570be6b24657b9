#!/usr/bin/env bash
# Runs run.toml in a Slurm job of two machines with 8 GPUs each, one task a GPU. Five minutes before
# its time is over the job saves, and is put in the queue again until the run is done.
#
#   sbatch examples/two-machines/slurm.sh
#
# Change: time, cores and, where your site wants them, --partition and --account. Submit it in the
# folder to which the paths in run.toml are relative, and which all machines share; `megatron` is on
# the PATH there.

#SBATCH --job-name=two-machines
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# By this the ranks know each other. Those of other jobs on these machines do not have it.
MEGATRON_RUN_SECRET=$(openssl rand -hex 32) || exit
export MEGATRON_RUN_SECRET

# What `megatron launch` would set: a GPU's queues for all streams, and NCCL's connections made at
# the start rather than amid a step.
export CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_RUNTIME_CONNECT=0

# Since Slurm 22.05 srun does not take --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-8}

# Ranks learn their places, and where to meet, from the variables of srun.
srun megatron pretrain examples/two-machines/run.toml
code=$?

# 138: stopped by SIGUSR1, and saved.
[ "$code" -ne 138 ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$code"
