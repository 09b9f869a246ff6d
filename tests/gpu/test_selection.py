"""The same tokens on the CPU and on a GPU, eager and compiled.

- `random` ranks hashed integers: the same indices everywhere, always.
- `l1` ranks sums of float32, whose order of adding is the device's own choice. Promised is what rounding cannot change:
  equal indices where the sums are exact, ties included, and otherwise no other token than those whose norm is within
  rounding of the last kept one's.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan

ROUTE = {"selection_ratio": 0.4, "start_layer_idx": 0, "end_layer_idx": 1}
PLANS: dict[str, dict[str, Any]] = {
    "random": {},
    "l1": {"selector": "l1"},
    "l1 alone": {"selector": "l1", "importance": 1.0},
}
SHAPE = (3, 200, 64)

pytestmark = pytest.mark.filterwarnings("ignore")
plans = pytest.mark.parametrize("plan", PLANS)


def draw(plan: str, stream: Tensor, backend: str | None) -> list[Tensor]:
    """The selections of three steps, as a model inside compiled code would draw them."""
    handle = Handle(RoutePlan.from_config({"routes": [ROUTE], "seed": 5} | PLANS[plan]), depth=4)

    def forward(x: Tensor) -> Tensor:
        state = handle.begin(training=True)
        return state.exit(1, state.enter(0, x) + 1)

    run: Any = forward if backend is None else torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
    found = []
    for step in range(3):
        handle.set_step(step)
        run(stream)
        found.append(handle.selections[0].cpu())
    return found


def same_everywhere(plan: str, stream: Tensor, device: str, backend: str) -> None:
    expected = draw(plan, stream, None)
    if plan != "l1 alone":
        assert not expected[0].equal(expected[1])
    for found in (draw(plan, stream.to(device), None), draw(plan, stream.to(device), backend)):
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def whole_numbers() -> Tensor:
    """Norms are exact in float32, and many are equal."""
    return torch.randint(-3, 4, SHAPE, generator=torch.Generator().manual_seed(0)).float()


def only_near_ties_differ(device: str, backend: str) -> None:
    stream = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    stream[:, ::4] = stream[:, 1::4].flip(-1)  # pairs whose norms differ by rounding alone
    norms = stream.double().abs().sum(-1)  # (B, S)
    for one in (draw("l1 alone", stream, None)[0], draw("l1 alone", stream.to(device), backend)[0]):
        last = norms.sort(descending=True).values[:, one.shape[1] - 1 : one.shape[1]]  # (B, 1)
        kept = torch.zeros_like(norms, dtype=torch.bool).scatter(1, one, True)
        assert kept[norms > last * (1 + 1e-5)].all()
        assert not kept[norms < last * (1 - 1e-5)].any()


@plans
def test_selections(plan: str) -> None:
    same_everywhere(plan, whole_numbers(), "cpu", "aot_eager")


def test_near_ties() -> None:
    only_near_ties_differ("cpu", "aot_eager")


@pytest.mark.gpu
@plans
def test_selections_on_the_gpu(plan: str) -> None:
    same_everywhere(plan, whole_numbers(), "cuda", "inductor")


@pytest.mark.gpu
def test_near_ties_on_the_gpu() -> None:
    only_near_ties_differ("cuda", "inductor")
