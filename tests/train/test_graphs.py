"""What graphs decide on the host; that they compute the same is shown on a GPU (tests/gpu/test_graphs.py).

Capturing needs a GPU, so here a stand-in takes its place: a function of tensors alone that copies what it is given into
the tensors it was made with, as a graph does.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tread.models import DiT
from tread.train import graphs
from tread.train.graphs import CALLS, Graphs

ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}]}


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    made: list[nn.Module] = []

    def capture(call: nn.Module, samples: tuple[Tensor, ...], **_: Any) -> Callable[..., Any]:
        call(*samples)
        made.append(call)

        def replay(*given: Tensor) -> Any:
            for static, new in zip(samples, given, strict=True):
                static.copy_(new)
            return call(*samples)

        return replay

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return made


def make() -> tuple[DiT, Any, Graphs, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = DiT(input_size=4, patch=1, in_channels=1, depth=4, width=16, heads=2, num_classes=3).train()
    handle = model.route(ROUTES)
    given = torch.randn(2, 1, 4, 4), torch.rand(2), torch.tensor([0, 1])
    return model, handle, Graphs(model, [handle]), given


def test_a_call_is_captured_when_it_has_run_a_few_times(captures: list[nn.Module]) -> None:
    _, _, network, given = make()
    for call in range(CALLS + 3):
        assert len(captures) == (call > CALLS)
        network(*given)
    assert len(captures) == 1
    network(*(x[:1] for x in given))
    assert len(captures) == 1, "another shape is another kind of call"


def test_every_ratio_has_a_graph_and_its_selections(captures: list[nn.Module]) -> None:
    _, handle, network, given = make()
    for _ in range(CALLS + 1):
        network(*given)
        with handle.dense():
            network(*given)
    assert len(captures) == 2
    network(*given)
    assert handle.kept_share == 0.5
    with handle.dense():
        network(*given)
    assert handle.kept_share == 1
    network(*given)
    assert handle.kept_share == 0.5


def test_making_a_graph_does_not_move_the_step(captures: list[nn.Module]) -> None:
    _, handle, network, given = make()
    handle.set_step(7)
    for _ in range(CALLS):
        network(*given)
    network._capture(*_leaves(given))
    assert len(captures) == 1
    assert handle.state_dict() == {"step": 7, "micro_step": CALLS}


def _leaves(given: tuple[Tensor, ...]) -> tuple[list[Any], Any, list[Tensor]]:
    leaves, tree = graphs.pytree.tree_flatten((given, {}))
    return leaves, tree, list(given)


def test_what_no_graph_can_hold_runs_as_it_is(captures: list[nn.Module]) -> None:
    _, handle, network, given = make()
    mask = torch.zeros(2, 16, dtype=torch.bool)
    for _ in range(CALLS + 2):
        with torch.no_grad():
            network(*given)
        with handle.force_keep(mask):
            network(*given)
        with handle.routed(step=3):
            network(*given)
        with FlopCounterMode(display=False) as counter:
            network(*given)
        assert counter.get_total_flops() > 0
    assert not captures


def test_arguments_by_name_and_values_that_are_no_tensors(captures: list[nn.Module]) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, scale: float, flag: bool = True) -> Tensor:  # pyright: ignore
            return super().forward(x) * scale * (1 if flag else -1)

    network = Graphs(model := Scaled(4, 4), [])
    for scale in (1.0, 2.0):
        for i in range(CALLS + 3):
            x = torch.full((2, 4), float(i))
            assert network(x, scale=scale).equal(model(x, scale=scale))
    assert len(captures) == 2


def test_a_run_goes_on_where_capturing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    said: list[str] = []
    model = nn.Linear(4, 4)
    network = Graphs(model, [], said.append)
    for _ in range(CALLS + 3):
        x = torch.randn(2, 4)
        assert network(x).equal(model(x))
    assert said == [
        "capturing a CUDA graph failed, so the run goes on without (operation not permitted when stream is capturing)."
    ]
