"""The model that is measured, in its training loop, rerouted for each measurement.

- A step is the loop's own, on one batch, and the weights stay what they are: sensitivity is measured on the model that
  the user gave.
- Sensitivity is that of the averaged weights in eval mode, routed: the loss of the routed prediction beside that of the
  dense one, on the same samples, noise and times, and on the same tokens where only kept ones carry loss. Every window
  drops the same tokens at the same ratio, and a higher ratio drops some more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from tread.autotune.cost import Routes, Stack, Tokens, probes
from tread.autotune.rules import Rules
from tread.errors import ConfigError
from tread.kernels.fast import Fast
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.training.trial import turned
from tread.words import counted

LEVELS = (0.125, 0.375, 0.625, 0.875)
"""Quantiles of the training times at which sensitivity is measured, from the least noise to the most."""
FEWEST = 4
"""Samples; the figures of fewer say nothing about the data."""
Show = Callable[[range], Iterable[int]]
"""Goes through steps behind a bar."""


class Loop(Protocol):
    """A training loop as it is measured."""

    @property
    def model(self) -> nn.Module:
        """What is trained, or what holds it."""
        ...

    @property
    def handles(self) -> Sequence[Handle]:
        """The routing of each network."""
        ...

    @property
    def fast(self) -> Sequence[Fast]:
        """What compiles each network; empty where nothing does."""
        ...

    def step(self, batch: Any) -> Any:
        """A training step that leaves the weights as they are."""
        ...

    def losses_at(self, batch: Any, u: float, kept: Tensor | None = None) -> Tensor:
        """The loss of each sample, (B,); see `Finetuning.losses_at`."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, the model has its averaged weights, if it has some, in eval mode, and nothing of it is compiled."""
        ...

    def close(self) -> None:
        """Give back what was made for the measurements."""
        ...


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a job gives to be measured."""

    loop: Loop
    batches: Sequence[Any]
    stacks: tuple[Stack, ...]
    tokens: int
    """Image tokens of a sample, without references."""
    forced: int | None
    always: int
    adapts: bool
    start: Callable[[int, Show], None] | None
    """Trains dense for some steps, always the same ones; None where the weights are not new. A new model predicts the
    same whatever its layers do."""


class Subject:
    """A model that is measured under one plan after the other."""

    def __init__(self, opened: Opened) -> None:
        self.opened, self.loop = opened, opened.loop
        self.stacks = opened.stacks
        depth = opened.stacks[-1].last + 1
        self.rules = Rules(depth=depth, tokens=opened.tokens, adapts=opened.adapts)
        self.started = False
        """Whether `start` has run."""
        self._dense: dict[tuple[int, float, bytes | None], float] = {}
        self._compiled: set[Routes] = set()
        """Plans that a step has run under."""

    @property
    def handles(self) -> Sequence[Handle]:
        """The routing of each network."""
        return self.loop.handles

    def summary(self) -> str:
        """One line: the model, what is trained of it, and on what it is measured."""
        parameters = list(self.loop.model.parameters())
        size, trained = (sum(p.numel() for p in parameters if p.requires_grad or every) for every in (True, False))
        batches, device = counted(len(self.opened.batches), "batch"), parameters[0].device
        return (
            f"{type(self.loop.model).__name__} of {self.rules.depth} layers, {trained / 1e6:.1f} of {size / 1e6:.1f} M "
            f"weights train, {self.rules.tokens:,} tokens, {batches}, on {device}"
        )

    @contextmanager
    def routed(self, routes: Routes) -> Iterator[None]:
        """Inside, training forwards are routed so; dense without routes."""
        if not routes:
            with turned(self.handles, "dense"):
                yield
            return
        before = [(handle, handle.plan) for handle in self.handles]
        for handle, plan in before:
            handle.reroute(replace(plan, routes=routes))
        try:
            yield
        finally:
            for handle, plan in before:
                handle.reroute(plan)

    def stepping(self) -> Callable[[], Any]:
        """A training step that leaves the weights as they are."""
        batch = self.opened.batches[0]

        def step() -> Any:
            self.loop.model.train()
            return self.loop.step(batch)

        return step

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled, for each length of the stream anew."""
        return any(fast.attempt is not None for fast in self.loop.fast)

    def probes(self, ratios: Sequence[float]) -> list[Routes]:
        """The plans that are timed."""
        return probes(self.stacks, ratios, first=self.rules.first, last=self.rules.last)

    def uncompiled(self, plans: Iterable[Routes]) -> list[Routes]:
        """Those of the plans, each once, that no step has run under, if layers are compiled."""
        return [routes for routes in dict.fromkeys(plans) if routes not in self._compiled] if self.compiles else []

    def compile(self, routes: Routes) -> None:
        """Run one step under a plan, which compiles what its layers lack."""
        self.release()
        with self.routed(routes):
            self.stepping()()
        self._compiled.add(routes)

    def start(self, steps: int, show: Show) -> None:
        """Give a new model something to lose."""
        assert self.opened.start is not None
        self.opened.start(steps, show)
        self._dense.clear()
        self.started = True

    def kept(self, ratio: float) -> int:
        """The tokens that a route of this ratio keeps in the first batch, as a forward shows it."""
        with self.evaluating(), self.routed(_first_layer(ratio)), turned(self.handles, "routed"):
            self.loop.losses_at(self.opened.batches[0], 0.5)
        return self.handles[0].selections[0].shape[1]

    def tokens(self, kept: Mapping[float, int]) -> Tokens:
        """The budget of the first batch; the handle has seen a forward."""
        return Tokens(
            count=self.handles[0].seen.tokens, forced=self.opened.forced, always=self.opened.always, measured=dict(kept)
        )

    def losses(self, routes: Routes) -> list[tuple[float, float]]:
        """Dense and routed loss at each of `LEVELS`, means over the samples of all batches, inside `evaluating`."""
        found = []
        for u in LEVELS:
            pairs = [self._pair(index, u, routes) for index in range(len(self.opened.batches))]
            dense, routed = (sum(some) / len(pairs) for some in zip(*pairs, strict=True))
            found.append((dense, routed))
        return found

    def _pair(self, index: int, u: float, routes: Routes) -> tuple[float, float]:
        batch = self.opened.batches[index]
        with self.routed(routes):
            for handle in self.handles:  # the step decides which tokens are dropped
                handle.set_step(index)
            with turned(self.handles, "routed"):
                routed = float(self.loop.losses_at(batch, u).mean())
            kept = self.handles[0].kept  # that of the last forward
            key = index, u, None if kept is None else kept.cpu().numpy().tobytes()
        if key not in self._dense:
            with turned(self.handles, "dense"):
                self._dense[key] = float(self.loop.losses_at(batch, u, kept).mean())
        return self._dense[key], routed

    def evaluating(self) -> AbstractContextManager[None]:
        """See `Loop.evaluating`."""
        return self.loop.evaluating()

    def release(self) -> None:
        """Give the memory of CUDA graphs back: those of one plan are of no use to the next."""
        for fast in self.loop.fast:
            fast.release()


