"""A capture that fails: the run goes on without graphs, and nothing of the attempt is left."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.kernels.test_graphs import Stand, captures
from tread.kernels import graphs
from tread.kernels.graphs import CALLS, Graphs

__all__ = ["captures"]


def test_a_run_goes_on_where_capturing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs, "Capture", refuse)
    said: list[str] = []
    model = nn.Linear(4, 4)
    network = Graphs(model, [], said.append)
    for _ in range(CALLS + 3):
        x = torch.randn(2, 4)
        assert network(x).equal(model(x))
    assert said == [
        "CUDA graph capture failed; continuing without graphs (operation not permitted when stream is capturing)."
    ]


@pytest.mark.parametrize("spoiled", [False, True])
def test_models_share_a_pool_unless_a_capture_failed_in_it(
    spoiled: bool, captures: list[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "SPOILED", {Stand.pool} if spoiled else set())
    x, networks = torch.randn(2, 4), [Graphs(nn.Linear(4, 4), []) for _ in range(2)]
    for network in networks:
        for _ in range(CALLS + 1):
            network(x)
    assert len(captures) == 2
    assert (captures[1].beside is None) == spoiled


def test_a_failed_capture_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other graphs, no weights that autocast cast while recording, which computes nothing, and none of the memory
    that the next forward needs."""
    model = nn.Linear(4, 4)
    network = Graphs(model, [], lambda _: None)
    x = torch.randn(2, 4)
    recorded: list[weakref.ref[Tensor]] = []

    def fail(_: Stand, network: nn.Module, *__: Any, **___: Any) -> None:
        weight = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        out = network(x)
        with torch.no_grad():
            model.weight.copy_(weight)
        recorded.append(weakref.ref(out))
        raise RuntimeError("out of memory")

    def forward(x: Tensor) -> Tensor:
        if recorded:
            assert recorded[0]() is None
        return nn.functional.linear(x, model.weight, model.bias)

    for _ in range(CALLS + 1):
        network(x)
    assert network.count
    monkeypatch.setattr(Stand, "__init__", fail)
    monkeypatch.setattr(model, "forward", forward)
    gc.disable()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    for _ in range(CALLS + 1):
        with torch.autocast("cpu", torch.bfloat16):
            assert network(x).equal(expected)
    gc.enable()
    assert network.failed
    assert not network.count


class Checkpointed(nn.Linear):
    """Is recomputed in the backward pass, and can be told to fail halfway."""

    error: RuntimeError | None = None

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return checkpoint(self._twice, x, use_reentrant=False, context_fn=contexts)  # pyright: ignore

    def _twice(self, x: Tensor) -> Tensor:
        x = super().forward(x).relu()
        if self.error is not None:
            raise self.error
        return super().forward(x).tanh()


def test_a_capture_that_fails_in_a_checkpointed_layer_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch before 2.13 stay as long as somebody has the error, here the layer."""
    model, x = Checkpointed(4, 4), torch.randn(2, 4)

    def fail(network: nn.Module, *_: Any, **__: Any) -> None:
        model.error = RuntimeError("operation not permitted when stream is capturing")
        kept.append(model.error)
        try:
            network(x)
        finally:
            model.error = None

    kept: list[RuntimeError] = []
    monkeypatch.setattr(graphs, "Capture", fail)
    network, gradients = Graphs(model, [], lambda _: None), []
    for _ in range(CALLS + 2):
        (gradient,) = torch.autograd.grad(network(x).sum(), [model.weight])
        gradients.append(gradient)
    assert kept
    assert all(gradient.equal(gradients[0]) for gradient in gradients)
