"""Activation checkpointing in any form: a recomputation finds the routing that the forward had.

Checkpointed functions run again in backward, when the forward's state is gone, the step may have moved on, and other
forwards may have run. What a handle holds is a hidden input of such a function, so it is noted where the function
begins and put back while the function runs again:

- Torch has two ways to run a function again, and every form of checkpointing in torch (`checkpoint` however imported,
  `checkpoint_sequential`, `checkpoint_wrapper`, the composable `checkpoint`, selective policies) ends in one of them:
  the hooks that `_checkpoint_hook` puts on saved tensors (non-reentrant), and `CheckpointFunction` (reentrant). Both
  are followed where torch itself looks them up, as long as there is a handle.
- Nothing is selected twice. A recomputation uses the indices that the forward kept; compiled models, which cannot look
  them up, go back to the forward's step.
- Both passes do the same: side inputs are made, or found, in the recomputation where they were in the forward.
- Reentrant checkpointing sees gradients of explicit inputs and outputs alone. So its functions make side inputs inside,
  and the one tensor that may cross their border, the bypass of a window that opens outside and closes inside or the
  other way round, is given to them as an input and taken from them as an output.
- What runs a layer again and is neither of the two is seen in backward and refused.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils import checkpoint as torch_checkpoint

from tread.routing.state import State


class Recomputed(Protocol):
    """What a recomputation needs of a handle."""

    state: State
    """The state of the forward that runs now."""
    tapes: list[list[State]]
    """For each checkpointed function that runs now, the states of the forwards that began inside."""
    replay: Iterator[State] | None
    """The states of the forwards that run again; None where no function does."""
    entered: bool
    """Whether a reentrant function runs, without gradients, that was called with them."""

    def hold(self) -> Any:
        """Everything but the state that forwards depend on."""
        ...

    def put_back(self, held: Any) -> None:
        """Depend on it again."""
        ...

    def come_back(self) -> Callable[[], None] | None:
        """Route, detached or not; returns how to leave, if there is anything to do."""
        ...


_handles: WeakSet[Any] = WeakSet()
_stock_hook = torch_checkpoint._checkpoint_hook
_replays = 0


def follow(handle: Recomputed) -> None:
    """Note what `handle` holds wherever torch checkpoints a function from now on."""
    _handles.add(handle)
    _install()


def leave(handle: Recomputed) -> None:
    """Follow a handle no more; torch is as it was when the last one is gone."""
    _handles.discard(handle)
    _remove_unused()


def in_backward() -> bool:
    """Whether autograd runs now."""
    return torch._C._current_graph_task_id() != -1


class _Snapshot:
    """What one handle held where a checkpointed function began, and what its forward did inside."""

    def __init__(self, handle: Recomputed, *, reentrant: bool) -> None:
        self.handle, self.state = handle, handle.state.fork()
        self._held = None if self.state.routed else handle.hold()  # no forward begins inside another
        self._reentrant = reentrant
        self._forwards: list[State] = []
        self._log: list[bool] = []
        if reentrant:
            self.state.forget()

    def begin(self) -> Callable[[], None]:
        """Note what happens in the first pass, which runs without gradients where it is reentrant; returns its end."""
        handle, state = self.handle, self.handle.state
        entered = handle.entered
        handle.tapes = [*handle.tapes, self._forwards]
        state.logs = [*state.logs, self._log]
        if self._reentrant:
            handle.entered = True

        def end() -> None:
            if self._reentrant:
                handle.entered = entered
                state.forget()  # what was made inside has no gradient
            state.logs = [log for log in state.logs if log is not self._log]
            handle.tapes = [tape for tape in handle.tapes if tape is not self._forwards]

        return end

    def replay(self, bypass: Tensor | None) -> Callable[[], None]:
        """Put everything back for a recomputation; `bypass` is the one it is given, if it is. Returns its end."""
        handle, held = self.handle, self._held
        before = handle.state, handle.tapes, handle.replay, handle.entered
        now = None if held is None else handle.hold()
        again = self.state.fork()
        handle.state, handle.tapes, handle.replay, handle.entered = again, [], iter(self._forwards), False
        if held is not None:
            handle.put_back(held)
        if not self._reentrant:  # which runs everything anew, and saves nothing that must match
            again.script = iter(self._log)
        if bypass is not None:
            again.bypass = bypass
        leave = handle.come_back() if again.routed or self._forwards else None
        unhush = again.hush()

        def end() -> None:
            unhush()
            if leave is not None:
                leave()
            if now is not None:
                handle.put_back(now)
            handle.state, handle.tapes, handle.replay, handle.entered = before

        return end


class _Region:
    """One call of a checkpointed function."""

    def __init__(self, *, reentrant: bool) -> None:
        self.snapshots = [_Snapshot(handle, reentrant=reentrant) for handle in tuple(_handles)]
        self._ends: list[Callable[[], None]] = []

    def begin(self) -> None:
        """The first pass begins."""
        self._ends = [snapshot.begin() for snapshot in self.snapshots]

    def end(self) -> None:
        """The first pass has ended, one way or another."""
        for end in reversed(self._ends):
            end()
        self._ends = []

    def again(self, function: Callable[..., Any], *args: Any, bypasses: Sequence[Tensor | None] = ()) -> Any:
        """Compute the function again."""
        global _replays
        _replays += 1
        _install()  # functions within this one are checkpointed again
        ends: list[Callable[[], None]] = []
        try:
            for i, snapshot in enumerate(self.snapshots):
                ends.append(snapshot.replay(bypasses[i] if bypasses else None))
            return function(*args)
        finally:
            for end in reversed(ends):
                end()
            _replays -= 1
            _remove_unused()


class _Hook(_stock_hook):
    """The hooks of a non-reentrant call: entered before the function runs, left after it."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        self._region = None
        if TracingContext.try_get() is None:  # compiled code is traced by the same hooks, and never runs them again
            self._region = _Region(reentrant=False)
            frame.recompute_fn = partial(self._region.again, frame.recompute_fn)

    def __enter__(self) -> Any:
        if self._region is not None:
            self._region.begin()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._region is not None:
            self._region.end()


