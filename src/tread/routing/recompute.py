"""Activation checkpointing in any form: a recomputation uses the routing of its forward.

Checkpointed functions run again in backward, when the forward's state is gone, the step may have changed, and other
forwards may have run. A handle is a hidden input of such a function, so a snapshot of it is taken when the function
begins and restored while it is recomputed:

- Torch recomputes in two ways, and every form of checkpointing in torch (`checkpoint` however imported,
  `checkpoint_sequential`, `checkpoint_wrapper`, the composable `checkpoint`, selective policies) ends in one of them:
  saved-tensor hooks, `_checkpoint_hook` (non-reentrant), and `CheckpointFunction` (reentrant). Both are patched in
  torch's own module while a handle exists.
- Nothing is selected twice. A recomputation uses the indices that the forward kept; compiled models, which cannot look
  them up, select again with the forward's step.
- Both passes run the same operations: the recomputation gathers a side input, or takes it from the memo, exactly when
  the forward did.
- Reentrant checkpointing has gradients for explicit inputs and outputs only. So its functions gather side inputs
  inside, and the one tensor that may cross their border, the bypass of a window that opens outside and closes inside
  or the other way round, is passed as an explicit input and output.
- Any other recomputation of a layer is detected in backward and refused.
- A checkpointed function follows the handles of its own thread: others may be in the middle of a forward. Backward may
  run in a thread of autograd's, so a recomputation follows the handles that its forward followed.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils import checkpoint as torch_checkpoint

from tread.errors import ConfigError
from tread.routing.state import State


class Recomputed(Protocol):
    """The part of a handle that recomputation uses."""

    state: State
    """The state of the current forward."""
    tapes: list[list[State]]
    """One list per checkpointed function now running: the states of the forwards that began inside it."""
    replay: Iterator[State] | None
    """The states of the forwards to recompute; None outside a recomputation."""
    entered: bool
    """Whether a reentrant function is in its first pass: gradients are disabled there, but were enabled at the call."""
    thread: int
    """The thread that uses the handle."""

    def hold(self) -> Any:
        """A copy of the hidden inputs of forwards other than the state."""
        ...

    def put_back(self, held: Any) -> None:
        """Restore what `hold` returned."""

    def reattach(self) -> Callable[[], None] | None:
        """Attach a detached handle again; returns a function that undoes it, or None if nothing was to be done."""
        ...


_handles: WeakSet[Any] = WeakSet()
"""The handles that are followed."""
_stock_hook = torch_checkpoint._checkpoint_hook


class _Here(threading.local):
    """The checkpointed functions that run in a thread."""

    regions: tuple["Region", ...] = ()
    """In their first pass."""
    handles: list[Any] | None = None
    """The handles of the recomputation; None outside one."""


_here = _Here()


def follow(handle: Recomputed) -> None:
    """Take a snapshot of `handle` at every checkpointed function from now on."""
    _handles.add(handle)
    _install()


def leave(handle: Recomputed) -> None:
    """Stop following a handle; after the last one torch is unpatched."""
    _handles.discard(handle)
    _remove_unused()


def claim(handle: Recomputed) -> None:
    """Use a handle in this thread from now on; raises if a checkpointed function that does not follow it has begun."""
    if handle.thread == threading.get_ident():
        return
    if _here.regions:
        raise ConfigError(
            "the model was attached or last used in another thread, and its first forward in this one is inside a "
            "checkpointed function: call handle.set_step(step) in this thread first."
        )
    handle.thread = threading.get_ident()


def _followed() -> list[Any]:
    """The handles that a checkpointed function in this thread follows."""
    if _here.handles is not None:
        return _here.handles
    return [handle for handle in tuple(_handles) if handle.thread == threading.get_ident()]


class _Snapshot:
    """One handle at the start of a checkpointed function, and a record of the function's first pass."""

    def __init__(self, handle: Recomputed, *, reentrant: bool) -> None:
        self.handle, self.state = handle, handle.state.fork()
        # no forward begins inside another, so inside a routed one nothing reads the hidden inputs
        self._held = None if self.state.routed else handle.hold()
        self._reentrant = reentrant
        self._forwards: list[State] = []
        self._log: list[bool] = []
        if reentrant:
            self.state.forget()

    def begin(self) -> Callable[[], None]:
        """Record the first pass, which has gradients disabled if it is reentrant; returns a function that ends it."""
        handle, state = self.handle, self.handle.state
        entered = handle.entered
        handle.tapes = [*handle.tapes, self._forwards]
        state.logs = [*state.logs, self._log]
        if self._reentrant:
            handle.entered = True

        def end() -> None:
            if self._reentrant:
                handle.entered = entered
                state.forget()  # side inputs gathered inside have no gradient
            state.logs = [log for log in state.logs if log is not self._log]
            handle.tapes = [tape for tape in handle.tapes if tape is not self._forwards]

        return end

    def replay(self, bypass: Tensor | None) -> Callable[[], None]:
        """Restore the snapshot for a recomputation, with `bypass` if given; returns a function that ends it."""
        handle, held = self.handle, self._held
        before = handle.state, handle.tapes, handle.replay, handle.entered
        now = None if held is None else handle.hold()
        again = self.state.fork()
        handle.state, handle.tapes, handle.replay, handle.entered = again, [], iter(self._forwards), False
        if held is not None:
            handle.put_back(held)
        if not self._reentrant:  # a reentrant recomputation is not compared with saved tensors
            again.script = iter(self._log)
        if bypass is not None:
            again.bypass = bypass
        undo = handle.reattach() if again.routed or self._forwards else None
        unhush = again.hush()

        def end() -> None:
            unhush()
            if undo is not None:
                undo()
            if now is not None:
                handle.put_back(now)
            handle.state, handle.tapes, handle.replay, handle.entered = before

        return end


