#!/usr/bin/env bash
# All GPUs of one node (GPUS=4: four of them), restarted up to RESTARTS times where a process dies:
#   recipes/launch/one-node.sh train recipes/dit-xl-2.yaml data.path=latents output_dir=runs/xl2 resume=latest
# `resume=latest` lets a restart go on from the last checkpoint, and begins a run that has none.
set -euo pipefail
exec torchrun --standalone --nproc-per-node="${GPUS:-gpu}" --max-restarts="${RESTARTS:-3}" -m tread "$@"
