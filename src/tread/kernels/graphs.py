"""The network of a step as CUDA graphs: one launch instead of one per kernel.

- Steps on few tokens are bound by the host: routed LoRA steps of 57 layers wait for Python (docs/performance.md). A
  graph replays the captured forward or backward of the network with one launch.
- There is one pair of graphs per signature: the inputs' shapes, dtypes and plain values, what the host decides about
  routing, training mode and autocast. It is captured after a few eager calls, when everything is compiled and tuned.
- The graphs of all models on a device share one memory pool, so a forward is replayed only if the previous one has had
  its backward. Those of one model share their gradients too. `release` gives the memory back.
- A graph uses the addresses it was captured with: inputs are copied into its own tensors, outputs and selections are
  copies, and all graphs are dropped when a weight was moved, added or removed, or when requires_grad has changed.
- A graph repeats what Python decided at capture. So the modules' training mode and the state of adapters (`STATE`) are
  part of the signature. If anything else that a model reads in Python changes, call `release`.
- Tokens are selected inside the graph: the handle keeps its step on the device, where the graph reads it.
- Noise, times, the loss, clipping and the optimizer run outside the graphs as before.
- Calls that cannot be captured run without graphs: with a force mask or given selections, inputs that require gradients
  or are on the host, gradients disabled, inside a checkpointed function or a dispatch mode (a FLOP counter), in several
  processes. If capture fails, one message says so, all graphs are dropped and the run continues without. There are at
  most `MOST` pairs of graphs; past that, one message says so, and other signatures run without.
- The autocast cache is cleared before and after capture: entries cached before it are freed by replay, entries cached
  during it were never computed.
"""

import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tread.kernels.capture import SPOILED, VALUES, Capture
from tread.routing.handle import Handle, Seen

CALLS = 2
"""Eager calls per signature before capture."""
MOST = 32
"""Signatures with graphs, per model."""
COUNTED = 1024
"""Signatures whose calls are counted; beyond it, counting starts anew."""
STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "multiplier")
"""Attributes of modules that peft and lycoris change between calls; in the signature by value."""


