"""The autograd function around a recording; that a replay computes the same is shown on a GPU (tests/gpu)."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tread.kernels import capture as capturing
from tread.kernels.capture import Capture, forget_accumulators


class Replayed:
    """A graph that holds nothing: its memory is what the recording left."""

    def replay(self) -> None: ...


@pytest.fixture
def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network is recorded by running it on the CPU."""
    for name in ("synchronize", "empty_cache", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(capturing, "_put_back", nullcontext)


class Weighted(nn.Module):
    """Returns a product with its weight, and something that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.weight * x, x[:2]]


@pytest.mark.usefixtures("without_a_device")
def test_a_forward_waits_for_its_backward_or_its_end() -> None:
    leaves, tree = pytree.tree_flatten(((torch.full((3,), 2.0),), {}))
    model = Weighted()
    weight = model.weight
    capture = Capture(model, [weight], leaves, tree)
    assert capture.gradients[0] is not None
    capture.gradients[0].fill_(2.0)  # as a replay leaves it
    answer, constant = capture(leaves)
    assert capture.is_running
    assert answer.tolist() == [2, 2, 2]
    assert answer.requires_grad
    assert not constant.requires_grad
    answer.sum().backward()
    assert not capture.is_running
    with pytest.raises(RuntimeError, match="backward ran twice on a CUDA-graph forward"):
        answer.sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() != capture.gradients[0].data_ptr(), "the next backward would write over it"
    assert weight.grad.tolist() == [2, 2, 2]
    assert capture._given[0].tolist() == [1, 1, 1]
    answer = capture(leaves)[0]
    assert capture.is_running
    del answer, constant
    assert not capture.is_running, "nobody can ask for its backward any more"


@pytest.mark.usefixtures("without_a_device")
def test_plain_values_among_the_outputs_are_those_of_the_capture() -> None:
    """As Cosmos 3 returns None for a sound that was not asked for."""

    class Beside(Weighted):
        def forward(self, x: Tensor) -> Any:
            product, constant = super().forward(x)
            return None, {"product": product, "size": len(x)}, constant

    leaves, tree = pytree.tree_flatten(((torch.full((3,), 2.0),), {}))
    model = Beside()
    capture = Capture(model, [model.weight], leaves, tree)
    for _ in range(2):
        first, second, third = capture(leaves)
        assert first is None
        assert second["size"] == 3
        assert second["product"].tolist() == [2, 2, 2]
        assert third.tolist() == [2, 2]
        second["product"].sum().backward()
    with pytest.raises(RuntimeError, match="returns more than tensors and plain values: Beside"):
        Capture(lambda x: (x * model.weight, model), [model.weight], leaves, tree)


def test_graphs_share_the_places_of_their_gradients() -> None:
    place, mine = torch.zeros(3), torch.ones(3)
    found = capturing._moved([mine, mine, None], [place, None, place])
    assert found[0] is place
    assert place.tolist() == [1, 1, 1]
    assert found[1] is mine
    assert found[2] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulators_are_made_anew(dtype: torch.dtype) -> None:
    """An earlier loss holds the old ones, and can still be differentiated."""
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    place, loss = parameter.data_ptr(), (parameter * 2).sum()

    def accumulator() -> object:
        return torch.autograd.graph.get_gradient_edge(parameter).node

    before = accumulator()
    assert accumulator() is before, "while something holds it"
    forget_accumulators([parameter])
    assert accumulator() is not before
    assert (parameter.data_ptr(), parameter.dtype) == (place, dtype)
    (loss + parameter.sum()).backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3, 3, 3]