def _apply(cls: type, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """`CheckpointFunction.apply`: a reentrant call."""
    stock = super(torch_checkpoint.CheckpointFunction, cls).apply  # pyright: ignore[reportArgumentType]
    if not torch.is_grad_enabled() or TracingContext.try_get() is not None:
        return stock(function, preserve, *args)
    rerun = _Rerun(_Region(reentrant=True), function)
    return rerun.unpacked(stock(rerun, preserve, *rerun.given, *args))


class _Rerun:
    """A function that runs once in the forward and then in backward, with the bypass of each handle as an explicit
    input and output."""

    def __init__(self, region: _Region, function: Callable[..., Any]) -> None:
        self._region, self._function, self._first = region, function, True
        # within a layer no window opens or closes
        self._bypasses = [
            snapshot.state.bypass if snapshot.state.running is None else None for snapshot in region.snapshots
        ]
        self._made: list[int] = []
        self._single = False

    @property
    def given(self) -> list[Tensor]:
        """The tensors that are put before the function's own arguments."""
        return [bypass for bypass in self._bypasses if bypass is not None]

    def __call__(self, *args: Any) -> Any:
        count = len(self.given)
        given = iter(args[:count])
        bypasses = [None if bypass is None else next(given) for bypass in self._bypasses]
        if not self._first:
            return self._region.again(self._run, bypasses, *args[count:], bypasses=bypasses)
        self._first = False
        self._region.begin()
        try:
            return self._run(bypasses, *args[count:])
        finally:
            self._region.end()

    def _run(self, bypasses: list[Tensor | None], *args: Any) -> Any:
        output = self._function(*args)
        now = [snapshot.handle.state.bypass for snapshot in self._region.snapshots]
        self._made = [i for i, bypass in enumerate(now) if bypass is not None and bypass is not bypasses[i]]
        self._single = not isinstance(output, tuple)
        if not self._made:
            return output
        return (*((output,) if self._single else output), *(now[i] for i in self._made))

    def unpacked(self, output: Any) -> Any:
        """The function's own output; a bypass that was made inside is that of its handle from here on."""
        if not self._made:
            return output
        own, made = output[: -len(self._made)], output[-len(self._made) :]
        for i, bypass in zip(self._made, made, strict=True):
            self._region.snapshots[i].handle.state.bypass = bypass
        return own[0] if self._single else own


def _install() -> None:
    torch_checkpoint._checkpoint_hook = _Hook
    torch_checkpoint.CheckpointFunction.apply = classmethod(_apply)  # pyright: ignore[reportAttributeAccessIssue]


def _remove_unused() -> None:
    if _handles or _replays:
        return
    torch_checkpoint._checkpoint_hook = _stock_hook
    if "apply" in vars(torch_checkpoint.CheckpointFunction):
        del torch_checkpoint.CheckpointFunction.apply
