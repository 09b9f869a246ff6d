"""The transformers of a sharded run: sharded on the meta device, then filled with each process's own shards.

Released weights are read from their files shard by shard, new ones are drawn layer by layer. A transformer that is not
on the meta device, because only its library can load it, is sharded from memory.
"""

from collections.abc import Mapping
from functools import partial

import torch
from accelerate import Accelerator
from torch import nn

from tread.attach.registry import layers_of
from tread.finetune.family import TuneFamily
from tread.finetune.job import FinetuneJob
from tread.finetune.model import scratch
from tread.finetune.model.adapters import stored_name
from tread.finetune.settings import FinetuneConfig
from tread.training.sharding.files import fill, materialise
from tread.training.sharding.layout import shard


def shard_models(
    config: FinetuneConfig,
    family: TuneFamily,
    models: Mapping[str, nn.Module],
    whole: nn.Module,
    accelerator: Accelerator,
) -> None:
    """Shard each layer of the `models`, each model if there are several, and the rest of `whole`, which joins them."""
    layers = [layer for model in models.values() for layer in layers_of(model)]
    experts = models.values() if len(models) > 1 else ()
    shard(whole, layers, FinetuneJob.of(config), accelerator, parts=experts)
    device = torch.device("cpu") if config.cpu_offload else accelerator.device
    for part, model in models.items():
        if not any(parameter.is_meta for parameter in model.parameters()):
            continue
        if config.init == "scratch":
            draw = partial(scratch.draw, family.source, part, seed=config.seed_of(part))
            materialise(model, model.state_dict(), device, draw)
        else:
            files = family.source.weights(part).files
            materialise(model, files, device, partial(fill, files=files), stored_name)
