"""What the contract needs to know of a stock model: how to build it tiny, how to call it, and where its tokens are.

A case says the layout of streams and keys itself instead of reading the family, so that a wrong family disagrees
with the oracle.
"""

import copy
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

Where = Literal["last", "first"] | int
"""A number: so many others come before."""

GRAPHS = {"graphs": "the stock forward is not compiled as a whole but function by function, and so are the hooks"}
"""A defect of several stock forwards, see `Case.defects`."""

CHANNELS = {"in_channels": 4, "out_channels": 4, "audio_in_channels": 4, "audio_out_channels": 4}
LAYERS = {"num_layers": 3, "num_single_layers": 2, "num_refiner_layers": 1, "n_layers": 3, "n_refiner_layers": 1}
DEPTHS = {"num_text_blocks": 1, "num_visual_blocks": 3, "depth": 3}
HEADS = {"num_attention_heads": 2, "num_heads": 2, "n_heads": 2, "num_key_value_heads": 1, "num_kv_heads": 2}
HEAD_DIMS = {"attention_head_dim": 16, "head_dim": 16}
WIDTHS = {"hidden_size": 32, "model_dim": 32, "intermediate_size": 32, "ffn_dim": 32, "caption_projection_dim": 16}
TIMES = {"freq_dim": 16, "time_embed_dim": 16, "time_dim": 16}
TEXTS = {"text_dim": 16, "text_embed_dim": 12, "joint_attention_dim": 16, "cross_attention_dim": 24}
ROTATIONS = dict.fromkeys(("axes_dims_rope", "axes_dims", "rope_axes_dim"), (4, 6, 6))
LONGEST = {"rope_max_seq_len": 16, "pos_embed_max_size": 8}
TINY: dict[str, Any] = CHANNELS | LAYERS | DEPTHS | HEADS | HEAD_DIMS | WIDTHS | TIMES | TEXTS | ROTATIONS | LONGEST
"""Constructor arguments by the names that stock classes share."""


