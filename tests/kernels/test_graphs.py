"""What graphs decide on the host; that they compute the same is shown on a GPU (tests/gpu/test_graphs.py).

Capturing needs a GPU, so here a stand-in takes its place, which copies what it is given into tensors of its own, as a
graph does.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tread.kernels import graphs
from tread.kernels.graphs import CALLS, Graphs
from tread.models import DiT
from tread.routing.handle import Handle
from tread.training.optimizers.ema import EMA

ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}]}


class Stand:
    """In the place of `Capture`: runs the network on tensors of its own."""

    made: ClassVar[list["Stand"]] = []
    is_running, pool = False, (0, 1)

    def __init__(
        self,
        network: Callable[..., Any],
        trained: list[nn.Parameter],
        leaves: list[Any],
        tree: Any,
        *,
        shared: "Stand | None",
        beside: "Stand | None",
    ) -> None:
        self.network, self.trained, self.tree, self.shared, self.beside = network, trained, tree, shared, beside
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self({})
        self.made.append(self)

    def __call__(self, tensors: Any) -> Any:
        for mine, given in zip((leaf for leaf in self.leaves if isinstance(leaf, Tensor)), tensors, strict=False):
            mine.copy_(given)
        args, kwargs = graphs.pytree.tree_unflatten(self.leaves, self.tree)
        return self.network(*args, **kwargs)


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Stand]:
    monkeypatch.setattr(Stand, "made", [])
    monkeypatch.setattr(graphs, "Capture", Stand)
    return Stand.made


def make() -> tuple[DiT, Any, Graphs, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = DiT(input_size=4, patch=1, in_channels=1, depth=4, width=16, heads=2, num_classes=3).train()
    handle = model.route(ROUTES)
    given = torch.randn(2, 1, 4, 4), torch.rand(2), torch.tensor([0, 1])
    return model, handle, Graphs(model, [handle]), given


def test_a_call_is_captured_when_it_has_run_a_few_times(captures: list[Stand]) -> None:
    _, _, network, given = make()
    for call in range(CALLS + 3):
        assert len(captures) == (call > CALLS)
        network(*given)
    assert len(captures) == 1
    network(*(x[:1] for x in given))
    assert len(captures) == 1, "another shape is another kind of call"


def test_every_ratio_has_a_graph_and_its_selections(captures: list[Stand]) -> None:
    _, handle, network, given = make()
    for _ in range(CALLS + 1):
        network(*given)
        with handle.dense():
            network(*given)
    assert len(captures) == 2
    assert captures[1].shared is captures[0], "graphs share their memory"
    network(*given)
    assert handle.kept_share == 0.5
    with handle.dense():
        network(*given)
    assert handle.kept_share == 1
    network(*given)
    assert handle.kept_share == 0.5


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


Context = Callable[[nn.Module, Handle], AbstractContextManager[Any]]
OTHERS: dict[str, Context] = {
    "in eval mode": lambda model, _: evaluating(model),
    "under autocast": lambda *_: torch.autocast("cpu", torch.bfloat16),
    "under another autocast": lambda *_: torch.autocast("cpu", torch.float16),
    "routed, nothing dropped": lambda _, handle: handle.routed(0.0),
    "dense": lambda _, handle: handle.dense(),
}


def test_a_graph_serves_one_kind_of_call(captures: list[Stand]) -> None:
    model, handle, network, given = make()
    contexts: list[Context] = [lambda *_: nullcontext(), *OTHERS.values()]
    for _ in range(CALLS + 2):
        for context in contexts:
            with context(model, handle):
                network(*given)
    assert len(captures) == len(contexts)


def test_values_that_only_look_the_same_are_two_signatures(captures: list[Stand]) -> None:
    class Shown(nn.Linear):
        def forward(self, x: Tensor, value: object) -> Tensor:  # pyright: ignore
            return super().forward(x) * len(str(value))

    network = Graphs(model := Shown(4, 4), [])
    x = torch.randn(2, 4)
    for _ in range(CALLS + 2):
        for value in (1, 1.0, True):
            assert network(x, value).equal(model(x, value))
    assert len(captures) == 3


def test_a_graph_serves_one_dtype_and_one_buffer(captures: list[Stand]) -> None:
    """An input is copied into the graph's own, which would convert it, and a buffer is read where it was."""

    class Shifted(nn.PReLU):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
            return x * self.weight + self.shift

    network = Graphs(model := Shifted(), [])
    x = torch.randn(2, 4)
    for given in (x, x.double()):
        for _ in range(CALLS + 1):
            assert network(given).equal(model(given))
    assert len(captures) == 2
    model.shift = torch.ones(4)
    for _ in range(CALLS + 1):
        assert network(x).equal(model(x))
    assert len(captures) == 3


