"""The handle of a routed model: whether routing is on, the current step, and the forced tokens.

- Routing is on only in training mode with gradients enabled; `routed()` turns it on anywhere, `dense()` off.
- Selections are a pure function of (seed, step, micro-step, global sample position, route, token). The step and
  micro-step are 0-d CPU tensors: a new value needs no recompile, and combining them with device tensors needs neither
  a copy nor a synchronisation. They are updated in place, so that a CUDA graph, which needs them on its device, reads
  the step of its replay. A resumed run sets the step and makes the same selections.
- A handle is no module and owns no parameters, so state-dict keys do not change.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from tread.errors import ConfigError, check_fraction, check_int
from tread.routing import noise, recompute
from tread.routing.budget import kept_count
from tread.routing.mode import (
    NONE_FORCED,
    Forced,
    Given,
    Mode,
    check_fits,
    check_given,
    sample_positions,
    step_tensor,
)
from tread.routing.ops import untransformed
from tread.routing.plan import RoutePlan
from tread.routing.risks import layer_risks, mask_risks, token_risks, warn_once
from tread.routing.route import Route
from tread.routing.selection import check_mask, check_selection, l1_rank, mixed_score, select
from tread.routing.state import Select, State, in_backward


class Held(NamedTuple):
    """The hidden inputs of a forward: everything but its arguments that it depends on."""

    step: Tensor
    micro_step: Tensor
    scale: float | None
    mode: Mode


class Layout(TypedDict, total=False):
    """Arguments of `State` that describe a forward's inputs."""

    tokens: int | None
    offset: Tensor | None
    per_block: bool


class Seen(NamedTuple):
    """A handle's record of one forward: its selections by route, and the number of image tokens."""

    selections: dict[int, Tensor]
    tokens: int


