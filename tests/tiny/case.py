"""What the contract needs to know of a stock model: how to build it tiny, how to call it, and where its tokens are.

A case says the layout of streams and keys itself instead of reading the family, so that a wrong family disagrees
with the oracle.
"""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Where = Literal["last", "first"] | int
"""A number: so many others come before."""


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

    @property
    def depth(self) -> int:
        return len(self.layers(self.model()))

    def layers(self, model: nn.Module) -> list[tuple[Blocks, nn.Module]]:
        return [(blocks, layer) for blocks in self.blocks for layer in operator.attrgetter(blocks.name)(model)]

    def model(self) -> Any:
        """The model with random weights everywhere: zero-initialised gates would hide what layers do."""
        torch.manual_seed(0)
        model = self.build().float()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                scale = 0.5 / max(1, parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 0.1
                parameter.copy_(noise * scale + (1.0 if _is_gain(parameter) else 0.0))
        return model.train()

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