def test_weights_that_moved_are_captured_anew(captures: list[Stand]) -> None:
    model, _, network, given = make()

    def call() -> int:
        for _ in range(CALLS + 2):
            network(*given)
        return len(captures)

    assert call() == 1
    with EMA(model, decay=0.9, warmup=10).applied():
        pass
    assert call() == 1, "they are back where they were"
    model.final.linear.weight.data = model.final.linear.weight.data.clone()
    assert call() == 2
    assert network.count == 1, "what reads the old place is gone"
    model.final.linear.weight.requires_grad_(False)
    assert call() == 3, "others train"


def test_making_a_graph_does_not_move_the_step(captures: list[Stand]) -> None:
    _, handle, network, given = make()
    handle.set_step(7)
    for _ in range(CALLS):
        network(*given)
    network._capture(network.network, *graphs.pytree.tree_flatten((given, {})))
    assert len(captures) == 1
    assert handle.state_dict() == {"step": 7, "micro_step": CALLS}


def test_what_no_graph_can_hold_runs_as_it_is(captures: list[Stand]) -> None:
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
        network(given[0].clone().requires_grad_(), *given[1:])
    assert not captures


def test_inputs_elsewhere_and_objects_run_as_they_are(captures: list[Stand]) -> None:
    class Takes(nn.Linear):
        def forward(self, x: Tensor, _: object = None) -> Tensor:  # pyright: ignore
            return super().forward(x)

    network, x = Graphs(Takes(4, 4), []), torch.randn(2, 4)
    for _ in range(CALLS + 2):
        network(x, {"no": {"hash"}})
    network._device = torch.device("meta")  # the network's, where x is not
    for _ in range(CALLS + 2):
        network(x)
    assert not captures


def test_a_forward_beside_another_runs_as_it_is(captures: list[Stand], monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, network, given = make()
    for _ in range(CALLS + 1):
        network(*given)
    calls: list[Any] = []
    monkeypatch.setattr(Stand, "__call__", lambda self, tensors: calls.append(tensors))
    network(*given)
    assert len(calls) == 1
    captures[0].is_running = True
    network(*given)
    assert len(calls) == 1


def test_arguments_by_name_and_values_that_are_no_tensors(captures: list[Stand]) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, scale: float, flag: bool = True) -> Tensor:  # pyright: ignore
            return super().forward(x) * scale * (1 if flag else -1)

    network = Graphs(model := Scaled(4, 4), [])
    for scale in (1.0, 2.0):
        for i in range(CALLS + 3):
            x = torch.full((2, 4), float(i))
            assert network(x, scale=scale).equal(model(x, scale=scale))
    assert len(captures) == 2


class Adapted(nn.Linear):
    """Has the plain attributes of an adapter, as peft's layers do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scaling, self._active_adapter, self.merged_adapters = {"one": 1.0}, ["one"], []

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(x) * self.scaling["one"] * (2 if "two" in self._active_adapter else 1)


def test_an_adapter_that_changes_is_captured_anew(captures: list[Stand]) -> None:
    network, x = Graphs(model := Adapted(), []), torch.randn(2, 4)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: model.scaling.update(one=0.5),
        lambda: model._active_adapter.append("two"),
        lambda: model.add_module("another", nn.Linear(1, 1)),
    ]
    for count, change in enumerate(changes, 1):
        change()
        for _ in range(CALLS + 2):
            assert network(x).equal(model(x))
        assert len(captures) == count


def test_the_number_of_graphs_is_bounded(captures: list[Stand], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    monkeypatch.setattr(graphs, "COUNTED", 5)
    said: list[str] = []
    network = Graphs(nn.Linear(4, 4), [], said.append)
    for _ in range(CALLS + 2):
        for size in range(1, 5):
            network(torch.randn(size, 4))
    assert len(captures) == 2
    assert said == ["there are CUDA graphs for 2 call signatures; further ones run without."]
    for size in range(5, 50):
        network(torch.randn(size, 4))
    assert len(network._calls) <= 5


def test_released_memory_is_taken_again_at_once(captures: list[Stand]) -> None:
    network, x = Graphs(nn.Linear(4, 4), []), torch.randn(2, 4)
    for _ in range(CALLS + 1):
        network(x)
    network.release()
    assert not network.count
    network(x)
    assert len(captures) == 2


def test_several_processes_have_no_graphs(captures: list[Stand], monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = Graphs(nn.Linear(4, 4), []), torch.randn(2, 4)
    monkeypatch.setattr(graphs, "is_distributed", lambda: True)
    for _ in range(CALLS + 2):
        network(x)
    assert not captures


def test_selections_after_a_replay_are_copies(captures: list[Stand]) -> None:
    _, handle, network, given = make()
    for _ in range(CALLS + 1):
        network(*given)
    ((_, seen),) = network._captured.values()
    assert handle.selections[0].equal(seen[0].selections[0])
    assert handle.selections[0].data_ptr() != seen[0].selections[0].data_ptr()
