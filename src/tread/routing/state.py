"""What one forward holds: its selections, the bypass of the open window, and the side inputs that follow it.

- A model's layer loop calls `enter` before each layer and `exit` after it and needs no branch of its own: a state
  without routes returns everything as it came. A state is made for one forward and dies with it, so two forwards
  before one backward cannot mix.
- Other tokens, such as text, may be joined to the image tokens: an axis of L tokens then holds the S image tokens,
  last, first or after a number of others, and L - S others. The others are always kept, in their places, so a model's
  own slices by text length stay right. Text may join while a window is open; it leaves the window with it.
- *Carry* gathers once and restores once. *Per block* gathers and restores around every layer, for models that touch
  the full stream between layers. The results are the same.
- A recomputation runs a part of the forward again, from a `fork` of its state that was taken where that part began.
  Forks share their selections, so that no token is selected twice, and nothing else that changes.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachingTorchDispatchMode

from tread.errors import ConfigError
from tread.routing.ops import gather, restore
from tread.routing.route import Route

Select = Callable[[int, Tensor], Tensor]
Where = Literal["last", "first"]


class Quiet(Protocol):
    """What stands around a layer and routes it unless it is quiet."""

    quiet: bool


class State:
    """The routing of one forward; `select(route index, image tokens (B, S, D))` gives the kept indices (B, K).

    `tokens` is the number S of image tokens; None: everything in the stream where a window opens. `offset` says where
    they begin in each sample's joined stream, (B,), if that differs between samples; or where each of them is, (B, S),
    ascending, if others lie between.
    """

    def __init__(
        self,
        routes: tuple[Route, ...] = (),
        select: Select | None = None,
        *,
        tokens: int | None = None,
        offset: Tensor | None = None,
        per_block: bool = False,
    ) -> None:
        self._routes, self._select = routes, select
        self.tokens, self.offset, self.per_block = tokens, offset, per_block
        self.selections: dict[int, Tensor] = {}
        """The kept indices (B, K) of each route whose window has opened."""
        self.layer = -1
        """The last layer that was entered."""
        self.bypass: Tensor | None = None
        """The full stream (B, L, D), while the stream is short."""
        self.running: Quiet | None = None
        """The layer that is routed already and runs now."""
        self.logs: list[list[bool]] = []
        """For each checkpointed function that runs now, whether `once` had what it was asked for, call by call."""
        self.script: Iterator[bool] | None = None
        """Such a log, to be followed: a recomputation is given other objects, and must make what its forward made."""
        self._open: int | None = None
        self._memo: dict[Hashable, tuple[object, Any]] = {}

    def fork(self) -> "State":
        """A state that goes on from here on its own, with the same selections."""
        fork = copy.copy(self)
        fork.logs, fork.script, fork._memo = [], None, dict(self._memo)
        return fork

    def hush(self) -> Callable[[], None]:
        """Keep the layer that runs now as quiet as it was, in a recomputation within it; returns how to end that."""
        running = self.running
        if running is None:
            return lambda: None
        quiet, running.quiet = running.quiet, True
        return lambda: setattr(running, "quiet", quiet)

    def forget(self) -> None:
        """Make side inputs anew from here on."""
        self._memo = {}

    @property
    def routed(self) -> bool:
        """Whether this forward routes at all."""
        return self._select is not None

    @property
    def recomputed(self) -> bool:
        """Whether a checkpointed function runs within this forward, for the first time or again."""
        return bool(self.logs) or self.script is not None

    @property
    def inside(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    @property
    def dropped(self) -> int:
        """How many image tokens of a sample the open window leaves out."""
        assert self.tokens is not None
        return self.tokens - self._kept.shape[1]

    @property
    def _kept(self) -> Tensor:
        """The selection of the open window, (B, K)."""
        assert self._open is not None
        return self.selections[self._open]

    def enter(self, layer: int, x: Tensor, image: Where = "last") -> Tensor:
        """The stream layer `layer` sees: x (B, L, D), or its kept rows inside a window."""
        self.layer = layer
        if self._open is not None and layer > self._routes[self._open].end_layer_idx:
            x = self._close(x, image)  # the model skipped the layer that ends the window
        if self._open is None:
            index = self._window(layer)
            if index is None or self._select is None:
                return x
            self._open = index
            self.forget()
            if self.tokens is None:
                self.tokens = x.shape[1]
            if index not in self.selections:  # a recomputation finds the forward's
                with unseen():
                    self.selections[index] = self._select(index, self._image_of(x, image, self.tokens))  # (B, K)
        elif not self.per_block:
            return x
        self.bypass = x
        return gather(x, self.rows(x.shape[1], image))  # (B, L - S + K, D)

    def exit(self, layer: int, x: Tensor, image: Where = "last") -> Tensor:
        """The stream after layer `layer`: at the end of a window the kept rows return to the full sequence."""
        if self._open is None:
            return x
        if layer >= self._routes[self._open].end_layer_idx:
            return self._close(x, image)
        return self._restored(x, image) if self.per_block else x

    def once(self, key: Hashable, argument: object, make: Callable[[], Any]) -> Any:
        """What `make` makes of an argument in the open window, made once while the model passes the same object."""
        known = key in self._memo and self._memo[key][0] is argument
        if self.script is not None:
            known = next(self.script)
        for log in self.logs:
            log.append(known)
        if not known:
            self._memo[key] = argument, make()
        return self._memo[key][1]

    def side(self, name: str, tensor: Tensor | None, dim: int = 0, image: Where | int = "last") -> Tensor | None:
        """The rows of a side input that belong to the tokens in the stream, gathered once per window.

        `dim` is the token axis: 0 for a table (L, ...) that all samples share, which comes back per sample,
        (B, K, ...); else the first axis is the batch (or 1). `image` may be the number of others before the image
        tokens. Outside a window, or for None, it comes back as it is.
        """
        if tensor is None or self._open is None:
            return tensor
        if tensor.shape[dim] < (self.tokens or 0):
            raise ConfigError(
                f"side input {name!r} of shape {tuple(tensor.shape)} has fewer than {self.tokens} tokens on axis "
                f"{dim}; name its token axis, e.g. state.side({name!r}, tensor, dim=1)."
            )
        return self.once(name, tensor, lambda: _take(tensor, self.rows(tensor.shape[dim], image), dim))

    def shortened(self, tensor: Tensor, dim: int, image: Where | int) -> Tensor:
        """A side input whose entries are the same for all image tokens, with as many of them as are in the stream."""
        if self._open is None:
            return tensor
        first = self.dropped if image == "first" else 0
        return tensor.narrow(dim, first, tensor.shape[dim] - self.dropped)

    def rows(self, length: int, image: Where | int) -> Tensor:
        """The kept indices on an axis of `length` tokens, (B, length - S + K), ascending."""
        tokens = self.tokens
        assert tokens is not None
        return self.once((length, image), None, lambda: self._kept_rows(length - tokens, tokens, image))

    def _kept_rows(self, others: int, tokens: int, image: Where | int) -> Tensor:
        ids = self._kept  # (B, K)
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
        if self.bypass is not None:
            x = self._restored(x, image)
        self._open = None
        return x

    def _restored(self, x: Tensor, image: Where) -> Tensor:
        bypass, self.bypass = self.bypass, None
        ids = self._kept
        assert bypass is not None
        assert self.tokens is not None
        kept, length = ids.shape[1], bypass.shape[1]
        if x.shape[1] == length - self.tokens + kept:
            return restore(x, self.rows(length, image), bypass)  # (B, L, D)
        # text was joined to the image tokens while the window was open
        if image == "first":
            return torch.cat((restore(x[:, :kept], ids, bypass), x[:, kept:]), dim=1)
        return torch.cat((x[:, :-kept], restore(x[:, -kept:], ids, bypass)), dim=1)


@contextmanager
def unseen() -> Iterator[None]:
    """Run what a recomputation does not: neither autograd nor a selective policy takes notice of it, both of which
    count what happens in the two passes."""
    with torch.no_grad(), _disable_current_modes() if _is_selective() else nullcontext():
        yield


def _is_selective() -> bool:
    """Whether a policy of selective checkpointing watches every operation."""
    if torch.compiler.is_compiling():
        return False
    return any(isinstance(mode, _CachingTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())


def _take(tensor: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Rows (B, K) of a tensor's token axis: a table (L, ...) -> (B, K, ...); (B or 1, ..., L, ...) keeps its axes."""
    if dim == 0:
        return tensor.index_select(0, rows.flatten()).unflatten(0, rows.shape)
    tensor = tensor.movedim(dim, 1)
    if tensor.shape[0] != rows.shape[0]:
        tensor = tensor.expand(rows.shape[0], *tensor.shape[1:])
    return gather(tensor, rows).movedim(1, dim)
