#!/usr/bin/env bash
# Several nodes without a scheduler: the same line on each node, within ten minutes of each other.
#   HEAD=node1:29500 NODES=8 recipes/launch/several-nodes.sh train recipes/dit-xl-2.yaml ... resume=latest
# HEAD is a node that all others reach, with a free port. output_dir lies on a file system that all share.
set -euo pipefail
: "${HEAD:?set HEAD to HOST:PORT of one of the nodes}" "${NODES:?set NODES to the number of nodes}"
exec torchrun --nnodes="$NODES" --nproc-per-node="${GPUS:-gpu}" --max-restarts="${RESTARTS:-3}" \
  --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="${JOB:-tread}" -m tread "$@"
