"""What the contract needs to know of a stock model: how to build it tiny, how to call it, and where its tokens are.

A case says the layout of streams and keys itself instead of reading the family, so that a wrong family disagrees
with the oracle.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Where = Literal["last", "first"]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One stack as the oracle sees it."""

    name: str
    """The attribute of the model that lists the layers."""
    stream: int = 0
    """The stream's position among a layer's arguments, where it is passed by position."""
    keyword: str = "hidden_states"
    """Its name, where it is passed by keyword."""
    returns: int | None = None
    """Its index in what a layer returns; None: alone."""
    image: Where = "last"
    """Where the image tokens sit in the stream."""
    keys: Where = "last"
    """Where the image tokens sit among the keys of a joint attention."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny stock model."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int], dict[str, Any]]
    """Forward arguments for a batch; the same numbers for the same sample whatever the batch."""
    blocks: tuple[Blocks, ...]
    tokens: int
    """Image tokens S. Choose it different from the number of text tokens."""
    offsets: Callable[[int], list[int]] | None = None
    """Where the image tokens begin in each sample's joined sequence, if that differs between samples."""
    references: int = 0
    """How many image tokens, at the end, are reference tokens."""
    defects: dict[str, str] = field(default_factory=dict)
    """Upstream defects by the contract's point, with the reason: "checkpoint", "unused", ..."""

    @property
    def depth(self) -> int:
        return len(self.layers(self.model()))

    def layers(self, model: nn.Module) -> list[tuple[Blocks, nn.Module]]:
        return [(blocks, layer) for blocks in self.blocks for layer in getattr(model, blocks.name)]

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
        output = model(**copy.copy(arguments))
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

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch:
            return value[index : index + 1]
        if isinstance(value, list) and all(isinstance(v, Tensor) and v.shape[:1] == (batch,) for v in value):
            return [cut(item) for item in value]
        if isinstance(value, list) and len(value) == batch:
            return value[index : index + 1]
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        return value

    return {name: cut(value) for name, value in arguments.items()}
