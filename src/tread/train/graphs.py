"""The network of a step as CUDA graphs: launched once, not kernel by kernel.

- A step on few tokens is over before the host has asked for it: routed LoRA steps of 57 layers wait for Python
  (docs/performance.md). A graph holds the forward or the backward of the network as the device saw it once, and costs
  the host one launch.
- One pair of graphs for each shape of the inputs and each ratio of the routes, made when the same call has run a few
  times, so that everything is compiled and chosen by then. They share their memory: a forward runs by a graph only when
  the one before it has had its backward.
- Tokens are selected inside the graph: the handle keeps its step on the device, where the graph reads it.
- Around the network nothing changes: noise, times, the loss, clipping and the optimizer run as before.
- What a graph cannot hold runs without: forwards with a force mask or selections of their own, inputs that need
  gradients, forwards without gradients, or those watched by a mode that counts operations. Where capturing fails, one
  sentence says so and the run goes on without.
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


class Graphs:
    """A network that is called as ever, and runs as graphs."""

    def __init__(self, network: nn.Module, handles: Sequence[Handle], say: Callable[[str], None] = print) -> None:
        self.network, self.handles, self._say = network, handles, say
        self._calls: dict[Any, int] = {}
        self._captured: dict[Any, tuple[Capture, list[Seen]]] = {}
        self.failed = False
        device = next(network.parameters()).device
        for handle in handles:
            handle.to(device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.failed or self._is_running() or not self._fits(tensors):
            return self.network(*args, **kwargs)
        kind = (tree, tuple(map(_kind, leaves)), tuple(h.ratios(training=self.network.training) for h in self.handles))
        if kind not in self._captured:
            self._calls[kind] = self._calls.get(kind, 0) + 1
            if self._calls[kind] <= CALLS:
                return self.network(*args, **kwargs)
            try:
                self._captured[kind] = self._capture(leaves, tree)
            except RuntimeError as error:  # torch's own errors and those of CUDA are of this kind
                self.failed = True
                self._say(f"capturing a CUDA graph failed, so the run goes on without ({str(error).splitlines()[0]}).")
                return self.network(*args, **kwargs)
        capture, seen = self._captured[kind]
        for handle, one in zip(self.handles, seen, strict=True):
            handle.recall(one)
        return capture(tensors)

    def _is_running(self) -> bool:
        return any(capture.is_running for capture, _ in self._captured.values())

    def _fits(self, tensors: list[Tensor]) -> bool:
        plain = torch.is_grad_enabled() and not any(x.requires_grad for x in tensors)
        return plain and _get_current_dispatch_mode() is None and all(handle.repeatable for handle in self.handles)

    def _capture(self, leaves: list[Any], tree: pytree.TreeSpec) -> "tuple[Capture, list[Seen]]":
        before = [handle.state_dict() for handle in self.handles]
        shared = next(iter(self._captured.values()))[0] if self._captured else None
        try:
            capture = Capture(self.network, leaves, tree, shared)
        finally:
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
        with _kept_generator(self._inputs[0].device):
            with self._recording(self._forward):
                outputs, self._tree = pytree.tree_flatten(network(*args, **kwargs))
            if not all(isinstance(out, Tensor) for out in outputs):
                raise RuntimeError("the network returns more than tensors")
            ends = [out for out in outputs if out.requires_grad]
            self._given = [torch.empty_like(out) for out in ends]
            with self._recording(self._backward):
                self.gradients = torch.autograd.grad(ends, self.trained, self._given, allow_unused=True)
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

    def replay_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Fill `gradients` from those of the outputs."""
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
        ctx.capture.replay_backward(gradients)
        return None, *ctx.capture.gradients  # torch copies them: others hold them too


@contextmanager
def _kept_generator(device: torch.device) -> Iterator[None]:
    """Where capturing fails, torch leaves the generator of random numbers believing that it goes on."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.clone_state()
    try:
        yield
    except RuntimeError:
        generator.graphsafe_set_state(before)
        raise


def _kind(leaf: Any) -> Any:
    """What must be the same for a graph to serve another call."""
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
