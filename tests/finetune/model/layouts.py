"""Run in each of two processes: `tread finetune` for each config given, one after the other in one process group.

Each rank writes `rank-N.json` into the folder of a run: the weights it holds, and how many were loaded whole. The first
writes `start.safetensors`: the weights that the run began with, put together. A config whose name ends in `-whole` is
loaded by the stock loader, whole on each rank.
"""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from tread.finetune import run
from tread.finetune.config import read_config
from tread.finetune.model.source import Source
from tread.finetune.task import Finetuning

WHOLE: list[str] = []
"""Transformers that were loaded whole."""
START = "start.safetensors"
own_transformer, own_empty = Source.transformer, Source.empty


def transformer(self: Source, part: str, **arguments: Any) -> nn.Module:
    WHOLE.append(part)
    return own_transformer(self, part, **arguments)


def no_empty(*_: Any, **__: Any) -> None:
    """`Source.empty` of files that cannot be read tensor by tensor."""


class Recorded(Finetuning):
    """The task, which writes down what its rank holds when it is made."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        parameters = list(self.model.parameters())
        held = sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor))
        facts = {"whole": WHOLE.copy(), "held": held, "all": sum(p.numel() for p in parameters)}
        (self.folder / f"rank-{self.accelerator.process_index}.json").write_text(json.dumps(facts))
        whole = {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for name, parameter in self.model.state_dict(keep_vars=True).items()
            if isinstance(parameter, nn.Parameter)
        }
        if self.accelerator.is_main_process:
            save_file({name: tensor.detach().contiguous() for name, tensor in whole.items()}, self.folder / START)


def keep_group(accelerator: Accelerator) -> None:
    """`job.end` for a run after which another begins: its processes can meet only once."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    AcceleratorState._reset_state(reset_partial_state=False)  # the next precision may differ


def main(*configs: Path) -> None:
    run.end, run.Finetuning, Source.transformer = keep_group, Recorded, transformer
    for config in configs:
        WHOLE.clear()
        Source.empty = no_empty if config.stem.endswith("-whole") else own_empty
        run.finetune(read_config(config))
    distributed.destroy_process_group()
