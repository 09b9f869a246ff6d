"""Whatever recomputes: routed gradients are those of the same model without checkpointing, and those of the oracle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import DEPTH, FAMILY, FORMS, TOKENS, WRAPPED, Form, Toy, by_hand, inputs, plain, whole
from selected import route
from torch import Tensor

import tread

pytestmark = pytest.mark.filterwarnings("ignore")

ROUTES: dict[str, list[dict[str, Any]]] = {
    "inner": [route(1, 4)],
    "all": [route(0, -1)],
    "several": [route(0, 1, 0.25), route(2, 3, 0.6), route(5, 5)],
}
Gradients = dict[str, Tensor]
Call = Callable[[Toy, dict[str, Tensor]], Tensor]


def gradients(
    model: Toy,
    handle: tread.Attachment,
    call: Call,
    *,
    forwards: int = 1,
    moves: bool = False,
    mask: Tensor | None = None,
) -> tuple[Gradients, list[list[Tensor]]]:
    """Gradients of parameters and inputs after `forwards` forwards and one backward, and each forward's selections.

    With `moves`, the step has moved on before the backward.
    """
    model.zero_grad()
    handle.set_step(3)
    given = [inputs(seed=i) for i in range(forwards)]
    loss, selections = torch.zeros(()), []
    for i, arguments in enumerate(given):
        if mask is None:
            output = call(model, arguments)
        else:
            with handle.force_keep(mask):
                output = call(model, arguments)
        loss = loss + (i + 1) * (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        selections.append(handle.selections)
    if moves:
        handle.set_step(9)
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    named = {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in found.items()}
    return named | {f"input {i}": one["x"].grad for i, one in enumerate(given) if one["x"].grad is not None}, selections


def assert_same(got: Gradients, expected: Gradients, *, exact: bool) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if exact:
            assert got[name].equal(value), f"{name}: {(got[name] - value).norm() / value.norm():.1e}"
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)


def direct(model: Toy, arguments: dict[str, Tensor]) -> Tensor:
    return model(**arguments)


def compare(
    form: Form = plain,
    call: Call = direct,
    *,
    routes: str = "inner",
    exact: bool = True,
    wrap: Callable[[Toy], Toy] = lambda model: model,
    config: dict[str, Any] | None = None,
    joined: bool = True,
    shared: bool = False,
    late: bool = False,
    detached: bool = False,
    **options: Any,
) -> None:
    config = {"routes": ROUTES[routes], **(config or {})}
    reference = Toy(joined=joined, shared=shared)
    if form is not plain and "sequential" in getattr(form, "__name__", str(form)):
        reference.form = form  # its closures capture tensors, which have no gradient in reentrant checkpointing
    with tread.attach(reference, config, family=FAMILY) as handle:
        expected, selections = gradients(reference, handle, direct, **options)
    model = Toy(joined=joined, shared=shared, form=form)
    if not late:
        wrap(model)
    with tread.attach(model, config, family=FAMILY) as handle:
        if late:
            wrap(model)
        got, selected = gradients(model, handle, call, **options)
    assert all(a.equal(b) for x, y in zip(selections, selected, strict=True) for a, b in zip(x, y, strict=True))
    assert_same(got, expected, exact=exact)


def is_exact(name: str) -> bool:
    """Reentrant checkpointing adds gradients of what several layers use in another order, and what is offloaded comes
    back contiguous, which other kernels multiply."""
    return "reentrant" not in name.replace("non-reentrant", "") and name != "offload_wrapper"


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, routes: str):
    for selector in ("random", "l1"):
        for options in ({}, {"forwards": 2, "moves": True}):
            compare(FORMS[name], routes=routes, exact=is_exact(name), config={"selector": selector}, **options)


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("late", [False, True], ids=["attached after", "attached before"])
@pytest.mark.parametrize("name", WRAPPED)
def test_every_wrapper(name: str, late: bool, routes: str):
    for options in ({}, {"forwards": 2, "moves": True}):
        compare(wrap=WRAPPED[name], late=late, routes=routes, exact=is_exact(name), **options)
