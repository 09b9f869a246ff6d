"""A family that does not describe its model is refused by name; every stock family describes its own."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tread
from tests.tiny.case import Case
from tests.tiny.stock import CASES
from tread.attach.checks import argument_names, check_family
from tread.attach.registry import family_of
from tread.attach.wrappers import unwrapped

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def forward(self, x: Tensor, cond: Tensor, rope: Tensor | None = None, joint: dict[str, Any] | None = None):
        return x


class Open(nn.Module):
    """A layer that takes any name."""

    def forward(self, x: Tensor, **kwargs: Any):
        return x


class Mine(nn.Module):
    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(layer() for _ in range(2))
        self.blocks = nn.ModuleList(layer() for _ in range(3))
        self.empty, self.head = nn.ModuleList(), nn.Linear(2, 2)
        self.named = nn.ModuleDict({"a": layer()})

    def forward(self, image: Tensor, control: Tensor | None = None) -> Tensor:
        return image


STACK = tread.Stack(name="blocks", stream="x", sides=(tread.Side(name="rope", dim=1),))
FAMILY = tread.Family(models=("Mine",), stacks=(STACK,), residuals=("control",))


def stack(**changes: Any) -> Callable[[], tread.Family]:
    return lambda: replace(FAMILY, stacks=(replace(STACK, **changes),))


def side(**changes: Any) -> Callable[[], tread.Family]:
    return stack(sides=(replace(STACK.sides[0], **changes),))


def family(**changes: Any) -> Callable[[], tread.Family]:
    return lambda: replace(FAMILY, **changes)


LISTS = "Its lists of layers: inner.layers, blocks, empty."
MUST = "it must be a list of layers, such as nn.ModuleList. The model's lists of layers: inner.layers, blocks, empty."
TAKE = "They take: x, cond, rope, joint."
WRONG: dict[str, tuple[Callable[[], tread.Family], str]] = {
    "another class": (
        family(models=("Yours", "Theirs")),
        "this family is for Yours, Theirs, and the model is a Mine. Declare it with Family(models=('Mine',), ...).",
    ),
    "no stacks": (family(stacks=()), "the family of Mine has no stacks: give at least one tread.Stack(name=...)."),
    "a part that is not there": (
        family(parts=("inner.layers", "inner.norm")),
        "Mine has no 'inner.norm', which a model of this family has.",
    ),
    "a stack that is not there": (
        stack(name="block"),
        f"Stack(name='block'): Mine has no such attribute. Did you mean 'blocks'? {LISTS}",
    ),
    "a nested stack that is not there": (
        stack(name="inner.blocks"),
        f"Stack(name='inner.blocks'): Mine has no such attribute. Did you mean 'inner.layers'? {LISTS}",
    ),
    "an empty stack": (stack(name="empty"), f"Stack(name='empty'): Mine.empty is an empty list; {MUST}"),
    "a stack that is a module": (stack(name="head"), f"Stack(name='head'): Mine.head is a Linear; {MUST}"),
    "a stack of names": (stack(name="named"), f"Stack(name='named'): Mine.named is a ModuleDict; {MUST}"),
    "a stream no layer takes": (
        stack(stream="hidden_states"),
        "Stack(stream='hidden_states'): layer 0 (Layer) takes no 'hidden_states'. It takes: x, cond, rope, joint.",
    ),
    "a side no layer takes": (
        side(name="ropes"),
        f"Side(name='ropes'): no layer in 'blocks' takes 'ropes'. Did you mean 'rope'? {TAKE}",
    ),
    "an entry of a mapping no layer takes": (
        side(name="kwargs.mask"),
        f"Side(name='kwargs.mask'): no layer in 'blocks' takes 'kwargs'. {TAKE}",
    ),
    "tokens after what no layer takes": (
        side(after="text"),
        f"Side(after='text'): no layer in 'blocks' takes 'text'. {TAKE}",
    ),
    "a negative axis": (side(dim=-2), "Side(name='rope') has dim=-2; count the token axis from the front, from 0."),
    "a full side without an axis": (
        side(dim=0, full=True),
        "Side(name='rope') is full, so dim=0 must be the token axis of what is rotated, 1 or more, and its name that "
        "of an argument.",
    ),
    "a count no layer takes": (
        stack(counts=("lengths",)),
        f"Stack(counts=('lengths',)): no layer in 'blocks' takes 'lengths'. {TAKE}",
    ),
    "an axis that is no stream's": (
        stack(dim=2),
        "Stack(name='blocks') has dim=2; a stream's token axis is 1, or 0 before the batch.",
    ),
    "a negative index": (
        stack(returns=-1),
        "Stack(name='blocks') has returns=-1; count the stream's index in what a layer returns from 0.",
    ),
    "residuals the model does not take": (
        family(residuals=("controls",)),
        "Family(residuals=('controls',)): Mine.forward takes no 'controls'. Did you mean 'control'? It takes: image, "
        "control.",
    ),
    "inputs the model does not take": (
        family(inputs=("image", "latents")),
        "Family(inputs=('image', 'latents')): Mine.forward takes no 'latents'. It takes: image, control.",
    ),
    "references without tokens": (
        family(references=lambda model, arguments: 1),
        "the family of Mine has references but no tokens: give Family(tokens=...) too.",
    ),
    "a rotary function that is not there": (
        family(rotary=(tread.Rotary(function="math.turn", axis=1),)),
        "Rotary(function='math.turn'): there is no such function, so the layers of Mine rotate by another. Name the "
        "module that looks it up, and the function.",
    ),
    "a rotary function without a module": (
        family(rotary=(tread.Rotary(function="turn", axis=1),)),
        "Rotary(function='turn'): there is no such function, so the layers of Mine rotate by another. Name the module "
        "that looks it up, and the function.",
    ),
    "a rotary function of what is not there": (
        family(rotary=(tread.Rotary(function="turn", of="blocks.0.attn", axis=1),)),
        "Rotary(of='blocks.0.attn'): Mine has no such submodule.",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_family_is_refused_by_name(wrong: str):
    check_family(Mine(), FAMILY)
    declare, message = WRONG[wrong]
    with pytest.raises(tread.ConfigError, match=f"^{re.escape(message)}$"):
        tread.attach(
            Mine(), {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -1}]}, family=declare()
        )


def test_a_side_may_be_optional_and_a_layer_may_take_any_name():
    check_family(Mine(), side(name="mask", optional=True)())
    check_family(Mine(Open), side(name="whatever")())
    check_family(Mine(Open), stack(stream="anything", counts=("lengths",))())


def test_one_layer_that_takes_a_side_is_enough_but_all_take_the_stream():
    model = Mine()
    model.blocks[1] = nn.Linear(2, 2)
    with pytest.raises(
        tread.ConfigError, match=r"^Stack\(stream='x'\): layer 1 \(Linear\) takes no 'x'\. It takes: in"
    ):
        check_family(model, FAMILY)
    model = Mine(Open)
    model.blocks[0] = Layer()
    check_family(model, side(name="cond")())


class DeepSpeedEngine(nn.Module):
    """DeepSpeed's wrapper has this name and attribute, but needs more than the CPU to be made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class SubclassedEngine(DeepSpeedEngine):
    """A subclass wraps as its base does, such as DeepSpeed's PipelineEngine and most of peft's models."""


def test_layers_are_found_inside_wrappers():
    layer = Layer()
    compiled: Any = torch.compile(layer, backend="eager")
    others = DeepSpeedEngine(compiled), SubclassedEngine(layer)
    for wrapped in (layer, compiled, checkpoint_wrapper(layer), checkpoint_wrapper(compiled), *others):
        assert unwrapped(wrapped) is layer
    assert argument_names(checkpoint_wrapper(layer)) == (["x", "cond", "rope", "joint"], False)
    model = Mine()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    check_family(model, FAMILY)
    with pytest.raises(tread.ConfigError, match="no layer in 'blocks' takes 'ropes'"):
        check_family(model, side(name="ropes")())


class Some(nn.Module):
    """A layer that names a few of its arguments, with one module inside that is not what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, *rest: Any, rope: Tensor | None = None):
        return self.linear(x)


def test_a_layer_that_names_its_arguments_is_no_wrapper():
    assert argument_names(Some()) == (["x", "rope"], False)
    check_family(Mine(Some), FAMILY)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_stock_family_describes_its_model(case: Case):
    model = case.build()
    check_family(model, family_of(model))
