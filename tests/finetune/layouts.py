"""Run by torchrun: `tread finetune` for each config given, one run after the other in one process group."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import distributed

from tread.finetune import run
from tread.finetune.config import read_config


def keep_group(accelerator: Accelerator) -> None:
    """`job.end` for a run after which another begins: torchrun's processes can meet only once."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    AcceleratorState._reset_state(reset_partial_state=False)  # the next precision may differ


if __name__ == "__main__":
    torch.set_num_threads(1)
    run.end = keep_group
    for config in sys.argv[1:]:
        run.finetune(read_config(Path(config)))
    distributed.destroy_process_group()
