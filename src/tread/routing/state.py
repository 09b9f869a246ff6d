"""The state of one forward: its selections, the bypass of the open window, and the gathered side inputs.

- A model's layer loop calls `enter` before each layer and `exit` after it and needs no branch of its own: a state
  without routes returns every tensor unchanged. A state belongs to one forward, so two forwards before one backward
  cannot mix.
- Other tokens, such as text, may be joined to the image tokens: an axis of L tokens then holds the S image tokens,
  last, first or after a number of others, and L - S others. The others are always kept in their order, so a model's
  own slices by text length stay right. Text may join while a window is open; closing the window leaves it in place.
- *Carry* gathers once and restores once. *Per block* gathers and restores around every layer, for models that touch
  the full stream between layers. The results are the same.
- A recomputation starts from a `fork` of the state, taken when the checkpointed function began. Forks share the
  selections, so that nothing is selected twice, and no other mutable data.
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
from tread.routing.ops import gather, restore, untransformed
from tread.routing.route import Route

Select = Callable[[int, Tensor], Tensor]
End = Literal["last", "first"]
"""The end of a joined stream that the image tokens are at."""


class Quiet(Protocol):
    """A wrapper around a layer's forward that routes it unless `quiet` is set."""

    quiet: bool


class State:
    """The routing of one forward; `select(route index, image tokens (B, S, D))` gives the kept indices (B, K).

    `tokens` is the number S of image tokens; None: all tokens of the stream when a window opens. `offset` is the index
    of the first image token in each sample's joined stream, (B,), if it differs between samples; or the index of every
    image token, (B, S), ascending, if others lie between them.
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
        """The kept indices (B, K) by route, for every window opened so far."""
        self.layer = -1
        """Index of the last layer entered; -1 before the first."""
        self.bypass: Tensor | None = None
        """The full stream (B, L, D) at window entry, while the stream has kept rows only."""
        self.running: Quiet | None = None
        """The wrapper of the layer that is running; None between layers."""
        self.logs: list[list[bool]] = []
        """One log per checkpointed function now running: whether each call of `once` was a hit."""
        self.script: Iterator[bool] | None = None
        """The log that a recomputation follows, so that it hits and misses as its forward did with other objects."""
        self._forked = False
        """Whether this is the state of a recomputation."""
        self._open: int | None = None
        """Index of the route whose window is open."""
        self._memo: dict[Hashable, tuple[object, Any]] = {}
        """Key -> the argument object that `once` was called with, and the result."""

    def fork(self) -> "State":
        """An independent copy with the same selections."""
        fork = copy.copy(self)
        fork.logs, fork.script, fork._memo, fork._forked = [], None, dict(self._memo), True
        return fork

    def hush(self) -> Callable[[], None]:
        """Let a recomputation inside the running layer call it unrouted; returns a function that undoes it."""
        running = self.running
        if running is None:
            return lambda: None
        quiet, running.quiet = running.quiet, True
        return lambda: setattr(running, "quiet", quiet)

    def forget(self) -> None:
        """Clear the memo of side inputs."""
        self._memo = {}

    @property
    def routed(self) -> bool:
        """Whether this forward is routed."""
        return self._select is not None

    @property
    def recomputed(self) -> bool:
        """Whether a checkpointed function runs in this forward: its first pass, or one that is compared with it."""
        return bool(self.logs) or self.script is not None

    @property
    def inside(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    @property
    def dropped(self) -> int:
        """The number of image tokens per sample that the open window drops."""
        assert self.tokens is not None
        return self.tokens - self._kept.shape[1]

    @property
    def _kept(self) -> Tensor:
        """The selection of the open window, (B, K)."""
        assert self._open is not None
        return self.selections[self._open]

    def enter(self, layer: int, x: Tensor, image: End = "last") -> Tensor:
        """The input stream of layer `layer`: x (B, L, D), or its kept rows inside a window."""
        self._check_first_pass("enter")
        self.layer = layer
        if self._open is not None and layer > self._routes[self._open].end_layer_idx:
            x = self._close(x, image)  # the model skipped the layer that ends the window
        if self._open is None:
            index = self._route_at(layer)
            if index is None or self._select is None:
                return x
            self._open = index
            self.forget()
            if self.tokens is None:
                self.tokens = x.shape[1]
            if index not in self.selections:  # a recomputation has its forward's
                with unrecorded():
                    tokens = self._image_of(x, image, self.tokens)  # (B, S, D)
                    self.selections[index] = untransformed(self._select, index, tokens)  # (B, K)
        elif not self.per_block:
            return x
        self.bypass = x
        return gather(x, self.rows(x.shape[1], image))  # (B, L - S + K, D)

    def exit(self, layer: int, x: Tensor, image: End = "last") -> Tensor:
        """The output stream of layer `layer`: at the end of a window the full sequence is restored."""
        self._check_first_pass("exit")
        if self._open is None:
            return x
        if layer >= self._routes[self._open].end_layer_idx:
            return self._close(x, image)
        return self._restored(x, image) if self.per_block else x

    def once(self, key: Hashable, argument: object, make: Callable[[], Any]) -> Any:
        """Memoized `make()`: computed once per window and key while the model passes the same `argument` object."""
        known = key in self._memo and self._memo[key][0] is argument
        if self.script is not None:
            known = next(self.script)
        for log in self.logs:
            log.append(known)
        if not known:
            self._memo[key] = argument, make()
        return self._memo[key][1]

    def side(self, name: str, tensor: Tensor | None, dim: int = 0, image: End | int = "last") -> Tensor | None:
        """The rows of a side input that belong to the tokens in the stream, gathered once per window.

        `dim` is the token axis: 0 for a table (L, ...) that all samples share, which comes back per sample,
        (B, K, ...); else the first axis is the batch (or 1). `image` may be the number of others before the image
        tokens. Outside a window, or for None, it is returned unchanged.
        """
        self._check_first_pass("side")
        if tensor is None or self._open is None:
            return tensor
        if tensor.shape[dim] < (self.tokens or 0):
            raise ConfigError(
                f"side input {name!r} of shape {tuple(tensor.shape)} has fewer than {self.tokens} tokens on axis "
                f"{dim}; name its token axis, e.g. state.side({name!r}, tensor, dim=1)."
            )
        return self.once((name, dim, image), tensor, lambda: _take(tensor, self.rows(tensor.shape[dim], image), dim))

    def shortened(self, name: str, tensor: Tensor, dim: int, image: End | int) -> Tensor:
        """A side input whose entries are equal for all image tokens, narrowed to the length of the stream."""
        if self._open is None:
            return tensor
        first = self.dropped if image == "first" else 0
        return self.once(
            (name, dim, image), tensor, lambda: tensor.narrow(dim, first, tensor.shape[dim] - self.dropped)
        )

    def _check_first_pass(self, method: str) -> None:
        """Refuse a state in backward that is not a fork: it is where its forward ended, so it would not do the same."""
        if torch.compiler.is_compiling() or self._forked or not self.routed or not in_backward():
            return
        raise ConfigError(
            f"state.{method} runs again in backward, inside a checkpointed function. Checkpoint the block alone, "
            "between state.enter and state.exit, or the call of the whole model."
        )

    def rows(self, length: int, image: End | int) -> Tensor:
        """The kept indices on an axis of `length` tokens, (B, length - S + K), ascending."""
        tokens = self.tokens
        assert tokens is not None
        return self.once((length, image), None, lambda: self._kept_rows(length - tokens, tokens, image))

    def _kept_rows(self, others: int, tokens: int, image: End | int) -> Tensor:
        ids = self._kept  # (B, K)
        if others == 0:
            return ids
        if self.offset is not None:
            index = self._image_index(tokens)  # (B, S)
            if ids.shape[1] == tokens:  # nothing is dropped, but the order may be another
                every = torch.arange(others + tokens, device=ids.device).expand(len(ids), -1)  # (B, L)
                return every.scatter(1, index, index.gather(1, ids))
            dropped = torch.zeros(index.shape[0], others + tokens, dtype=torch.bool, device=ids.device)  # (B, L)
            dropped = dropped.scatter(1, index, True).scatter(1, index.gather(1, ids), False)
            return dropped.to(torch.uint8).argsort(dim=1, stable=True)[:, : others + ids.shape[1]]
        before = others if image == "last" else 0 if image == "first" else image
        other = torch.arange(others, device=ids.device).expand(ids.shape[0], -1)  # (B, L - S)
        return torch.cat((other[:, :before], ids + before, other[:, before:] + tokens), dim=1)

    def _image_index(self, tokens: int) -> Tensor:
        """The index of each image token in a joined stream, (B, S)."""
        assert self.offset is not None
        if self.offset.ndim == 2:
            return self.offset
        return torch.arange(tokens, device=self.offset.device) + self.offset.unsqueeze(1)

    def _image_of(self, x: Tensor, image: End, tokens: int) -> Tensor:
        """The image tokens of a stream, (B, S, D)."""
        others = x.shape[1] - tokens
        if others < 0:
            raise ConfigError(
                f"the stream has {x.shape[1]} tokens, fewer than the {tokens} image tokens said to be in it."
            )
        if others and self.offset is not None:
            return gather(x, self._image_index(tokens))
        return x[:, :tokens] if image == "first" else x[:, others:]

    def _route_at(self, layer: int) -> int | None:
        """Index of the route whose window covers `layer`."""
        for index, route in enumerate(self._routes):
            if route.start_layer_idx <= layer <= route.end_layer_idx:
                return index
        return None

    def _close(self, x: Tensor, image: End) -> Tensor:
        if self.bypass is not None:
            x = self._restored(x, image)
        self._open = None
        return x

    def _restored(self, x: Tensor, image: End) -> Tensor:
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
def unrecorded() -> Iterator[None]:
    """Hide operations from autograd and from selective checkpointing policies: both compare the two passes of a
    checkpoint, and these operations run in the first pass only."""
    with torch.no_grad(), _disable_current_modes() if _is_selective() else nullcontext():
        yield


def in_backward() -> bool:
    """Whether this is called from an autograd backward."""
    return torch._C._current_graph_task_id() != -1


def _is_selective() -> bool:
    """Whether a selective-checkpointing policy is active."""
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
