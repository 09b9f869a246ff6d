"""Run by a test, alone or by torchrun: load the transformers of configs, and write how far anonymous memory climbed.

`python -m tests.finetune.model.memory OUT TINY BIG ...`: config TINY is loaded first, so that imports and pools are
there before the climb of each BIG is measured. Each rank writes `OUT/BIG-N.json`: the climb, the climb where the stock
class loads or makes the model whole instead, and what it holds in the end, in bytes.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from tread.finetune.config import read_config
from tread.finetune.model import scratch
from tread.finetune.model.sharded import shard_models
from tread.finetune.model.source import Source
from tread.finetune.run import load_models, open_job
from tread.training.job import end
from tread.training.memory import AnonymousPeak, give_back


def held(model: nn.Module) -> int:
    """Bytes that this process holds of a model."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def load(path: Path) -> tuple[nn.Module, Accelerator]:
    """The transformer of a config, sharded if that says so, as a run has it before its first step."""
    config, family, accelerator = open_job(read_config(path))
    models = load_models(config, family, accelerator.device)
    (model,) = models.values()
    if config.sharded:
        shard_models(config, family, models, model, accelerator)
    return model, accelerator


def climb(path: Path) -> tuple[int | None, int]:
    """How far anonymous memory climbs where a config is loaded, and what is held then."""
    gc.collect()  # a sharded model before it
    give_back()
    with AnonymousPeak() as loading:
        model, _ = load(path)
    return loading.bytes, held(model)


def no_empty(*_: Any, **__: Any) -> None:
    """`Source.empty` of files that cannot be read tensor by tensor."""


def make(source: Source, part: str) -> nn.Module:
    """`scratch.empty` that makes the model whole."""
    return scratch.make(source, part, seed=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, tiny, *configs = (Path(argument) for argument in sys.argv[1:])
    _, accelerator = load(tiny)
    found = {path: climb(path) for path in configs}
    Source.empty, scratch.empty = no_empty, make
    for path, (climbed, holds) in found.items():
        whole, _ = climb(path)
        facts = {"climbed": climbed, "whole": whole, "held": holds}
        (out / f"{path.stem}-{accelerator.process_index}.json").write_text(json.dumps(facts))
    end(accelerator)
