"""The model that is measured, in its training loop, rerouted for each measurement.

- A step is the loop's own, on one batch, and leaves the weights unchanged: sensitivity is measured on the user's model.
- Sensitivity is measured on the averaged weights in eval mode: the loss of the routed prediction against that of the
  dense one, on the same samples, noise and times, and on the same tokens if only kept ones carry loss. Every window
  drops the same tokens at the same ratio, and a higher ratio drops a superset.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tread.autotune.cost import Routes, Stack, Tokens, one_window, probes
from tread.autotune.rules import Rules
from tread.errors import ConfigError
from tread.kernels.fast import Fast
from tread.routing.handle import Handle
from tread.training.parts import parameter_counts
from tread.training.trial import turned
from tread.words import counted

LEVELS = (0.125, 0.375, 0.625, 0.875)
"""Quantiles of the training times at which sensitivity is measured, from the least noise to the most."""
FEWEST = 4
"""Fewest samples that sensitivity is measured on."""
Show = Callable[[range], Iterable[int]]
"""Iterates over steps with a progress bar."""


class Loop(ABC):
    """A training loop as it is measured."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The trained model, or a module that contains it."""

    @property
    @abstractmethod
    def handles(self) -> Sequence[Handle]:
        """The routing handle of each network."""

    @property
    @abstractmethod
    def fast(self) -> Sequence[Fast]:
        """The `Fast` of each network; empty if nothing is compiled."""

    @abstractmethod
    def step(self, batch: Any) -> Any:
        """A training step that leaves the weights as they are."""

    @abstractmethod
    def losses_at(self, batch: Any, u: float, kept: Tensor | None = None) -> Tensor:
        """The loss of each sample, (B,); see `Finetuning.losses_at`."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the model is in eval mode and uncompiled, with its averaged weights if there are any."""

    @abstractmethod
    def close(self) -> None:
        """Release everything allocated for the measurements."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A job's loop and batches, ready to be measured."""

    loop: Loop
    batches: Sequence[Any]
    stacks: tuple[Stack, ...]
    tokens: int
    """Image tokens of a sample, without references."""
    forced: int | None
    always: int
    adapts: bool
    start: Callable[[int, Show], None] | None
    """Trains dense for a number of deterministic steps; None if the weights are trained. An untrained model, whose
    output layer is zero, predicts the same whatever its layers do."""


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
        """Plans that have run a step, so that their layers are compiled."""

    @property
    def handles(self) -> Sequence[Handle]:
        """The routing handle of each network."""
        return self.loop.handles

    def summary(self) -> str:
        """One line: the model, its trained part, and the samples it is measured on."""
        size, trained = parameter_counts(self.loop.model)
        batches, device = counted(len(self.opened.batches), "batch"), next(self.loop.model.parameters()).device
        return (
            f"{type(self.loop.model).__name__} of {self.rules.depth} layers, {trained / 1e6:.1f} of {size / 1e6:.1f} M "
            f"weights train, {self.rules.tokens:,} tokens, {batches}, on {device}"
        )

    @contextmanager
    def routed(self, routes: Routes) -> Iterator[None]:
        """A context in which training forwards use these routes; dense without routes."""
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
        """Whether layers are compiled, once per sequence length."""
        return any(fast.attempt is not None for fast in self.loop.fast)

    def probes(self, ratios: Sequence[float]) -> list[Routes]:
        """The plans that are timed."""
        return probes(self.stacks, ratios, first=self.rules.first, last=self.rules.last)

    def uncompiled(self, plans: Iterable[Routes]) -> list[Routes]:
        """The distinct plans that still have to compile; empty if layers are not compiled."""
        return [routes for routes in dict.fromkeys(plans) if routes not in self._compiled] if self.compiles else []

    def compile(self, routes: Routes) -> None:
        """Run one step under a plan, which compiles its layers."""
        self.release()
        with self.routed(routes):
            self.stepping()()
        self._compiled.add(routes)

    def start(self, steps: int, show: Show) -> None:
        """Train an untrained model for some dense steps, so that dropping tokens changes its loss."""
        assert self.opened.start is not None
        self.opened.start(steps, show)
        self._dense.clear()
        self.started = True

    def kept(self, ratio: float) -> int:
        """The number of tokens that a route of this ratio keeps in a forward of the first batch."""
        with self.evaluating(), self.routed(one_window(ratio, 0, 0)), turned(self.handles, "routed"):
            self.loop.losses_at(self.opened.batches[0], 0.5)
        return self.handles[0].selections[0].shape[1]

    def tokens(self, kept: Mapping[float, int]) -> Tokens:
        """The token budget of the first batch; needs a forward first (`kept`)."""
        return Tokens(
            count=self.handles[0].seen.tokens, forced=self.opened.forced, always=self.opened.always, measured=dict(kept)
        )

    def losses(self, routes: Routes) -> list[tuple[float, float]]:
        """Dense and routed loss at each of `LEVELS`, means over the samples of all batches, inside `evaluating`."""
        by_level = []
        for u in LEVELS:
            pairs = [self._pair(index, u, routes) for index in range(len(self.opened.batches))]
            dense, routed = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            by_level.append((dense, routed))
        return by_level

    def _pair(self, index: int, u: float, routes: Routes) -> tuple[float, float]:
        batch = self.opened.batches[index]
        with self.routed(routes):
            for handle in self.handles:  # the step seeds the selection
                handle.set_step(index)
            with turned(self.handles, "routed"):
                routed = float(self.loop.losses_at(batch, u).mean())
            kept = self.handles[0].kept  # the mask of the last forward
            key = index, u, None if kept is None else kept.cpu().numpy().tobytes()
        if key not in self._dense:
            with turned(self.handles, "dense"):
                self._dense[key] = float(self.loop.losses_at(batch, u, kept).mean())
        return self._dense[key], routed

    def evaluating(self) -> AbstractContextManager[None]:
        """See `Loop.evaluating`."""
        return self.loop.evaluating()

    def release(self) -> None:
        """Release the memory of CUDA graphs: those of one plan cannot be replayed for the next."""
        for fast in self.loop.fast:
            fast.release()


def wide_routes(ratios: Sequence[float]) -> list[dict[str, Any]]:
    """One single-layer route per ratio, so that a job prepares for all sequence lengths to be measured."""
    return [
        {"selection_ratio": ratio, "start_layer_idx": layer, "end_layer_idx": layer}
        for layer, ratio in enumerate(ratios)
    ]


def check_depth(depth: int, ratios: Sequence[float]) -> None:
    """Refuse a model with too few layers to route."""
    rules = Rules(depth=depth, tokens=1, adapts=False)
    if depth < len(ratios) or rules.last < rules.first or rules.longest < 1:
        raise ConfigError(
            f"the model has {depth} layers: a window that leaves the first layer, the last and four in all to every "
            "token needs at least 5, and one for each ratio that is tried. Train it dense."
        )


def check_samples(found: int, batch: int, setting: str) -> int:
    """The number of full batches in `found` samples; refuses too little data."""
    if found < max(batch, FEWEST):
        raise ConfigError(
            f"the data is too small to measure on: {found} samples of one size to train on, and a measurement needs a "
            f"batch of {batch} different ones, {FEWEST} at least. Add data, or lower {setting}."
        )
    return found // batch
