"""Random nestings of checkpointing, compiling, routes and forwards: gradients are the oracle's."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tread
from tests.attach.forms import WHOLE, segments
from tests.attach.recomputing import COMPILED, Gradients, collected, direct, gradients
from tests.attach.selected import route
from tests.tiny.toy import DEPTH, FAMILY, TOKENS, Arguments, Form, Toy, by_hand, inputs, plain

pytestmark = pytest.mark.filterwarnings("ignore")


@st.composite
def nestings(draw: st.DrawFn, depth: int = 0) -> Form:
    """A random way to run layers: segments of some size, checkpointed or not, and inside them the same again."""
    if depth == 3 or draw(st.booleans()):
        return plain
    size, reentrant = draw(st.integers(1, 3)), draw(st.sampled_from([True, False, None]))
    inner = draw(nestings(depth=depth + 1))
    if reentrant is None:

        def form(blocks: Any, arguments: Arguments) -> Tensor:
            x, *rest = arguments
            for i in range(0, len(blocks), size):
                x = inner(blocks[i : i + size], (x, *rest))  # pyright: ignore[reportArgumentType]
            return x

        return form
    return segments(size, reentrant=reentrant, inner=inner)


@st.composite
def route_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Disjoint routes in ascending order."""
    borders = sorted(draw(st.sets(st.integers(0, DEPTH - 1), min_size=1, max_size=4)))
    starts, ends = borders[::2], [*borders[1::2], DEPTH - 1][: len(borders[::2])]
    return [route(a, b, draw(st.sampled_from([0.25, 0.5, 0.75]))) for a, b in zip(starts, ends, strict=True)]


FEW, EXAMPLES = 50, 150
"""In `make test`, and in `make contract` and on a GPU."""
ANY: dict[str, Any] = {
    "form": nestings(),
    "around": st.sampled_from([None, *WHOLE]),
    "routes": route_lists(),
    "selector": st.sampled_from(["random", "l1"]),
    "shared": st.booleans(),
    "forwards": st.integers(1, 3),
    "compiled": st.sampled_from([*[None] * 40, *COMPILED]),
}


@pytest.mark.parametrize("examples", [FEW, pytest.param(EXAMPLES, marks=pytest.mark.contract)])
def test_random_nestings_equal_the_oracle(examples: int):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(**ANY)
    def draw(**drawn: Any) -> None:
        against_the_oracle(**drawn, device="cpu")

    draw()


@pytest.mark.gpu
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(**ANY | {"compiled": st.none()})
def test_random_nestings_equal_the_oracle_on_a_gpu(**drawn: Any):
    against_the_oracle(**drawn, device="cuda")


def against_the_oracle(
    form: Form,
    around: str | None,
    routes: list[dict[str, Any]],
    selector: str,
    shared: bool,
    forwards: int,
    compiled: str | None,
    device: str,
) -> None:
    model = Toy(shared=shared, form=form).to(device)
    if compiled is not None:
        torch._dynamo.reset()
        COMPILED[compiled](model)
    call = direct if around is None else WHOLE[around]
    with tread.attach(model, {"routes": routes, "selector": selector}, family=FAMILY) as handle:
        got, selections = gradients(model, handle, call, forwards=forwards, moves=True)
    expected = oracle(Toy(shared=shared).to(device), routes, selections)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


def oracle(model: Toy, routes: list[dict[str, Any]], selections: list[list[Tensor]]) -> Gradients:
    """The gradients of `gradients` by hand."""
    device = model.table.device
    arguments = [inputs(seed=i, device=device) for i in range(len(selections))]
    loss = torch.zeros((), device=device)
    for i, (one, ids) in enumerate(zip(arguments, selections, strict=True)):
        kept = [torch.zeros(2, TOKENS, dtype=torch.bool, device=device).scatter(1, rows, True) for rows in ids]
        windows = [(r["start_layer_idx"], r["end_layer_idx"], k) for r, k in zip(routes, kept, strict=True)]
        output = by_hand(model, one, windows)
        weight = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
        loss = loss + (i + 1) * (output * weight).sum()
    loss.backward()
    return collected(model, arguments)
