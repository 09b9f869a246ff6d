"""The network of a step as CUDA graphs: launched once, not kernel by kernel.

- A step on few tokens is over before the host has asked for it: routed LoRA steps of 57 layers wait for Python
  (docs/performance.md). A graph holds the forward and the backward of the network as the device saw them once, and
  costs the host two launches.
- One graph for each shape of the inputs and each ratio of the routes, made by torch's own `make_graphed_callables` when
  the same call has run a few times, so that everything is compiled and chosen by then. They share their memory, because
  steps run one after the other.
- Tokens are selected inside the graph: the handle keeps its step on the device, where the graph reads it.
- Around the network nothing changes: noise, times, the loss, clipping and the optimizer run as before.
- What a graph cannot hold runs without: forwards with a force mask or selections of their own, without gradients, or
  watched by a mode that counts operations. Where capturing fails, one sentence says so and the run goes on without.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tread.routing.handle import Handle, Seen

CALLS = 2
"""Of one kind that run as they are before they are captured."""


class Captured(NamedTuple):
    """A graph, and what each handle saw when it was made."""

    run: Callable[..., Any]
    seen: list[Seen]


class Graphs:
    """A network that is called as ever, and runs as graphs."""

    def __init__(self, network: nn.Module, handles: Sequence[Handle], say: Callable[[str], None] = print) -> None:
        self.network, self.handles, self._say = network, handles, say
        self._calls: dict[Any, int] = {}
        self._captured: dict[Any, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._failed = False
        device = next(network.parameters()).device
        for handle in handles:
            handle.to(device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = not torch.is_grad_enabled() or _get_current_dispatch_mode() is not None
        if self._failed or plain or not all(handle.repeatable for handle in self.handles):
            return self.network(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kind = (tree, tuple(map(_kind, leaves)), tuple(h.ratios(training=self.network.training) for h in self.handles))
        if kind not in self._captured:
            self._calls[kind] = self._calls.get(kind, 0) + 1
            if self._calls[kind] <= CALLS:
                return self.network(*args, **kwargs)
            try:
                self._captured[kind] = self._capture(leaves, tree, tensors)
            except RuntimeError as error:  # torch's own errors and those of CUDA are of this kind
                self._failed = True
                self._say(f"capturing a CUDA graph failed, so the run goes on without ({str(error).splitlines()[0]}).")
                return self.network(*args, **kwargs)
        graph = self._captured[kind]
        for handle, seen in zip(self.handles, graph.seen, strict=True):
            handle.recall(seen)
        return graph.run(*tensors)

    def _capture(self, leaves: list[Any], tree: pytree.TreeSpec, tensors: list[Tensor]) -> Captured:
        before = [handle.state_dict() for handle in self.handles]
        samples = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in tensors)
        torch.cuda.empty_cache()  # the graph has memory of its own, and needs what the steps before it used
        call = _Call(self.network, leaves, tree)
        try:
            run = torch.cuda.make_graphed_callables(
                call, samples, num_warmup_iters=1, allow_unused_input=True, pool=self._pool
            )
        finally:
            for handle, state in zip(self.handles, before, strict=True):
                handle.load_state_dict(state)  # making the graph ran the network several times
        return Captured(run, [handle.seen for handle in self.handles])


class _Call(nn.Module):
    """One call of a network as a function of its tensors alone."""

    def __init__(self, network: nn.Module, leaves: list[Any], tree: pytree.TreeSpec) -> None:
        super().__init__()
        self.network = network
        self._leaves, self._tree = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.train(network.training)

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return self.network(*args, **kwargs)


def _kind(leaf: Any) -> Any:
    """What must be the same for a graph to serve another call."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf
