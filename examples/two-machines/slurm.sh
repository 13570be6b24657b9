#!/usr/bin/env bash
# Runs run.toml in a Slurm job of two machines with 8 GPUs each, one task per GPU. Five minutes
# before its time limit the job saves, and is requeued until the run is done.
#
#   sbatch examples/two-machines/slurm.sh
#
# Change: time, cores and, if your site requires them, --partition and --account. The signal's time
# must be enough for a step and a save: 80 GB / the speed of the disk. Submit it from the folder
# that the paths in run.toml are relative to. All machines must share this folder, and `megatron`
# must be on the PATH there.

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

# Authenticates the ranks to each other. Other jobs on these machines do not have this secret.
MEGATRON_RUN_SECRET=$(openssl rand -hex 32) || exit
export MEGATRON_RUN_SECRET

# The settings of `megatron launch`: a GPU queue for every stream, and NCCL connections at the start
# instead of in the middle of a step.
export CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_RUNTIME_CONNECT=0

# Since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-8}

# Ranks get their numbers and their meeting point from the variables of srun.
srun megatron pretrain examples/two-machines/run.toml
code=$?

# 138: saved and stopped after SIGUSR1.
[ "$code" -ne 138 ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$code"
