"""`checkpointing="dense"`: recomputed are the steps that drop less than the plan says, and gradients stay the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tread
from tests.attach.attached import FLUX, Attach
from tests.attach.steps import DEVICES, adapted, assert_same, inputs_of, options, step
from tread.kernels.checkpointing import Checkpointing, checkpoint_layers, recomputing
from tread.kernels.graphs import CALLS
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan

pytestmark = pytest.mark.filterwarnings("ignore")
SCHEDULE = {"warmup_steps": 4, "levels": 2, "cooldown_fraction": 0.25, "total_steps": 12}
PLAN = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}], "schedule": SCHEDULE}
DENSE, HALF, FULL, COOL = 0, 2, 6, 11
"""Steps of the schedule: without routing, at half of the ratio, at all of it, without routing again."""


@pytest.fixture(autouse=True)
def fresh(attach: Attach) -> Iterator[None]:
    """Everything is detached, and then nothing is compiled any more."""
    yield
    torch._dynamo.reset()


def test_when_a_handle_is_at_its_full_ratio() -> None:
    handle = Handle(RoutePlan.from_config(PLAN), depth=8)
    found = []
    for number in (DENSE, HALF, FULL, COOL):
        handle.set_step(number)
        found.append(handle.at_full_ratio)
    assert found == [False, False, True, False]
    handle.set_step(FULL)
    with handle.dense():
        assert not handle.at_full_ratio
    with handle.routed(0.25):
        assert not handle.at_full_ratio
    with torch.no_grad():
        assert not handle.at_full_ratio


def by_the_model(model: Any, how: Checkpointing) -> None:
    model.enable_gradient_checkpointing(recomputing(how))


def by_the_layers(model: Any, how: Checkpointing) -> None:
    checkpoint_layers([*model.transformer_blocks, *model.single_transformer_blocks], how)


@pytest.mark.parametrize("switch_on", [by_the_model, by_the_layers])
def test_eager_layers_are_recomputed_where_less_is_dropped(
    switch_on: Callable[[nn.Module, Checkpointing], None], attach: Attach
) -> None:
    plain, model, inputs = adapted(FLUX), adapted(FLUX), inputs_of(FLUX, "cpu")
    switch_on(model, "dense")
    handles = [attach(one, PLAN) for one in (plain, model)]
    norms = [block.norm for block in model.single_transformer_blocks]
    runs: list[int] = []
    for number, norm in enumerate(norms):
        norm.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    for number, times in ((DENSE, 2), (HALF, 2), (FULL, 1), (COOL, 2)):
        runs.clear()
        expected, found = (
            step(FLUX, one, handle, inputs, number) for one, handle in zip((plain, model), handles, strict=True)
        )
        assert_same(found, expected, 1e-6)
        assert sorted(runs) == sorted([*range(len(norms))] * times)


def saved_by(model: nn.Module, handle: tread.Attachment, inputs: dict[str, Any], number: int) -> int:
    """Numbers that a forward of a step keeps for its backward, each tensor once and without the weights."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    handle.set_step(number)

    def keep(x: Tensor) -> Tensor:
        if x.data_ptr() not in weights:
            sizes[x.data_ptr()] = max(x.numel(), sizes.get(x.data_ptr(), 0))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        prediction = FLUX.call(model, inputs)
    prediction.sum().backward()
    return sum(sizes.values())


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_layers_save_what_each_step_can_afford(device: str, attach: Attach) -> None:
    """At the full ratio what layers without checkpointing save, else what checkpointed ones do."""
    inputs, found = inputs_of(FLUX, device), {}
    hows: tuple[Checkpointing, ...] = (False, True, "dense")
    for how in hows:
        model = adapted(FLUX, device)
        handle = attach(model, PLAN).compile(checkpointing=how, graphs=False, **options(device))
        found[how] = [saved_by(model, handle, inputs, number) for number in (DENSE, HALF, FULL, COOL)]
        assert handle.fast is not None
        assert not handle.fast.failed
        handle.detach()
    for checkpointed, plain in zip(found[True], found[False], strict=True):
        assert checkpointed < plain
    assert found["dense"] == [*found[True][:2], found[False][2], found[True][3]]


@pytest.mark.gpu
def test_graphs_hold_both_sorts_of_steps(attach: Attach) -> None:
    """A pair for dense steps, one for the half and one for the full ratio, with the gradients of eager code."""
    model, inputs = adapted(FLUX, "cuda"), inputs_of(FLUX, "cuda")
    handle = attach(model, PLAN)
    numbers = [DENSE, HALF, FULL, COOL]
    expected = {number: step(FLUX, model, handle, inputs, number) for number in numbers}
    handle.compile(checkpointing="dense", **options("cuda"))
    for number in numbers * (CALLS + 2):
        assert_same(step(FLUX, model, handle, inputs, number), expected[number], 2e-3)
    assert handle.fast is not None
    assert handle.fast.graphs is not None
    assert not handle.fast.failed
    assert handle.fast.graphs.count == 3


def test_a_model_that_is_not_attached_is_dense() -> None:
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    model.enable_gradient_checkpointing(recomputing("dense"))
    runs: list[None] = []
    model.transformer_blocks[0].norm1.register_forward_pre_hook(lambda *_: runs.append(None))
    FLUX.call(model, inputs).sum().backward()
    assert len(runs) == 2
