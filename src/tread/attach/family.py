"""A family: how one model class calls its layers, as data.

- A family says where the layers are, which argument carries the stream, which others have a token axis, and where
  the image tokens sit among them. It holds no routing code; `attach` reads it.
- Families are found through the model's MRO by class name, so subclasses (an FSDP-wrapped model, a user's variant)
  are found too. `checks.py` compares one with a model's structure when it is attached.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tread.routing.state import Where

Arguments = Mapping[str, Any]
"""The arguments of one forward by name."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """An argument of a layer with a token axis; a tuple or list is treated member by member."""

    name: str
    """The argument, or `mapping.entry` for an entry of an argument that is a mapping."""
    dim: int
    """The token axis. 0: a table that all samples share; it comes back per sample, or as a table where the stream has
    no batch axis. An axis of length 1 serves all tokens and stays as it is."""
    ndim: int | None = None
    """Follow the selection only where the tensor has this many axes; None: always."""
    image: Where | None = None
    """Where the image tokens sit on the axis, if not where they do in the stack's stream."""
    after: str | None = None
    """The argument (B, T, ...) whose tokens come before the image tokens on the axis, if others come after them too."""
    shared: bool = False
    """Of a table: the layer takes one for the whole batch, so the batch must be one sample."""
    same: bool = False
    """All image tokens have the same entry: the axis only becomes shorter, for all samples alike."""
    member: int | None = None
    """Of a tuple, the one member that has the axis, or whose members all have it; None: all of them."""
    optional: bool = False
    """Only some versions of the model's layers take it; otherwise a side that no layer takes is refused."""
    full: bool = False
    """It holds no rows to take: a function of it rotates the full sequence by the grid. The layer gets it as a
    `rotary.FullLength`, which returns rows to their positions for that function. `dim` is the token axis of what is
    rotated. A callable may be called by the layer; for another value, `Family.rotary` names the function."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One list of layers."""

    name: str
    """The attribute of the model, dotted where it is nested."""
    stream: str = "hidden_states"
    """The argument that carries the tokens."""
    dim: int = 1
    """Its token axis, 1 or 0; the other is the batch. 0 also for a stream (L, D) of one sample, without that axis."""
    returns: int | None = None
    """The stream's index in the tuple a layer returns; None: it returns the stream alone."""
    image: Where = "last"
    """Where the image tokens sit in the stream, when others are joined to it."""
    sides: tuple[Side, ...] = ()
    counts: tuple[str, ...] = ()
    """Arguments that are a number of tokens, the image tokens among them; dropped tokens are not counted."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A function `rotate(x, table, ...)` for tables (S, D) that must learn to take (B, S, D)."""

    function: str
    """Dotted path of the name the layers look up; with `of`, the name alone."""
    axis: int
    """The token axis of x, where a call does not say it by `sequence_dim`."""
    of: str | None = None
    """A submodule of the model, as a dotted path: its forward looks the function up in its own Python module."""
    tables: tuple[int, ...] = (1,)
    """Positions of the arguments that are tables or tuples of them; none where a `Side` is `full`."""
    turns: int = 1
    """How many arguments, from the first, it turns; more than one come back as a tuple."""
    real: bool = False
    """Teach it real tables only: it takes complex ones per sample already."""


SHARED_ROTARY = Rotary(function="diffusers.models.embeddings.apply_rotary_emb", axis=2, real=True)
"""The function many models import when they call it; all of them must declare it alike."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a model class calls its layers.

    A model of your own joins with one declaration:

        tread.Family(models=("MyDiT",), stacks=(tread.Stack(name="blocks", stream="x"),))
    """

    models: tuple[str, ...]
    """Class names."""
    stacks: tuple[Stack, ...]
    """In execution order; layers count through all of them."""
    parts: tuple[str, ...] = ()
    """Attributes of the model, dotted, that tell it from other models with the same class name."""
    inputs: tuple[str, ...] = ()
    """Arguments of the model's forward that the functions below read."""
    tokens: Callable[[nn.Module, Arguments], int] | None = None
    """The number of image tokens of a forward; None: the stream has no others where windows open."""
    offset: Callable[[nn.Module, Arguments], Tensor] | None = None
    """Where the image tokens begin in each sample's joined stream, (B,), if that differs between samples; or where each
    of them is, (B, S), ascending, if others lie between."""
    references: Callable[[nn.Module, Arguments], int | Tensor] | None = None
    """How many of the image tokens, at one end, belong to reference images: a number, or a tensor () that is read once
    per number of tokens. Needs `tokens`."""
    references_at: Where = "last"
    """At which end of the image tokens those are."""
    pinned: Callable[[nn.Module, Arguments], int] | None = None
    """How many of the image tokens, at the start, the layers address by their place: they never drop."""
    residuals: tuple[str, ...] = ()
    """Arguments of the model that are added to the stream between layers, such as ControlNet's."""
    per_block: bool = False
    """The model itself needs the full stream between layers."""
    rotary: tuple[Rotary, ...] = ()
    refuse: Callable[[nn.Module, Arguments], str | None] | None = None
    """Why this forward cannot be routed, or None."""
    notes: str = ""


def patches(name: str, *axes: int, size: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Arguments], int]:
    """Counts the tokens of a latent argument: the product of `axes` over the patch `size`, one for all or each."""

    def count(model: nn.Module, arguments: Arguments) -> int:
        shape, patch = arguments[name].shape, size(model)
        each = patch if isinstance(patch, tuple | list) else (patch,) * len(axes)
        total = 1
        for axis, step in zip(axes, each, strict=True):
            total *= shape[axis] // step
        return total

    return count


def setting(*paths: str) -> Callable[[nn.Module], Any]:
    """Reads dotted attributes of the model, one or several; compiled code can follow it, unlike operator.attrgetter."""

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
    """Counts tokens of an argument that is a sequence already."""
    return lambda model, arguments: arguments[name].shape[axis]
