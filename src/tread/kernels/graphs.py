"""The network of a step as CUDA graphs: one launch instead of one per kernel.

- Steps on few tokens are bound by the host: routed LoRA steps of 57 layers wait for Python (docs/performance.md). A
  graph replays the captured forward or backward of the network with one launch.
- There is one pair of graphs per signature: the inputs' shapes, dtypes and plain values, what the host decides about
  routing, training mode and autocast. It is captured after a few eager calls, when everything is compiled and tuned.
- All graphs share one memory pool and their gradients, so a forward is replayed only if the previous one has had its
  backward.
- A graph uses the addresses it was captured with: inputs are copied into its own tensors, and all graphs are dropped
  when a weight has moved or requires_grad has changed.
- Tokens are selected inside the graph: the handle keeps its step on the device, where the graph reads it.
- Noise, times, the loss, clipping and the optimizer run outside the graphs as before.
- Calls that cannot be captured run eager: with a force mask or given selections, inputs that require gradients or are
  on the host, gradients disabled, or a dispatch mode (a FLOP counter) active. If capture fails, one message says so,
  all graphs are dropped and the run continues without.
- The autocast cache: entries cached before capture are freed by replay; entries cached during it were never computed.
  It is cleared before and after.
- torch's `make_graphed_callables` forbids CUDA calls of other threads during capture, such as a pinning loader's.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tread.routing.handle import Handle, Seen

CALLS = 2
"""Eager calls per signature before capture."""
VALUES = (bool, int, float, str, torch.dtype, torch.device, type(None))
"""Types of non-tensor arguments, which are part of the signature by value."""


class Graphs:
    """A callable like the network that replays CUDA graphs."""

    def __init__(self, network: nn.Module, handles: Sequence[Handle], say: Callable[[str], None] = print) -> None:
        self.network, self.handles, self._say = network, handles, say
        self._calls: dict[Any, int] = {}
        self._captured: dict[Any, tuple[Capture, list[Seen]]] = {}
        self.failed = False
        self._weights = [*network.parameters(), *network.buffers()]
        self._seen_weights = self._look()
        self._device = self._weights[0].device
        for handle in handles:
            handle.to(self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if self.failed or self._is_running() or not self._fits(leaves):
            return self.network(*args, **kwargs)
        if (weights := self._look()) != self._seen_weights:
            self._seen_weights = weights
            self._forget()
        signature = tree, tuple(map(_signature, leaves)), *self._mode()
        if not self._ready(signature, leaves, tree):
            return self.network(*args, **kwargs)
        capture, seen = self._captured[signature]
        for handle, one in zip(self.handles, seen, strict=True):
            handle.recall(one)
        return capture([leaf for leaf in leaves if isinstance(leaf, Tensor)])

    def _is_running(self) -> bool:
        return any(capture.is_running for capture, _ in self._captured.values())

    def _fits(self, leaves: list[Any]) -> bool:
        plain = torch.is_grad_enabled() and _get_current_dispatch_mode() is None
        return plain and all(map(self._holds, leaves)) and all(handle.repeatable for handle in self.handles)

    def _holds(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return leaf.device == self._device and not leaf.requires_grad
        return isinstance(leaf, VALUES)

    def _look(self) -> tuple[list[int], list[bool]]:
        """The address of every weight, and whether it requires gradients."""
        return [weight.data_ptr() for weight in self._weights], [weight.requires_grad for weight in self._weights]

    def _mode(self) -> tuple[Any, ...]:
        """The part of the signature that is not in the arguments."""
        device, training = self._device.type, self.network.training
        routing = tuple(handle.signature(training=training) for handle in self.handles)
        return training, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), routing

    def _ready(self, signature: Any, leaves: list[Any], tree: pytree.TreeSpec) -> bool:
        """Whether this signature has graphs; captures them after `CALLS` eager calls."""
        if signature in self._captured:
            return True
        self._calls[signature] = self._calls.get(signature, 0) + 1
        if self._calls[signature] <= CALLS:
            return False
        try:
            self._captured[signature] = self._capture(leaves, tree)
        except RuntimeError as error:  # the class of torch's and CUDA's errors
            self.failed = True
            self._forget()
            self._say(f"CUDA graph capture failed; continuing without graphs ({str(error).splitlines()[0]}).")
        return not self.failed

    def _forget(self) -> None:
        self._calls.clear()
        self._captured.clear()

    def _capture(self, leaves: list[Any], tree: pytree.TreeSpec) -> "tuple[Capture, list[Seen]]":
        before = [handle.state_dict() for handle in self.handles]
        shared = next(iter(self._captured.values()))[0] if self._captured else None
        torch.clear_autocast_cache()
        try:
            capture = Capture(self.network, leaves, tree, shared)
        finally:
            torch.clear_autocast_cache()
            for handle, state in zip(self.handles, before, strict=True):
                handle.load_state_dict(state)
        return capture, [handle.seen for handle in self.handles]


class Capture:
    """The graphs of one signature; `shared` is an earlier capture whose memory pool they use."""

    def __init__(
        self, network: nn.Module, leaves: list[Any], tree: pytree.TreeSpec, shared: "Capture | None" = None
    ) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the pool needs the memory that eager steps have cached
        self.pool = torch.cuda.graph_pool_handle() if shared is None else shared.pool
        self.trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        with _put_back():
            with self._recording(self._forward):
                outputs, self._tree = pytree.tree_flatten(network(*args, **kwargs))
            if not all(isinstance(out, Tensor) for out in outputs):
                raise RuntimeError("the network returns more than tensors")
            ends = [out for out in outputs if out.requires_grad]
            self._given = [torch.empty_like(out) for out in ends]
            # backward runs outside autocast
            with self._recording(self._backward), torch.autocast("cuda", enabled=False):
                gradients = torch.autograd.grad(ends, self.trained, self._given, allow_unused=True)
                self.gradients = gradients if shared is None else _moved(gradients, shared.gradients)
        self._differentiable = [out.requires_grad for out in outputs]
        self._outputs = [out.detach() for out in outputs]  # free the autograd graph of the capture stream
        self._call: weakref.ref[_Call] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a replayed forward still waits for its backward."""
        return self._call is not None and self._call() is not None

    def _recording(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        return torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")

    def __call__(self, tensors: list[Tensor]) -> Any:
        for mine, given in zip(self._inputs, tensors, strict=True):
            mine.copy_(given)
        return pytree.tree_unflatten(_Replay.apply(self, *self.trained), self._tree)

    def replay_forward(self, call: "_Call") -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, in the graph's memory, and those among them that are not differentiable."""
        self._forward.replay()
        self._call = weakref.ref(call)
        outputs = [out.detach() for out in self._outputs]
        return outputs, [out for out, has in zip(outputs, self._differentiable, strict=True) if not has]

    def replay_backward(self, call: "_Call", gradients: Sequence[Tensor | None]) -> None:
        """Compute the parameters' gradients from `gradients` of the outputs."""
        if self._call is None or self._call() is not call:
            raise RuntimeError("backward ran twice on a CUDA-graph forward; set graphs=false.")
        self._call = None
        wanted = [given for given, has in zip(gradients, self._differentiable, strict=True) if has]
        for mine, given in zip(self._given, wanted, strict=True):
            mine.zero_() if given is None else mine.copy_(given)
        self._backward.replay()


class _Call:
    """A token that lives as long as a replayed forward's autograd node."""


class _Replay(torch.autograd.Function):
    """A capture as an autograd function of the parameters."""

    @staticmethod
    def forward(ctx: Any, capture: Capture, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.capture, ctx.call = capture, _Call()
        outputs, constant = capture.replay_forward(ctx.call)
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.capture.replay_backward(ctx.call, gradients)
        return None, *ctx.capture.gradients  # torch copies them, as they have other references


def _moved(gradients: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`gradients` copied into `targets`; one without a target is returned itself."""
    return tuple(
        mine if mine is None or target is None else target.copy_(mine)
        for mine, target in zip(gradients, targets, strict=True)
    )


@contextmanager
def _put_back() -> Iterator[None]:
    """Restore the current stream and the generator's state after a failed capture, which torch leaves as they were
    during it."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield
    except RuntimeError:
        generator.graphsafe_set_state(before)
        raise


def _signature(leaf: Any) -> Any:
    """The part of the signature for one argument; 1, 1.0 and True differ."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