def tiny(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The class with the options and, for other arguments it has, the sizes of `TINY`.

    An argument that defaults to None is left alone: there None has a meaning.
    """
    known = inspect.signature(model).parameters
    return partial(model, **{k: v for k, v in TINY.items() if k in known and known[k].default is not None} | options)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One stack as the oracle sees it."""

    name: str
    """The attribute of the model that lists the layers, dotted where it is nested."""
    stream: int = 0
    """The stream's position among a layer's arguments, where it is passed by position."""
    keyword: str = "hidden_states"
    """Its name, where it is passed by keyword."""
    returns: int | None = None
    """Its index in what a layer returns; None: alone."""
    dim: int = 1
    """Its token axis, 1 or 0; the other is the batch, if there is one."""
    image: Where = "last"
    """Where the image tokens sit in the stream."""
    keys: Where = "last"
    """Where the image tokens sit among the keys of a joint attention."""
    image_queries: bool = False
    """In the joint attention only the image tokens are queries; the layer has no other attention."""
    cached: int = 0
    """How many keys, before the layer's own, come from a cache."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny stock model."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int], dict[str, Any]]
    """Forward arguments for a batch; the same numbers for the same sample whatever the batch."""
    blocks: tuple[Blocks, ...]
    batch: int = 2
    """The samples of a forward: 1 for models that take no more."""
    tokens: int
    """Image tokens S. Choose it different from the number of text tokens."""
    offsets: Callable[[int], list[int] | list[list[int]]] | None = None
    """Where the image tokens begin in each sample's joined sequence, if that differs between samples; or where each of
    them is, if others lie between."""
    references: int = 0
    """How many image tokens, at one end, are reference tokens."""
    references_at: Where = "last"
    pinned: int = 0
    """How many image tokens, at the start, may never drop."""
    refused: Callable[[Any, int], dict[str, Any]] | None = None
    """Forward arguments, from the model (which it may change) and a batch, that the stock model takes and cannot be
    routed with."""
    defects: dict[str, str] = field(default_factory=dict)
    """Upstream defects by the contract's point, with the reason: "checkpoint", "autocast", "compile", "graphs"."""

    @cached_property
    def depth(self) -> int:
        with torch.random.fork_rng(devices=[]):
            return len(self.layers(self.build()))

    def layers(self, model: nn.Module) -> list[tuple[Blocks, nn.Module]]:
        return [(blocks, layer) for blocks in self.blocks for layer in operator.attrgetter(blocks.name)(model)]

    def model(self) -> Any:
        """The model with random weights everywhere: zero-initialised gates would hide what layers do."""
        torch.manual_seed(0)
        model = self.build().float()
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), self._weights, strict=True):
                parameter.copy_(weight)
        return model.train()

    @cached_property
    def _weights(self) -> list[Tensor]:
        """Of every parameter, drawn once: that takes longer than to build the model."""
        generator = torch.Generator().manual_seed(1)
        found = []
        with torch.random.fork_rng(devices=[]):
            model = self.build().float()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.5 / max(1, parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 0.1
            found.append(noise * scale + (1.0 if _is_gain(parameter) else 0.0))
        return found

    def call(self, model: nn.Module, arguments: dict[str, Any]) -> Tensor:
        """The prediction. Arguments are copied: some models change lists and mappings they are given."""
        fresh = {name: copy.copy(v) if isinstance(v, list | dict) else v for name, v in arguments.items()}
        output = model(**fresh)
        if isinstance(output, Tensor):
            return output
        if not isinstance(output, list):
            output = output.sample if hasattr(output, "sample") else output[0]
        return torch.stack(list(output)) if isinstance(output, list) else output


def _is_gain(parameter: nn.Parameter) -> bool:
    """A norm's weight: one axis, all ones before it was randomised."""
    return parameter.ndim == 1 and bool((parameter == 1).all())


def random(seed: int, batch: int, *shape: int) -> Tensor:
    """Normal numbers (batch, *shape), the same for a sample whatever the batch."""
    generators = [torch.Generator().manual_seed(1000 * seed + i) for i in range(batch)]
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def usual(
    batch: int, image: tuple[int, ...], text: tuple[int, ...], timestep: tuple[float, float] = (0.2, 0.8)
) -> dict[str, Any]:
    """The arguments that nearly every model takes, from the shapes of one sample's image and text."""
    return {
        "hidden_states": random(1, batch, *image),
        "encoder_hidden_states": random(2, batch, *text),
        "timestep": torch.tensor(timestep)[:batch],
    }


def valid(batch: int, length: int, *counts: int) -> Tensor:
    """A mask (batch, length), True at each sample's first `counts` tokens."""
    return torch.arange(length) < torch.tensor(counts)[:batch, None]


def any_mask(seed: int, batch: int, length: int) -> Tensor:
    """Some mask (batch, 1, length, length) over queries and keys in which each token sees itself."""
    return (random(seed, batch, 1, length, length) > -1) | torch.eye(length, dtype=torch.bool)


def grid(rows: int, columns: int, image: int = 0) -> Tensor:
    """Token ids (rows * columns, 3): which image, row, column."""
    return torch.cartesian_prod(torch.tensor([image]), torch.arange(rows), torch.arange(columns))


def one_sample(arguments: dict[str, Any], batch: int, index: int) -> dict[str, Any]:
    """The arguments of one sample of a batch: whatever has the batch as its first axis is cut."""

    def all_cut(value: Any) -> bool:
        """A tuple may hold tables that only look like a batch: then another member does not."""
        if isinstance(value, tuple):
            return all(all_cut(item) for item in value)
        return isinstance(value, Tensor) and value.shape[:1] == (batch,)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch:
            return value[index : index + 1]
        if isinstance(value, list) and all(isinstance(v, Tensor) and v.shape[:1] == (batch,) for v in value):
            return [cut(item) for item in value]
        if isinstance(value, list) and len(value) == batch:
            return value[index : index + 1]
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        if isinstance(value, tuple) and all_cut(value):
            return tuple(cut(item) for item in value)
        return value

    return {name: cut(value) for name, value in arguments.items()}
