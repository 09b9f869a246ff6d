"""One network's forward and backward captured as a pair of CUDA graphs, and replayed as an autograd function.

`graphs.py` decides when to capture and when to replay. torch's `make_graphed_callables` is not used: it forbids CUDA
calls of other threads, such as a loader's that pins memory, during capture.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from tread.kernels.nests import taken_apart

SPOILED: set[Any] = set()
"""Memory pools in which a capture failed; torch captures into none of them again."""
VALUES = (bool, int, float, str, torch.dtype, torch.device, type(None))
"""Types of arguments and outputs other than tensors; a replay has their values at capture."""


class Capture:
    """The pair of graphs of one signature.

    `trained` are the parameters with gradients; `leaves` and `tree` are the arguments, flattened. Gradient tensors are
    taken from `shared`, an earlier capture of the same network, and the memory pool from `beside`, a capture of any
    network.
    """

    def __init__(
        self,
        network: Callable[..., Any],
        trained: list[nn.Parameter],
        leaves: list[Any],
        tree: pytree.TreeSpec,
        *,
        shared: "Capture | None" = None,
        beside: "Capture | None" = None,
    ) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the pool needs the memory that eager steps have cached
        self.pool = torch.cuda.graph_pool_handle() if beside is None else beside.pool
        self.trained = trained
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        forget_accumulators(trained)
        with _put_back():
            with _numbers_by_kernels(), self._capturing(self._forward):
                returned = network(*args, **kwargs)
            plain = (one for one in pytree.tree_leaves(returned) if not isinstance(one, Tensor))
            if unknown := [type(one).__name__ for one in plain if not isinstance(one, VALUES)]:
                raise RuntimeError(f"the network returns more than tensors and plain values: {unknown[0]}")
            outputs, self._output = taken_apart(returned)
            ends = [out for out in outputs if out.requires_grad]
            self._given = [torch.empty_like(out) for out in ends]
            # backward runs outside autocast
            with self._capturing(self._backward), torch.autocast("cuda", enabled=False):
                gradients = torch.autograd.grad(ends, self.trained, self._given, allow_unused=True)
                self.gradients = gradients if shared is None else _moved(gradients, shared.gradients)
        self._differentiable = [out.requires_grad for out in outputs]
        self._outputs = [out.detach() for out in outputs]  # free the autograd graph of the capture stream
        self._call: weakref.ref[_Call] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a replayed forward still waits for its backward."""
        return self._call is not None and self._call() is not None

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                yield
        except RuntimeError:
            SPOILED.add(self.pool)
            raise

    def __call__(self, tensors: list[Tensor]) -> Any:
        for mine, given in zip(self._inputs, tensors, strict=True):
            mine.copy_(given)
        return self._output(_Replay.apply(self, *self.trained))  # pyright: ignore[reportArgumentType]

    def replay_forward(self, call: "_Call") -> tuple[list[Tensor], list[Tensor]]:
        """Copies of the outputs, and those among them that are not differentiable."""
        self._forward.replay()
        self._call = weakref.ref(call)
        outputs = [out.clone() for out in self._outputs]
        return outputs, [out for out, has in zip(outputs, self._differentiable, strict=True) if not has]

    def replay_backward(self, call: "_Call", gradients: Sequence[Tensor | None]) -> None:
        """Compute the parameters' gradients from `gradients` of the outputs."""
        if self._call is None or self._call() is not call:
            raise RuntimeError("backward ran twice on a CUDA-graph forward; set graphs=False.")
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


def forget_accumulators(trained: Sequence[nn.Parameter]) -> None:
    """Let autograd make the nodes that accumulate these parameters' gradients anew.

    A node belongs to the stream it was made on, which a capture must not touch, and lives as long as any output of an
    earlier step, such as the loss in a plain loop. Torch drops it when the dtype of the data changes.
    """
    for parameter in trained:
        data = parameter.data
        other = torch.bfloat16 if data.dtype == torch.float32 else torch.float32
        parameter.data = torch.empty(0, dtype=other, device=data.device)
        parameter.data = data


@contextmanager
def _numbers_by_kernels() -> Iterator[None]:
    """Let kernels write what `torch.tensor(numbers, device="cuda")` copies from the host, which cannot be captured.

    Stock models have a few such numbers, such as Qwen-Image's prompt length; a replay has their values at capture.
    """

    def written(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            has_tensors = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
            # another thread may call it, whose stream is not capturing
            if has_tensors or device is None or not torch.cuda.is_current_stream_capturing():
                return make(*args, device=device, **kwargs)
            host = make(*args, **kwargs)
            filled = torch.empty_like(host, device=device)
            for element, number in zip(filled.view(-1), host.view(-1).tolist(), strict=True):
                element.fill_(number)
            return filled

        return torch.compiler.disable(made)  # pyright: ignore[reportReturnType]  # compiled code calls it too

    before = torch.tensor, torch.as_tensor
    torch.tensor, torch.as_tensor = map(written, before)
    try:
        yield
    finally:
        torch.tensor, torch.as_tensor = before