class Graphs:
    """The calls of one network, replayed from CUDA graphs if possible."""

    _all: ClassVar[weakref.WeakSet["Graphs"]] = weakref.WeakSet()

    def __init__(self, network: nn.Module, handles: Sequence[Handle], say: Callable[[str], None] = print) -> None:
        self.network, self.handles, self._say = network, handles, say
        self._calls: dict[Any, int] = {}
        self._captured: dict[Any, tuple[Capture, list[Seen]]] = {}
        self.failed, self._full = False, False
        self._seen_weights, _ = _weights_and_state(network)
        self._device = next(network.parameters()).device
        for handle in handles:
            handle.to(self._device)
        Graphs._all.add(self)

    @property
    def count(self) -> int:
        """The number of signatures that have graphs."""
        return len(self._captured)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.network, args, kwargs)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the network's `forward`, replayed from graphs if this call has some."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if self.failed or not self._fits(leaves) or self._is_running():
            return forward(*args, **kwargs)
        weights, state = _weights_and_state(self.network)
        if weights != self._seen_weights:
            self._seen_weights = weights
            self._forget()
        signature = tree, tuple(map(_signature, leaves)), *self._mode(), state
        if not self._ready(signature, forward, leaves, tree):
            return forward(*args, **kwargs)
        capture, seen = self._captured[signature]
        output = capture([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        for handle, one in zip(self.handles, seen, strict=True):
            handle.recall(Seen({route: ids.clone() for route, ids in one.selections.items()}, one.tokens))
        return output

    def release(self) -> None:
        """Give the memory of all graphs back, for example for validation; each signature is captured anew."""
        self._captured.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Drop everything, run without graphs from now on, and keep the handles' steps on the host again."""
        self._forget()
        self.failed = True
        for handle in self.handles:
            handle.to(torch.device("cpu"))

    @staticmethod
    def _is_running() -> bool:
        """Whether a replayed forward of any model still waits for its backward, in the memory pool that all share."""
        return any(capture.is_running for graphs in Graphs._all for capture, _ in graphs._captured.values())

    def _fits(self, leaves: list[Any]) -> bool:
        """Whether a call with these arguments can be captured now."""
        plain = torch.is_grad_enabled() and _get_current_dispatch_mode() is None and not is_distributed()
        return plain and all(map(self._takes, leaves)) and all(handle.repeatable for handle in self.handles)

    def _takes(self, leaf: Any) -> bool:
        """Whether a graph can take this argument."""
        if isinstance(leaf, Tensor):
            return leaf.device == self._device and not leaf.requires_grad
        return isinstance(leaf, VALUES)

    def _mode(self) -> tuple[Any, ...]:
        """The part of the signature that is neither in the arguments nor in the modules."""
        device, training = self._device.type, self.network.training
        routing = tuple(handle.signature(training=training) for handle in self.handles)
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), routing

    def _ready(self, signature: Any, forward: Callable[..., Any], leaves: list[Any], tree: pytree.TreeSpec) -> bool:
        """Whether this signature has graphs; captures them after `CALLS` eager calls."""
        if signature in self._captured:
            return True
        if len(self._calls) >= COUNTED:
            self._calls.clear()
        self._calls[signature] = self._calls.get(signature, 0) + 1
        if self._calls[signature] <= CALLS or self._is_full():
            return False
        try:
            self._captured[signature] = self._capture(forward, leaves, tree)
        except RuntimeError as error:  # the class of torch's and CUDA's errors
            self.failed = True
            self._forget()
            self._say(f"CUDA graph capture failed; continuing without graphs ({_first_line(error)}).")
            _close_frames(error)
        return not self.failed

    def _is_full(self) -> bool:
        """Whether no further signature gets graphs; says so the first time."""
        full = self.count >= MOST
        if full and not self._full:
            self._say(f"there are CUDA graphs for {MOST} call signatures; further ones run without.")
        self._full |= full
        return full

    def _forget(self) -> None:
        self._calls.clear()
        self._captured.clear()

    def _capture(
        self, forward: Callable[..., Any], leaves: list[Any], tree: pytree.TreeSpec
    ) -> tuple[Capture, list[Seen]]:
        before = [handle.state_dict() for handle in self.handles]
        shared = next((capture for capture, _ in self._captured.values()), None)
        beside = (capture for graphs in Graphs._all for capture, _ in graphs._captured.values())
        beside = next((capture for capture in beside if capture.pool not in SPOILED), None)
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        torch.clear_autocast_cache()
        try:
            capture = Capture(forward, trained, leaves, tree, shared=shared, beside=beside)
        finally:
            torch.clear_autocast_cache()
            for handle, state in zip(self.handles, before, strict=True):
                handle.load_state_dict(state)
        return capture, [handle.seen for handle in self.handles]


def _weights_and_state(network: nn.Module) -> tuple[list[Any], tuple[Any, ...]]:
    """The address of every parameter and buffer and whether it requires gradients; and the state of every module."""
    weights, state, rest = [], [], [network]
    while rest:
        module = rest.pop()
        own = module.__dict__
        state.append(own["training"])
        if "scaling" in own or "multiplier" in own:
            state.extend(_plain(own.get(name)) for name in STATE)
        for one in (*own["_parameters"].values(), *own["_buffers"].values()):
            if one is not None:
                weights += one.data_ptr(), one.requires_grad
        rest += [child for child in own["_modules"].values() if child is not None]
    return weights, tuple(state)


def _plain(value: Any) -> Any:
    """A copy that can be compared and hashed."""
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list | set) else value


def is_distributed() -> bool:
    """Whether several processes train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _first_line(error: BaseException) -> str:
    """The first line of the original error: the end of a failed capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error) or type(error).__name__).splitlines()[0]


def _close_frames(error: BaseException | None) -> None:
    """Free the frames of the functions that failed.

    Before torch 2.13 a checkpointed function that raises leaves its hooks and dispatch modes active until its frame is
    freed, which may be at any later time; the forward that follows would run under them.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _signature(leaf: Any) -> Any:
    """The part of the signature for one argument; 1, 1.0 and True differ."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
