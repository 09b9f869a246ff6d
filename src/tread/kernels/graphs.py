"""The network of a step as CUDA graphs: launched once, not kernel by kernel.

- A step on few tokens is over before the host has asked for it: routed LoRA steps of 57 layers wait for Python
  (docs/performance.md). A graph holds the forward or the backward of the network as the device saw it once, and costs
  the host one launch.
- One pair of graphs for each kind of call: the inputs' shapes and plain values, what the host decides about routing,
  the network's mode and autocast's. It is made when the same call has run a few times, so that everything is compiled
  and chosen by then. Graphs share their memory, their gradients too: a forward runs by a graph only when the one before
  it has had its backward.
- A graph reads and writes the places in memory that it was captured with: inputs are copied there, and when a weight
  has moved, or others train, all graphs are made anew.
- Tokens are selected inside the graph: the handle keeps its step on the device, where the graph reads it.
- Around the network nothing changes: noise, times, the loss, clipping and the optimizer run as before.
- What a graph cannot hold runs without: forwards with a force mask or selections of their own, inputs that need
  gradients or lie on the host, forwards without gradients, or those watched by a mode that counts operations. Where
  capturing fails, one sentence says so, all graphs are dropped and the run goes on without.
- Autocast remembers the weights that it has cast. What it remembers from outside would be gone when the graph is
  replayed, and what it remembers from a capture was never computed: it forgets both.
- torch's `make_graphed_callables` does the same but forbids other threads to touch CUDA meanwhile, and a loader that
  pins memory is one.
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
"""Of one kind that run as they are before they are captured."""
VALUES = (bool, int, float, str, torch.dtype, torch.device, type(None))
"""Arguments besides tensors that tell kinds of calls apart."""


class Graphs:
    """A network that is called as ever, and runs as graphs."""

    def __init__(self, network: nn.Module, handles: Sequence[Handle], say: Callable[[str], None] = print) -> None:
        self.network, self.handles, self._say = network, handles, say
        self._calls: dict[Any, int] = {}
        self._captured: dict[Any, tuple[Capture, list[Seen]]] = {}
        self.failed = False
        self._weights = [*network.parameters(), *network.buffers()]
        self._found = self._look()
        self._device = self._weights[0].device
        for handle in handles:
            handle.to(self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if self.failed or self._is_running() or not self._fits(leaves):
            return self.network(*args, **kwargs)
        if (found := self._look()) != self._found:
            self._found = found
            self._forget()
        kind = tree, tuple(map(_kind, leaves)), *self._mode()
        if not self._ready(kind, leaves, tree):
            return self.network(*args, **kwargs)
        capture, seen = self._captured[kind]
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
        """Where the weights are, and which of them train."""
        return [weight.data_ptr() for weight in self._weights], [weight.requires_grad for weight in self._weights]

    def _mode(self) -> tuple[Any, ...]:
        """What the host decides about a forward besides its arguments."""
        device, training = self._device.type, self.network.training
        routing = tuple(handle.kind(training=training) for handle in self.handles)
        return training, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), routing

    def _ready(self, kind: Any, leaves: list[Any], tree: pytree.TreeSpec) -> bool:
        """Whether this kind of call has graphs; makes them when its time has come."""
        if kind in self._captured:
            return True
        self._calls[kind] = self._calls.get(kind, 0) + 1
        if self._calls[kind] <= CALLS:
            return False
        try:
            self._captured[kind] = self._capture(leaves, tree)
        except RuntimeError as error:  # torch's own errors and those of CUDA are of this kind
            self.failed = True
            self._forget()
            self._say(f"capturing a CUDA graph failed, so the run goes on without ({str(error).splitlines()[0]}).")
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
    """The graphs of one kind of call; `shared` is another whose memory they use."""

    def __init__(
        self, network: nn.Module, leaves: list[Any], tree: pytree.TreeSpec, shared: "Capture | None" = None
    ) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # graphs have memory of their own, and need what the steps before them used
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
            # backwards run outside autocast
            with self._recording(self._backward), torch.autocast("cuda", enabled=False):
                gradients = torch.autograd.grad(ends, self.trained, self._given, allow_unused=True)
                self.gradients = gradients if shared is None else _moved(gradients, shared.gradients)
        self._differentiable = [out.requires_grad for out in outputs]
        self._outputs = [out.detach() for out in outputs]  # what autograd noted on the recording stream is let go
        self._call: weakref.ref[_Call] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a forward still waits for its backward."""
        return self._call is not None and self._call() is not None

    def _recording(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        return torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")

    def __call__(self, tensors: list[Tensor]) -> Any:
        for mine, given in zip(self._inputs, tensors, strict=True):
            mine.copy_(given)
        return pytree.tree_unflatten(_Replay.apply(self, *self.trained), self._tree)

    def replay_forward(self, call: "_Call") -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, in the graph's own memory, and those of them that have no gradient."""
        self._forward.replay()
        self._call = weakref.ref(call)
        outputs = [out.detach() for out in self._outputs]
        return outputs, [out for out, has in zip(outputs, self._differentiable, strict=True) if not has]

    def replay_backward(self, call: "_Call", gradients: Sequence[Tensor | None]) -> None:
        """Fill `gradients` from those of the outputs."""
        if self._call is None or self._call() is not call:
            raise RuntimeError(
                "a forward that ran as a CUDA graph has one backward, and it has run: go without graphs."
            )
        self._call = None
        wanted = [given for given, has in zip(gradients, self._differentiable, strict=True) if has]
        for mine, given in zip(self._given, wanted, strict=True):
            mine.zero_() if given is None else mine.copy_(given)
        self._backward.replay()


class _Call:
    """Lives as long as a forward's part in the graph of autograd."""


class _Replay(torch.autograd.Function):
    """A capture as a function of the parameters."""

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
        return None, *ctx.capture.gradients  # torch copies them: others hold them too


def _moved(gradients: Sequence[Tensor | None], places: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`gradients` copied to `places`; one that has no place stays where it is."""
    return tuple(
        mine if mine is None or place is None else place.copy_(mine)
        for mine, place in zip(gradients, places, strict=True)
    )


@contextmanager
def _put_back() -> Iterator[None]:
    """Where capturing fails, torch stays on the stream that it recorded, and leaves the generator of random numbers
    believing that the recording goes on."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield
    except RuntimeError:
        generator.graphsafe_set_state(before)
        raise


def _kind(leaf: Any) -> Any:
    """What must be the same for a graph to serve another call; 1, 1.0 and True are not."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