class Handle:
    """Routes one model of `depth` layers by `plan`; `seed` replaces the plan's."""

    def __init__(self, plan: RoutePlan, *, depth: int, seed: int | None = None) -> None:
        plan = plan.resolve(depth)
        self.plan = plan if seed is None else replace(plan, seed=seed)
        # the attributes of `recompute.Recomputed`, documented there
        self.state = State()
        self.tapes: list[list[State]] = []
        self.replay: Iterator[State] | None = None
        self.entered = False
        self.thread = threading.get_ident()
        # the record of the last forward, see `seen`
        self._selections: dict[int, Tensor] = {}
        self._tokens = 0
        self._routes = self.plan.routes
        self._mode = Mode()
        self._scale: float | None = None if plan.schedule else 1.0  # None: a schedule needs a step, and none is set
        self._step, self._micro_step = noise.counter(), noise.counter()
        self._said: set[str] = set()
        warn_once(layer_risks(self.plan), self._said)
        recompute.follow(self)

    def __repr__(self) -> str:
        routes = ", ".join(map(str, self.plan.routes))
        return f"<{type(self).__name__}: {routes} of {self.plan.depth} layers, step {int(self._step)}>"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        recompute.follow(self)

    def set_step(self, step: int) -> None:
        """Set the optimizer step of the next forwards and reset the micro-step.

        A loop that never calls this advances by itself, one micro-step per routed forward.
        """
        step = check_int(step, "step", 0, fix="Convert a tensor with int(step), which synchronises.")
        recompute.claim(self)
        self._step.fill_(step)
        self._micro_step.zero_()
        if self.plan.schedule is not None:
            self._scale = self.plan.schedule.scale(step)

    def reroute(self, config: RoutePlan | Mapping[str, Any] | str | Path, *, seed: int | None = None) -> None:
        """Route by another config from the next forward on; `seed` replaces this handle's.

        CUDA graphs and compiled code of earlier plans stay in memory: a loop that reroutes often should release graphs.
        """
        plan, depth = RoutePlan.from_config(config), self.plan.depth
        assert depth is not None
        self.plan = replace(plan.resolve(depth), seed=self.plan.seed if seed is None else seed)
        self._scale = None if plan.schedule else 1.0
        warn_once(layer_risks(self.plan), self._said)

    @contextmanager
    def force_keep(self, mask: Tensor) -> Iterator[None]:
        """Never drop the tokens that are True in mask (B, S). Its counts are read here, outside the forward."""
        check_mask(mask)
        masked = int(mask.sum(dim=1).max())
        warn_once(mask_risks(mask.shape[1], masked), self._said)
        leading = int(mask.int().cumprod(dim=1).sum(dim=1).min())
        with self._set(mask=mask, masked=masked, leading=leading):
            yield

    @contextmanager
    def routed(
        self,
        selection_ratio: float | None = None,
        *,
        selections: Sequence[Tensor] | None = None,
        step: int | Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Iterator[None]:
        """Route in any mode, with another ratio for all routes or with given ascending indices (B, K) per route.

        `step` and `samples` (B,) replace the step and the global sample positions that selections are drawn for. With
        a `step`, one for all samples or one for each, (B,), every forward inside drops the same tokens and the handle's
        own step does not move. A single position (1,) serves the whole batch, whose samples then drop the same tokens,
        unless their steps differ. The range of given indices is read here, outside the forward, with one
        synchronisation if they are on a GPU. No selections, which is what `handle.selections` has after a dense
        forward, run dense.
        """
        if selection_ratio is not None:
            check_fraction(selection_ratio, "selection_ratio", closed=False)
        if selections is not None and len(selections) not in (0, len(self.plan.routes)):
            raise ConfigError(f"{len(selections)} selections for {len(self.plan.routes)} routes; give one per route.")
        given = None
        if selections is not None:
            given = tuple(Given(ids, check_selection(ids, f"selections[{i}]")) for i, ids in enumerate(selections))
        fixed = None if step is None else step_tensor(step)
        with self._set(on=given != (), ratio=selection_ratio, selections=given, step=fixed, samples=samples):
            yield

    @contextmanager
    def permuted(self) -> Iterator[None]:
        """Route in any mode with every token kept, in a random order for each sample; pinned tokens stay first.

        Attention does not depend on the order, so the output is the dense one up to rounding if all that belongs to a
        token (rope rows, masks, modulation) follows it: a check of a family that needs no second computation.
        """
        with self._set(on=True, permuted=True):
            yield

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Run every forward inside with all tokens."""
        with self._set(on=False):
            yield

    @contextmanager
    def _set(self, **changes: object) -> Iterator[None]:
        before = self._mode
        self._mode = replace(before, **changes)
        try:
            yield
        finally:
            self._mode = before

    @property
    def selections(self) -> list[Tensor]:
        """The kept indices (B, K) of each route in the last forward; empty if it ran dense."""
        return list(self._selections.values())

    @property
    def kept(self) -> Tensor | None:
        """The tokens that no route of the last forward dropped, (B, S) bool; None if it ran dense."""
        kept = None
        for selection in self.selections:  # (B, K)
            by_route = selection.new_zeros(len(selection), self._tokens, dtype=torch.bool).scatter_(1, selection, True)
            kept = by_route if kept is None else kept & by_route  # (B, S)
        return kept

    @property
    def kept_share(self) -> float:
        """The share of tokens kept in the routed layers of the last forward; 1 if it ran dense."""
        if not self._selections:
            return 1.0
        layers = [len(route.layers) for route in self._routes]
        kept = sum(layers[route] * ids.shape[1] for route, ids in self._selections.items())
        return kept / (sum(layers) * self._tokens)

    def state_dict(self) -> dict[str, int]:
        """The step and micro-step, for loops that write their own checkpoints."""
        return {"step": int(self._step), "micro_step": int(self._micro_step)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict()` returned."""
        if state.keys() != self.state_dict().keys():
            raise ConfigError(f"the state has {', '.join(state) or 'nothing'}; it must be what state_dict() returned.")
        micro_step = check_int(state["micro_step"], "micro_step of the state", 0)
        self.set_step(state["step"])
        self._micro_step.fill_(micro_step)

    @property
    def active_scale(self) -> float:
        """The schedule's factor on every ratio at this step: 1 as configured, 0 dense."""
        if self._scale is None:
            raise ConfigError("the schedule needs to know the step: call handle.set_step(step) before each step.")
        return self._scale

    def is_on(self, *, training: bool) -> bool:
        """Whether a forward would be routed now; `training` is the model's mode."""
        if self._mode.on is not None:
            return self._mode.on
        return training and (torch.is_grad_enabled() or self.entered) and self.active_scale > 0

    def ratios(self, *, training: bool) -> tuple[float, ...]:
        """The ratio of each route in a forward now; `training` is the model's mode."""
        on = self.is_on(training=training)
        return tuple(self._ratio(self._mode, route) if on else 0.0 for route in self.plan.routes)

    @property
    def at_full_ratio(self) -> bool:
        """Whether a training forward now drops what the plan says: not in dense steps, nor in those of a schedule's
        lower levels."""
        ratios = zip(self.ratios(training=True), self.plan.routes, strict=True)
        return all(ratio >= route.selection_ratio for ratio, route in ratios)

    def _ratio(self, mode: Mode, route: Route) -> float:
        ratio = route.selection_ratio * self.active_scale if mode.ratio is None else mode.ratio
        if torch.compiler.is_compiling():  # torch would compile one that changes for any value, and fail at the lengths
            from torch.fx.experimental.symbolic_shapes import guard_scalar  # takes a second to import

            return guard_scalar(ratio)
        return ratio

    def begin(self, *, training: bool, forced: Forced = NONE_FORCED, **layout: Unpack[Layout]) -> State:
        """The state of one forward; `training` is the model's mode, `forced` the tokens its inputs force, `layout`
        arguments of `State`. A recomputed forward gets a fork of its first state."""
        if (state := self.replayed()) is not None:
            return state
        self.check_recomputed_by_torch("the model", training=training)
        if not torch.compiler.is_compiling():
            recompute.claim(self)
        state = State()
        if self.is_on(training=training):
            state = State(self.plan.routes, self._selector(self._mode, forced), **layout)
        self._selections, self._routes = state.selections, self.plan.routes
        return self._taped(state)

    def replayed(self) -> State | None:
        """The state of the next forward in a recomputation; None outside one."""
        if torch.compiler.is_compiling() or self.replay is None:  # compiled code computes the selection again
            return None
        state = next(self.replay, None)
        if state is None:
            raise ConfigError(
                "a checkpointed function calls the model more often when it is recomputed in backward than in its "
                "forward: make it run the same forwards both times."
            )
        return self._taped(state.fork())

    def _taped(self, state: State) -> State:
        if not torch.compiler.is_compiling():
            for tape in self.tapes:
                tape.append(state.fork())
        return state

    def check_recomputed_by_torch(self, what: str, *, training: bool) -> None:
        """Refuse a routed call in backward that is not a recomputation by torch's checkpointing; `what` is called."""
        if torch.compiler.is_compiling() or self.replay is not None or not in_backward():
            return
        if self.is_on(training=training):
            raise ConfigError(
                f"{what} runs again in backward, by something other than torch.utils.checkpoint, so the tokens that "
                "its forward kept are not known. Use torch's checkpointing, in any form. If tread.attach was called "
                "between a forward and its backward, call it before the forward."
            )

    def check_unrouted(self, layer: nn.Module) -> None:
        """Refuse a call of a layer that should be routed and is not."""
        self.check_recomputed_by_torch(type(layer).__name__, training=layer.training)

    def _selector(self, mode: Mode, forced: Forced) -> Select:
        """The function that selects the tokens of each route in this forward; increments the micro-step."""
        step, micro_step = self._step, untransformed(self._micro_step.clone)
        if mode.step is not None:
            step, micro_step = mode.step, torch.zeros_like(mode.step)
        elif mode.selections is None:
            untransformed(self._micro_step.add_, 1)

        def choose(index: int, stream: Tensor) -> Tensor:
            batch, tokens = stream.shape[:2]
            self._tokens = tokens
            if mode.selections is not None:
                return check_given(mode.selections[index], index, batch, tokens).to(stream.device)
            target = tokens - forced.references
            check_fits(mode, batch, target)
            if not torch.compiler.is_compiling():
                warn_once(token_risks(self.plan, target), self._said)
            ratio = self._ratio(mode, self.plan.routes[index])
            position = sample_positions(mode.samples, batch, stream.device).unsqueeze(1)  # (B, 1)
            token = torch.arange(tokens, device=stream.device)  # (S,)
            score = noise.bits(self.plan.seed, step, micro_step, index, position, token)  # (B, S)
            if mode.permuted:  # pinned tokens stay first: layers address them by index
                return torch.where(token < forced.pinned, token - tokens, score).argsort(dim=1)  # (B, S)
            if self.plan.importance:
                score = mixed_score(score, l1_rank(stream), self.plan.importance)
            always = forced.count - min(forced.pinned, mode.leading)  # `masked` counts pinned tokens under the mask
            kept = kept_count(tokens, ratio, mode.masked, always)
            return select(score, kept, forced.with_mask(mode.mask, like=score))  # (B, K)

        return choose

    def warn(self, risks: list[str]) -> None:
        """Warn about each risk once per handle."""
        warn_once(risks, self._said)

    def hold(self) -> Held:
        """A copy of the hidden inputs, for a recomputation to restore."""
        return Held(self._step.clone(), self._micro_step.clone(), self._scale, self._mode)

    def put_back(self, held: Held) -> None:
        """Restore what `hold` returned."""
        self._step.copy_(held.step)
        self._micro_step.copy_(held.micro_step)
        self._scale, self._mode = held.scale, held.mode

    def reattach(self) -> Callable[[], None] | None:
        """Attach again for a recomputation; nothing to do here, as this handle is never detached."""
        return None

    def to(self, device: torch.device) -> None:
        """Keep the step on `device`, where a CUDA graph reads it."""
        self._step, self._micro_step = self._step.to(device), self._micro_step.to(device)

    def signature(self, *, training: bool) -> tuple[Hashable, ...]:
        """The host-side decisions about a forward now: repeatable forwards with equal signatures differ only in their
        inputs and the step."""
        plan = self.plan
        chosen_by = plan.routes, plan.importance, plan.seed, plan.reference_tokens
        return self.is_on(training=training), chosen_by, *self.ratios(training=training)

    @property
    def repeatable(self) -> bool:
        """Whether the next forward depends only on its inputs, the step and `signature`: no force mask, no given
        selections, step or sample positions, and no checkpointed function around it."""
        mode = self._mode
        given = (mode.selections, mode.step, mode.samples, mode.mask, self.replay)
        return not self.tapes and all(one is None for one in given)

    @property
    def seen(self) -> Seen:
        """The record of the last forward."""
        return Seen(self._selections, self._tokens)

    def recall(self, seen: Seen) -> None:
        """Restore a captured forward's record: a replay runs no Python."""
        self._selections, self._tokens = seen
        self._routes = self.plan.routes  # a graph is replayed only by the routes it was captured with
