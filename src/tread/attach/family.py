"""A family: how one model class calls its layers, as data.

- A family names the lists of layers, the argument that carries the stream, the arguments that have a token axis, and
  the position of the image tokens on it. It holds no routing code; `attach` reads it.
- A family is looked up by class name along the model's MRO, so it serves subclasses (an FSDP-wrapped model, a user's
  variant) too. `checks.py` checks it against the model when it is attached.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tread.routing.state import End

Arguments = Mapping[str, Any]
"""The arguments of one forward by name."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """An argument of a layer with a token axis; a tuple or list is treated member by member."""

    name: str
    """The argument, or `mapping.entry` for an entry of an argument that is a mapping."""
    dim: int
    """The token axis. 0: a table shared by all samples; gathered, it has a batch axis if there are several samples. An
    axis of length 1 serves all tokens and is not gathered."""
    ndim: int | None = None
    """Gather only tensors with this many axes; None: all."""
    image: End | None = None
    """The end of the axis that the image tokens are at; None: as in the stack's stream."""
    after: str | None = None
    """The argument (B, T, ...) whose T tokens precede the image tokens on the axis, if others follow them too."""
    same: bool = False
    """Whether all image tokens have equal entries, so that the axis is narrowed instead of gathered."""
    member: int | None = None
    """The index of the one member of a tuple that has the axis; None: all members have it."""
    optional: bool = False
    """Whether layers may lack the argument; otherwise a side that no layer takes is refused."""
    full: bool = False
    """Whether it serves the full sequence only: it has no rows to gather, because the layers rotate the full sequence
    by its grid. The layer gets it as a `rotary.FullLength`, which scatters the kept rows into a full sequence for the
    rotation. `dim` is the token axis of the rotated tensor. The layer may call a callable; for any other value,
    `Family.rotary` names the function."""


def square(name: str, *dims: int, ndim: int | None = None) -> tuple[Side, ...]:
    """The sides of an argument with two token axes, such as a mask over queries and keys; they apply in turn."""
    return tuple(Side(name=name, dim=dim, ndim=ndim) for dim in dims)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One list of layers."""

    name: str
    """The attribute of the model; dotted if it is nested."""
    stream: str = "hidden_states"
    """The argument that carries the tokens."""
    dim: int = 1
    """The stream's token axis, 1 or 0; the other is the batch. 0 also for a stream (L, D) without a batch axis."""
    returns: int | None = None
    """The stream's index in the tuple a layer returns; None: it returns the stream alone."""
    image: End = "last"
    """The end of the stream that the image tokens are at, if others are joined to them."""
    sides: tuple[Side, ...] = ()
    """The side inputs of its layers."""
    counts: tuple[str, ...] = ()
    """Arguments that count tokens, the image tokens among them; the number of dropped tokens is subtracted."""

    def layers(self, model: nn.Module) -> Any:
        """The list of layers as it is now, wrappers included."""
        return operator.attrgetter(self.name)(model)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A function `rotate(x, table, ...)` of tables (S, D), to be wrapped so that it takes (B, S, D)."""

    function: str
    """Dotted path of the function as the layers look it up; with `of`, the name alone."""
    axis: int
    """The token axis of x, unless the function takes a `sequence_dim`, which says it."""
    of: str | None = None
    """Dotted path of a submodule whose forward looks the function up in its own Python module."""
    tables: tuple[int, ...] = (1,)
    """Indices of the arguments that are tables or tuples of them; empty for a `Side` that is `full`."""
    turns: int = 1
    """The number of leading arguments that it rotates; more than one are returned as a tuple."""
    real: bool = False
    """Whether only real tables need the wrapper, because it takes complex ones per sample already."""


SHARED_ROTARY = Rotary(function="diffusers.models.embeddings.apply_rotary_emb", axis=2, real=True)
"""The function that many models share; all of them must declare it alike."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The declaration of how a model class calls its layers.

    A model of your own joins with one declaration:

        tread.Family(models=("MyDiT",), stacks=(tread.Stack(name="blocks", stream="x"),))
    """

    models: tuple[str, ...]
    """Class names."""
    stacks: tuple[Stack, ...]
    """The lists of layers in execution order; layer indices count across all of them."""
    parts: tuple[str, ...] = ()
    """Attributes (dotted) that a model must have; they tell it from others with the same class name."""
    inputs: tuple[str, ...] = ()
    """Arguments of the model's forward that the functions below read."""
    tokens: Callable[[nn.Module, Arguments], int] | None = None
    """The number of image tokens of a forward; None: the stream has no other tokens when a window opens."""
    offset: Callable[[nn.Module, Arguments], Tensor] | None = None
    """The index of the first image token in each sample's joined stream, (B,), if it differs between samples; or the
    index of every image token, (B, S), ascending, if others lie between them."""
    references: Callable[[nn.Module, Arguments], int | Tensor] | None = None
    """The number of image tokens, at one end, that belong to reference images: an int, or a tensor () that is read once
    per sequence length. Needs `tokens`."""
    references_at: End = "last"
    """The end of the image tokens that the references are at."""
    pinned: Callable[[nn.Module, Arguments], int] | None = None
    """The number of leading image tokens that the layers address by index; they are never dropped."""
    residuals: tuple[str, ...] = ()
    """Arguments of the model that are added to the stream between layers, such as ControlNet's."""
    per_block: bool = False
    """Whether the model needs the full stream between layers."""
    rotary: tuple[Rotary, ...] = ()
    """The rotary functions to wrap."""
    refuse: Callable[[nn.Module, Arguments], str | None] | None = None
    """The reason why a forward with these arguments cannot be routed, or None."""
    notes: str = ""
    """Remarks for users of the model, shown by `tread families` and in the docs."""


def patches(name: str, *axes: int, size: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Arguments], int]:
    """A counter of the tokens of a latent argument: the product of `axes` over the patch `size`, shared or per axis."""

    def count(model: nn.Module, arguments: Arguments) -> int:
        shape, patch = arguments[name].shape, size(model)
        each = patch if isinstance(patch, tuple | list) else (patch,) * len(axes)
        total = 1
        for axis, step in zip(axes, each, strict=True):
            total *= shape[axis] // step
        return total

    return count


def setting(*paths: str) -> Callable[[nn.Module], Any]:
    """A reader of one or several dotted attributes of the model; unlike operator.attrgetter, it can be compiled."""

    def read(model: nn.Module) -> Any:
        values: list[Any] = []
        for path in paths:
            value: Any = model
            for name in path.split("."):
                value = getattr(value, name)
            values.append(value)
        return values[0] if len(values) == 1 else tuple(values)

    return read


def length(name: str, axis: int = 1) -> Callable[[nn.Module, Arguments], int]:
    """A counter of the tokens of an argument that is a sequence already."""
    return lambda model, arguments: arguments[name].shape[axis]


@torch.compiler.assume_constant_result
def read_count(count: Tensor) -> int:
    """The value of a count on the device (synchronises); a constant in compiled code."""
    return int(count)
