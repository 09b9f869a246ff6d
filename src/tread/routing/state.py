"""What one forward holds: its selections, the bypass of the open window, and the side inputs that follow it.

- A model's layer loop calls `enter` before each layer and `exit` after it and needs no branch of its own: a state
  without routes returns everything as it came. A state is made for one forward and dies with it, so two forwards
  before one backward cannot mix.
- Other tokens, such as text, may be joined to the image tokens: an axis of L tokens then holds the S image tokens,
  last, first or after a number of others, and L - S others. The others are always kept, in their places, so a model's
  own slices by text length stay right. Text may join while a window is open; it leaves the window with it.
- *Carry* gathers once and restores once. *Per block* gathers and restores around every layer, for models that touch
  the full stream between layers. The results are the same.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tread.routing.errors import ConfigError
from tread.routing.ops import gather, restore
from tread.routing.route import Route

Select = Callable[[int, Tensor], Tensor]
Where = Literal["last", "first"]


class State:
    """The routing of one forward; `select(route index, image tokens (B, S, D))` gives the kept indices (B, K)."""

    def __init__(self, routes: tuple[Route, ...] = (), select: Select | None = None) -> None:
        self._routes, self._select = routes, select
        self.selections: list[Tensor] = []
        self.tokens: int | None = None
        """The image tokens S; None: everything in the stream where a window opens."""
        self.offset: Tensor | None = None
        """Where the image tokens begin in each sample's joined stream, (B,), if that differs between samples; or where
        each of them is, (B, S), ascending, if others lie between."""
        self.per_block = False
        self._open: int | None = None
        self._bypass: Tensor | None = None
        self._rows: dict[tuple[int, Where | int], Tensor] = {}
        self._sides: dict[str, tuple[Tensor, Tensor]] = {}
        self.done: dict[tuple[str, str | int, bool], tuple[object, object]] = {}
        """What a caller made of an argument in the open window, by what it is, with the argument."""

    @property
    def routed(self) -> bool:
        """Whether this forward routes at all."""
        return self._select is not None

    @property
    def inside(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    @property
    def dropped(self) -> int:
        """How many image tokens of a sample the open window leaves out."""
        assert self.tokens is not None
        return self.tokens - self.selections[-1].shape[1]

    def enter(self, layer: int, x: Tensor, image: Where = "last") -> Tensor:
        """The stream layer `layer` sees: x (B, L, D), or its kept rows inside a window."""
        if self._open is not None and layer > self._routes[self._open].end_layer_idx:
            x = self._close(x, image)  # the model skipped the layer that ends the window
        if self._open is None:
            index = self._window(layer)
            if index is None or self._select is None:
                return x
            self._open, self._rows, self._sides, self.done = index, {}, {}, {}
            if self.tokens is None:
                self.tokens = x.shape[1]
            self.selections.append(self._select(index, self._image_of(x, image, self.tokens)))  # (B, K)
        elif not self.per_block:
            return x
        self._bypass = x
        return gather(x, self.rows(x.shape[1], image))  # (B, L - S + K, D)

    def exit(self, layer: int, x: Tensor, image: Where = "last") -> Tensor:
        """The stream after layer `layer`: at the end of a window the kept rows return to the full sequence."""
        if self._open is None:
            return x
        if layer >= self._routes[self._open].end_layer_idx:
            return self._close(x, image)
        return self._restored(x, image) if self.per_block else x

    def side(self, name: str, tensor: Tensor | None, dim: int = 0, image: Where | int = "last") -> Tensor | None:
        """The rows of a side input that belong to the tokens in the stream, gathered once per window.

        `dim` is the token axis: 0 for a table (L, ...) that all samples share, which comes back per sample,
        (B, K, ...); else the first axis is the batch (or 1). `image` may be the number of others before the image
        tokens. Outside a window, or for None, it comes back as it is.
        """
        if tensor is None or self._open is None:
            return tensor
        if name not in self._sides or self._sides[name][0] is not tensor:
            if tensor.shape[dim] < (self.tokens or 0):
                raise ConfigError(
                    f"side input {name!r} of shape {tuple(tensor.shape)} has fewer than {self.tokens} tokens on axis "
                    f"{dim}; name its token axis, e.g. state.side({name!r}, tensor, dim=1)."
                )
            rows = self.rows(tensor.shape[dim], image)
            self._sides[name] = (tensor, _take(tensor, rows, dim))
        return self._sides[name][1]

    def shortened(self, tensor: Tensor, dim: int, image: Where | int) -> Tensor:
        """A side input whose entries are the same for all image tokens, with as many of them as are in the stream."""
        if self._open is None:
            return tensor
        first = self.dropped if image == "first" else 0
        return tensor.narrow(dim, first, tensor.shape[dim] - self.dropped)

    def rows(self, length: int, image: Where | int) -> Tensor:
        """The kept places on an axis of `length` tokens, (B, length - S + K), ascending."""
        if (length, image) not in self._rows:
            assert self.tokens is not None
            self._rows[length, image] = self._kept_rows(length - self.tokens, self.tokens, image)
        return self._rows[length, image]

    def _kept_rows(self, others: int, tokens: int, image: Where | int) -> Tensor:
        ids = self.selections[-1]  # (B, K)
        if others == 0:
            return ids
        if self.offset is not None:
            places = self._places(tokens)  # (B, S)
            dropped = torch.zeros(places.shape[0], others + tokens, dtype=torch.bool, device=ids.device)  # (B, L)
            dropped = dropped.scatter(1, places, True).scatter(1, places.gather(1, ids), False)
            return dropped.to(torch.uint8).argsort(dim=1, stable=True)[:, : others + ids.shape[1]]
        before = others if image == "last" else 0 if image == "first" else image
        other = torch.arange(others, device=ids.device).expand(ids.shape[0], -1)  # (B, L - S)
        return torch.cat((other[:, :before], ids + before, other[:, before:] + tokens), dim=1)

    def _places(self, tokens: int) -> Tensor:
        """Where each image token is in a joined stream, (B, S)."""
        assert self.offset is not None
        if self.offset.ndim == 2:
            return self.offset
        return torch.arange(tokens, device=self.offset.device) + self.offset.unsqueeze(1)

    def _image_of(self, x: Tensor, image: Where, tokens: int) -> Tensor:
        """The image tokens of a stream, (B, S, D)."""
        others = x.shape[1] - tokens
        if others < 0:
            raise ConfigError(
                f"the stream has {x.shape[1]} tokens, fewer than the {tokens} image tokens said to be in it."
            )
        if others and self.offset is not None:
            return gather(x, self._places(tokens))
        return x[:, :tokens] if image == "first" else x[:, others:]

    def _window(self, layer: int) -> int | None:
        for index, route in enumerate(self._routes):
            if route.start_layer_idx <= layer <= route.end_layer_idx:
                return index
        return None

    def _close(self, x: Tensor, image: Where) -> Tensor:
        if self._bypass is not None:
            x = self._restored(x, image)
        self._open = None
        return x

    def _restored(self, x: Tensor, image: Where) -> Tensor:
        bypass, self._bypass = self._bypass, None
        ids = self.selections[-1]
        assert bypass is not None
        assert self.tokens is not None
        kept, length = ids.shape[1], bypass.shape[1]
        if x.shape[1] == length - self.tokens + kept:
            return restore(x, self.rows(length, image), bypass)  # (B, L, D)
        # text was joined to the image tokens while the window was open
        if image == "first":
            return torch.cat((restore(x[:, :kept], ids, bypass), x[:, kept:]), dim=1)
        return torch.cat((x[:, :-kept], restore(x[:, -kept:], ids, bypass)), dim=1)


def _take(tensor: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Rows (B, K) of a tensor's token axis: a table (L, ...) -> (B, K, ...); (B or 1, ..., L, ...) keeps its axes."""
    if dim == 0:
        return tensor.index_select(0, rows.flatten()).unflatten(0, rows.shape)
    tensor = tensor.movedim(dim, 1)
    if tensor.shape[0] != rows.shape[0]:
        tensor = tensor.expand(rows.shape[0], *tensor.shape[1:])
    return gather(tensor, rows).movedim(1, dim)
