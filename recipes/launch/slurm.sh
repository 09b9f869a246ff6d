#!/usr/bin/env bash
# Slurm, one task per GPU: sbatch --nodes=8 recipes/launch/slurm.sh train recipes/dit-xl-2.yaml ... resume=latest
#
# Five minutes before the time limit Slurm sends SIGUSR1, and SIGTERM where the job is preempted. The run saves, agrees
# with its other ranks and ends with 128 plus the signal's number. That code is what this script looks at: after these
# two signals the job goes back into the queue, and goes on from its checkpoint because of `resume=latest`. Any other code
# is the job's own end. srun starts the ranks itself, without torchrun between them and the signals.
#SBATCH --job-name=tread
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail
trap : TERM USR1  # this shell outlives the signal, to requeue the job

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"

srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
  exec tread "$@"' tread "$@" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do  # a trapped signal ends wait, not the run
  wait "$step"
  code=$?
done

case $code in
  $((128 + $(kill -l USR1))) | $((128 + $(kill -l TERM))))
    if ((${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-100})); then
      echo "stopped by signal $((code - 128)) and saved: job $SLURM_JOB_ID goes back into the queue"
      scontrol requeue "$SLURM_JOB_ID" && exit 0
    fi
    ;;
esac
exit "$code"
