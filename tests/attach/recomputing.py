"""What the tests of recomputation share: routes, the gradients of a few forwards, and the comparison of two models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tread
from tests.attach.forms import Call
from tests.attach.selected import route
from tests.tiny.toy import FAMILY, Form, Toy, inputs, plain

ROUTES: dict[str, list[dict[str, Any]]] = {
    "inner": [route(1, 4)],
    "all": [route(0, -1)],
    "several": [route(0, 1, 0.25), route(2, 3, 0.6), route(5, 5)],
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Gradients = dict[str, Tensor]


def direct(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    return model(**arguments)


def gradients(
    model: Toy,
    handle: tread.Attachment,
    call: Call = direct,
    *,
    forwards: int = 1,
    moves: bool = False,
    mask: Tensor | None = None,
    detached: bool = False,
) -> tuple[Gradients, list[list[Tensor]]]:
    """Gradients of parameters and inputs after `forwards` forwards and one backward, and each forward's selections.

    With `moves` the step has moved on before the backward, with `detached` the handle is gone by then.
    """
    device = model.table.device
    model.zero_grad()
    handle.set_step(3)
    arguments = [inputs(seed=i, device=device) for i in range(forwards)]
    loss, selections = torch.zeros((), device=device), []
    for i, one in enumerate(arguments):
        if mask is None:
            output = call(model, one)
        else:
            with handle.force_keep(mask):
                output = call(model, one)
        weight = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
        loss = loss + (i + 1) * (output * weight).sum()
        selections.append(handle.selections)
    if moves:
        handle.set_step(9)
    if detached:
        handle.detach()
    loss.backward()
    return collected(model, arguments), selections


def collected(model: Toy, arguments: list[dict[str, Tensor]]) -> Gradients:
    """Gradients by the names that parameters have without wrappers."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        found = {name.replace(wrapper, ""): grad for name, grad in found.items()}
    return found | {f"x{i}": one["x"].grad for i, one in enumerate(arguments) if one["x"].grad is not None}


def assert_same(got: Gradients, expected: Gradients, *, exact: bool) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = float((got[name] - value).norm() / value.norm())
        assert got[name].equal(value) if exact else error < 2e-6, f"{name} is wrong by {error:.1e}"


def compare(
    form: Form = plain,
    call: Call = direct,
    *,
    exact: bool = True,
    wrap: Callable[[Toy], Any] = lambda model: None,
    late: bool = False,
    routes: str = "inner",
    config: dict[str, Any] | None = None,
    shared: bool = False,
    reference_form: Form = plain,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Checkpointed by `form`, `call` or `wrap`, gradients are the plain model's; `late` wraps after attaching."""
    config = {"routes": ROUTES[routes], **(config or {})}
    reference = Toy(shared=shared, form=reference_form).to(device)
    with tread.attach(reference, config, family=FAMILY) as handle:
        expected, selections = gradients(reference, handle, **options)
    model = Toy(shared=shared, form=form).to(device)
    if not late:
        wrap(model)
    with tread.attach(model, config, family=FAMILY) as handle:
        if late:
            wrap(model)
        got, selected = gradients(model, handle, call, **options)
    for one, other in zip(selections, selected, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    assert_same(got, expected, exact=exact and device == "cpu")


def is_exact(name: str) -> bool:
    """Reentrant checkpointing adds gradients of what several layers use in another order, and what is offloaded comes
    back contiguous, which other kernels multiply."""
    return "reentrant" not in name.replace("non-reentrant", "") and name != "offload_wrapper"


TWO: dict[str, Any] = {"forwards": 2, "moves": True}


SOME = [
    "a layer, non-reentrant",
    "a layer, reentrant",
    "every other layer, reentrant",
    "two layers, reentrant",
    "halves, non-reentrant",
    "reentrant halves in which layers are reentrant",
    "pointwise results are saved",
]
some_forms = pytest.mark.parametrize("name", SOME)


COMPILED: dict[str, Callable[[Toy], None]] = {}


def _compiles(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(compile_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(model: Toy) -> None:
            for stack in (model.first, model.second):
                for i, block in enumerate(stack):
                    if (made := compile_one(block)) is not None:
                        stack[i] = made

        COMPILED[name] = run
        return compile_one

    return add


BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}


def backend(block: Any) -> str:
    """The compiler for a module, by the device it is on."""
    return BACKENDS[next(block.parameters()).device.type]


@_compiles("block.compile()")
def _in_place(block: Any) -> None:
    block.compile(backend=backend(block), dynamic=False)


@_compiles("block.forward = torch.compile(block.forward)")
def _its_forward(block: Any) -> None:
    block.forward = torch.compile(block.forward, backend=backend(block), dynamic=False)


@_compiles("torch.compile(block)")
def _replaced(block: Any) -> Any:
    return torch.compile(block, backend=backend(block), dynamic=False)
