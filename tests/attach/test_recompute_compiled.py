"""Recomputation of compiled layers, segments and models: gradients are those of the eager model."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tread
from tests.attach.forms import FORMS
from tests.attach.recomputing import (
    COMPILED,
    DEVICES,
    ROUTES,
    SOME,
    TWO,
    assert_same,
    backend,
    collected,
    compare,
    gradients,
)
from tests.tiny.toy import FAMILY, TOKENS, Arguments, Toy, inputs, plain

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


WAYS = [
    pytest.param(name, way, marks=[] if i % len(COMPILED) == j else [pytest.mark.contract])
    for i, name in enumerate(SOME)
    for j, way in enumerate(COMPILED)
]
"""Every form and every way to compile; `make contract` runs each with each."""


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_compiled_layers(name: str, way: str, device: str):
    """In any form. Compiled once for each of four lengths, with and without gradients, not once for each layer."""
    with torch._dynamo.config.patch(recompile_limit=12, fail_on_recompile_limit_hit=True):
        late = SOME.index(name) % 2 == 0
        compare(FORMS[name], wrap=COMPILED[way], late=late, exact=False, device=device, **TWO)
        compare(FORMS[name], wrap=COMPILED[way], late=late, exact=False, device=device, detached=True)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("way", COMPILED)
def test_attached_anew_before_the_backward(way: str):
    """The compiled code is routed by the second handle at that time, and the recomputation by the first."""
    reference, model = Toy(), Toy(form=FORMS["a layer, non-reentrant"])
    with tread.attach(reference, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        expected, _ = gradients(reference, handle)
    COMPILED[way](model)
    first = tread.attach(model, {"routes": ROUTES["inner"]}, family=FAMILY)
    first.set_step(3)
    arguments = inputs()
    output = model(**arguments)
    with tread.attach(model, {"routes": ROUTES["all"]}, family=FAMILY) as second:
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        assert_same(collected(model, [arguments]), expected, exact=False)
        model(**inputs())
        assert second.selections[0].shape == (2, TOKENS // 2)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "selector"),
    [
        *(("inside", "random"), ("around", "random"), ("around", "l1"), ("around, reentrant", "random")),
        *(pytest.param(name, "l1", marks=pytest.mark.contract) for name in ("inside", "around, reentrant")),
    ],
)
def test_a_model_compiled_whole(name: str, selector: str, device: str):
    """Checkpointed inside, and inside a checkpointed function, where it selects again for the step of its forward."""
    form = FORMS["a layer, non-reentrant"] if name == "inside" else plain
    compiled: dict[Toy, Any] = {}

    def call(model: Toy, arguments: dict[str, Tensor]) -> Tensor:
        run = compiled.setdefault(model, torch.compile(model, backend=backend(model)))
        if name == "inside":
            return run(**arguments)
        return checkpoint(run, *arguments.values(), use_reentrant="reentrant" in name)

    compare(form, call, exact=False, config={"selector": selector}, device=device, **TWO)


def _together(blocks: Any, *given: Any) -> Tensor:
    return plain(blocks, given)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("selector", ["l1", pytest.param("random", marks=pytest.mark.contract)])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_compiled_segments(reentrant: bool | None, selector: str):
    """Two layers compiled together; inside a checkpointed function they run as they are, and are exact."""
    compiled: dict[Any, Any] = {}

    def form(blocks: Any, arguments: Arguments) -> Tensor:
        x, *rest = arguments
        for i in range(0, len(blocks), 2):
            part = list(blocks[i : i + 2])
            if part[0] not in compiled:
                compiled[part[0]] = torch.compile(functools.partial(_together, part), backend="aot_eager")
            run = compiled[part[0]]
            x = run(x, *rest) if reentrant is None else checkpoint(run, x, *rest, use_reentrant=reentrant)
        return x

    compare(form, exact=False, config={"selector": selector}, **TWO)
