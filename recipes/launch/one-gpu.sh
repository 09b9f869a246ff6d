#!/usr/bin/env bash
# One GPU: recipes/launch/one-gpu.sh train recipes/dit-b-2.yaml data.path=latents output_dir=runs/b2
# Given again, it goes on from the last checkpoint (resume=latest; resume_from_checkpoint=latest for finetune).
set -euo pipefail
exec tread "$@"