class Region:
    """One call of a checkpointed function, with a snapshot of every handle."""

    def __init__(self, *, reentrant: bool) -> None:
        self.snapshots = [_Snapshot(handle, reentrant=reentrant) for handle in _followed()]
        self._ends: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Begin the first pass."""
        _here.regions = (*_here.regions, self)
        self._ends = [snapshot.begin() for snapshot in self.snapshots]

    def end(self) -> None:
        """End the first pass, also after an error."""
        _here.regions = tuple(region for region in _here.regions if region is not self)
        for end in reversed(self._ends):
            end()
        self._ends = []

    def recompute(self, function: Callable[..., Any], *args: Any, bypasses: Sequence[Tensor | None] = ()) -> Any:
        """Call `function(*args)` with every handle restored; `bypasses` has one entry per snapshot, if any."""
        outer, _here.handles = _here.handles, [snapshot.handle for snapshot in self.snapshots]
        ends: list[Callable[[], None]] = []
        try:
            for i, snapshot in enumerate(self.snapshots):
                ends.append(snapshot.replay(bypasses[i] if bypasses else None))
            return function(*args)
        finally:
            for end in reversed(ends):
                end()
            _here.handles = outer


class _Hook(_stock_hook):
    """The saved-tensor hooks of a non-reentrant call: entered before the function runs, left after it."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        self._region = None
        if TracingContext.try_get() is None:  # tracing uses the same hooks but never recomputes
            self._region = Region(reentrant=False)
            frame.recompute_fn = partial(self._region.recompute, frame.recompute_fn)

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
    rerun = _Rerun(Region(reentrant=True), function)
    return rerun.unpacked(stock(rerun, preserve, *rerun.given, *args))


class _Rerun:
    """The function of a reentrant call, with the bypass of each handle as an explicit input and output."""

    def __init__(self, region: Region, function: Callable[..., Any]) -> None:
        self._region, self._function, self._first = region, function, True
        # inside a layer no window opens or closes
        self._bypasses = [
            snapshot.state.bypass if snapshot.state.running is None else None for snapshot in region.snapshots
        ]
        self._made: list[int] = []
        """Indices of the snapshots whose handle made a bypass inside."""
        self._single = False
        """Whether the function returned something other than a tuple."""

    @property
    def given(self) -> list[Tensor]:
        """The bypasses, which precede the function's own arguments."""
        return [bypass for bypass in self._bypasses if bypass is not None]

    def __call__(self, *args: Any) -> Any:
        count = len(self.given)
        given = iter(args[:count])
        bypasses = [None if bypass is None else next(given) for bypass in self._bypasses]
        if not self._first:
            return self._region.recompute(self._run, bypasses, *args[count:], bypasses=bypasses)
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
        """The function's own output; bypasses that were made inside are given to their handles."""
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
    if _handles:
        return
    torch_checkpoint._checkpoint_hook = _stock_hook
    if "apply" in vars(torch_checkpoint.CheckpointFunction):
        del torch_checkpoint.CheckpointFunction.apply