def _first_layer(ratio: float) -> Routes:
    return RoutePlan.from_config(
        {"routes": [{"selection_ratio": ratio, "start_layer_idx": 0, "end_layer_idx": 0}]}
    ).routes


def wide_routes(ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Routes of one layer each with every ratio, so that a job prepares for all lengths that will be measured."""
    return [
        {"selection_ratio": ratio, "start_layer_idx": layer, "end_layer_idx": layer}
        for layer, ratio in enumerate(ratios)
    ]


def check_depth(depth: int, ratios: Sequence[float]) -> None:
    """Refuse a model with no layers to spare."""
    rules = Rules(depth=depth, tokens=1, adapts=False)
    if depth < len(ratios) or rules.last < rules.first or rules.longest < 1:
        raise ConfigError(
            f"the model has {depth} layers: a window that leaves the first two, the last one and four in all to every "
            "token needs at least 5, and one for each ratio that is tried. Train it dense."
        )


def check_samples(found: int, batch: int, setting: str) -> int:
    """The number of whole batches in so many samples; refuses data that no measurement can be made on."""
    if found < max(batch, FEWEST):
        raise ConfigError(
            f"the data is too small to measure on: {found} samples of one size to train on, and a measurement needs a "
            f"batch of {batch} different ones, {FEWEST} at least. Add data, or lower {setting}."
        )
    return found // batch
