"""Run by a test, alone or by torchrun: load the transformer of a config, and write how far anonymous memory climbed.

`python -m tests.finetune.memory OUT TINY BIG`: config TINY is loaded first, so that imports and pools are there before
the climb of config BIG is measured. Each rank writes `OUT/rank-N.json`: the climb, the climb where the stock loader
reads the model whole instead, and what it holds in the end, in bytes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from tread.attach.registry import layers_of
from tread.finetune.config import read_config
from tread.finetune.job import FinetuneJob
from tread.finetune.model.adapters import stored_name
from tread.finetune.model.source import Source
from tread.finetune.run import load_models, open_job
from tread.training.job import end
from tread.training.memory import AnonymousPeak, give_back
from tread.training.sharding.files import materialise
from tread.training.sharding.layout import shard


def held(model: nn.Module) -> int:
    """Bytes that this process holds of a model."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def load(path: Path) -> tuple[nn.Module, Accelerator]:
    """The transformer of a config, sharded if that says so, as a run has it before its first step."""
    config, family, accelerator = open_job(read_config(path))
    (model,) = load_models(config, family, accelerator.device).values()
    if config.sharded:
        shard(model, layers_of(model), FinetuneJob.of(config), accelerator)
        if any(parameter.is_meta for parameter in model.parameters()):
            materialise(model, family.source.weights("transformer").files, accelerator.device, stored_name)
    return model, accelerator


def climb(path: Path) -> tuple[int | None, int]:
    """How far anonymous memory climbs where a config is loaded, and what is held then."""
    give_back()
    with AnonymousPeak() as loading:
        model, _ = load(path)
    return loading.bytes, held(model)


def no_empty(*_: Any, **__: Any) -> None:
    """`Source.empty` of files that cannot be read tensor by tensor."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, tiny, big = (Path(argument) for argument in sys.argv[1:])
    _, accelerator = load(tiny)
    climbed, holds = climb(big)
    Source.empty = no_empty
    whole, _ = climb(big)
    facts = {"climbed": climbed, "whole": whole, "held": holds}
    (out / f"rank-{accelerator.process_index}.json").write_text(json.dumps(facts))
    end(accelerator)
