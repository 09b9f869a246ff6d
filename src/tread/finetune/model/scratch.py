"""`init: scratch`: a transformer made anew from its config, with the sizes that a config changes.

- The weights are drawn by the stock class itself, with a seed of the run's: the same run begins with the same weights.
- Inputs and outputs are those of the pipeline's other parts: an autoencoder's channels and an encoder's embeddings
  cannot be changed by a size of the transformer.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tread.errors import ConfigError, nearest, shown
from tread.finetune.model.source import Source
from tread.training.memory import is_out_of_memory

INPUTS = (
    *("in_channels", "out_channels", "in_visual_dim", "out_visual_dim"),
    *("joint_attention_dim", "pooled_projection_dim", "caption_channels", "cap_feat_dim", "text_dim", "text_embed_dim"),
    *("in_text_dim", "in_text_dim2", "image_dim"),
)
"""Keys of transformers' configs that the pipeline's other parts decide."""


def make(source: Source, part: str, *, seed: int) -> nn.Module:
    """The transformer `part` with new weights in float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _made(source, part)


def check(source: Source, part: str) -> nn.Module:
    """The same on the meta device; refuses keys and values of `transformer` that the class cannot take."""
    cls, released = source.class_of(part), source.released(part)
    known = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    for name, value in source.changes.items():
        if name not in known:
            raise ConfigError(
                f"transformer has the key {name!r}{nearest(name, known)} A {cls.__name__} has: {', '.join(known)}."
            )
        if name in INPUTS and released.get(name) != value:
            raise ConfigError(
                f"{name} of transformer is {shown(value)}, but the other parts of {source.place} need "
                f"{shown(released.get(name))}; leave it out."
            )
    with torch.device("meta"):
        return _made(source, part)


@contextmanager
def fitting(source: Source, part: str) -> Iterator[None]:
    """Around a first forward: sizes that a class takes but cannot compute with are refused in a sentence."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"a {source.class_of(part).__name__} with transformer {shown(source.changes)} cannot compute a batch "
            f"({reason}): sizes that depend on each other must be changed together."
        ) from error


def _made(source: Source, part: str) -> nn.Module:
    cls = source.class_of(part)
    try:
        return cls.from_config(source.config(part))
    except Exception as error:  # stock classes raise whatever their sizes make them raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"a {cls.__name__} cannot be made with transformer {shown(source.changes)}: {reason}"
        ) from error


def depth_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a transformer's config that count layers and heads: what is usually changed first."""
    return {
        name: value
        for name, value in config.items()
        if isinstance(value, int) and name.startswith("num_") and name.endswith(("layers", "heads", "blocks"))
    }
