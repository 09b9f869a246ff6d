"""A diffusers that changed a stock model is named at attach time, with the model's class and what it lacks."""

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.metadata import version
from typing import Any

import pytest
from torch import nn

import tread
from tests.attach.selected import route
from tests.tiny.case import Case
from tests.tiny.stock import CASES
from tread.attach.family import Stack
from tread.attach.registry import DIFFUSERS, family_of, layers_of
from tread.errors import ConfigError
from tread.finetune.model.quantize import layer_linears

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY_CLASS = {type(case.build()).__name__: case for case in CASES}
every_class = pytest.mark.parametrize("name", EVERY_CLASS)


def renamed(forward: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """The forward with one argument called otherwise, as a release that renames it has it."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (new := f"{argument}_renamed") in kwargs:
            kwargs[argument] = kwargs.pop(new)
        return forward(*args, **kwargs)

    signature = inspect.signature(forward)
    parameters = dict(signature.parameters)
    assert argument in parameters, f"{forward.__qualname__} takes no {argument!r}"
    parameters[argument] = parameters[argument].replace(name=f"{argument}_renamed")
    vars(call)["__signature__"] = signature.replace(parameters=list(parameters.values()))
    return call


def declared(stack: Stack) -> Iterator[str]:
    """Every argument of a layer that the family reads."""
    yield stack.stream
    yield from stack.counts
    for side in stack.sides:
        yield side.name.partition(".")[0]
        if side.after is not None:
            yield side.after


def refusal(model: nn.Module) -> str:
    with pytest.raises(ConfigError) as error:
        tread.attach(model, {"routes": [route(0, -1)]})
    return str(error.value)


@every_class
def test_each_declared_argument_of_a_layer_is_missed_by_name(name: str, monkeypatch: pytest.MonkeyPatch):
    model = EVERY_CLASS[name].build()
    for stack in family_of(model).stacks:
        layers = {type(layer) for layer in stack.layers(model)}
        for argument in sorted(set(declared(stack))):
            with monkeypatch.context() as patch:
                for layer in layers:
                    patch.setattr(layer, "forward", renamed(layer.forward, argument))
                text = refusal(model)
            assert text.startswith(f"the family of {name} does not fit this model. ")
            assert f"takes no {argument!r}" in text or f" takes {argument!r}" in text
            assert f"The family is for diffusers {DIFFUSERS}, and {version('diffusers')} is installed." in text


@every_class
def test_each_declared_argument_of_the_model_is_missed_by_name(name: str, monkeypatch: pytest.MonkeyPatch):
    model = EVERY_CLASS[name].build()
    family = family_of(model)
    for argument in sorted({*family.inputs, *family.residuals}):
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "forward", renamed(type(model).forward, argument))
            text = refusal(model)
        assert text.startswith(f"the family of {name} does not fit this model. ")
        assert f"{name}.forward takes no {argument!r}" in text


@every_class
def test_a_missing_stack_is_named_and_not_passed_over(name: str):
    model = EVERY_CLASS[name].build()
    stack = family_of(model).stacks[-1].name
    parent, _, attribute = stack.rpartition(".")
    owner = operator.attrgetter(parent)(model) if parent else model
    setattr(owner, f"{attribute}_renamed", getattr(owner, attribute))
    delattr(owner, attribute)
    text = refusal(model)
    assert text.startswith(f"the family of {name} does not fit this model. Stack(name={stack!r}): ")
    assert f"{version('diffusers')} is installed" in text
    for reader in (layers_of, layer_linears):
        with pytest.raises(ConfigError, match=f"^the family of {name} does not fit"):
            reader(model)


def test_the_message_of_flux(monkeypatch: pytest.MonkeyPatch):
    model = EVERY_CLASS["FluxTransformer2DModel"].build()
    block = type(model.single_transformer_blocks[0])
    monkeypatch.setattr(block, "forward", renamed(block.forward, "image_rotary_emb"))
    assert refusal(model) == (
        "the family of FluxTransformer2DModel does not fit this model. Side(name='image_rotary_emb'): no layer in "
        "'single_transformer_blocks' takes 'image_rotary_emb'. Did you mean 'image_rotary_emb_renamed'? They take: "
        "hidden_states, encoder_hidden_states, temb, image_rotary_emb_renamed, joint_attention_kwargs. The family is "
        f"for diffusers >=0.42,<0.43, and {version('diffusers')} is installed. If you changed the model, "
        "docs/own-model.md says how to declare one with tread.Family."
    )


def test_a_users_subclass_is_told_of_the_class_whose_family_it_has():
    case: Case = EVERY_CLASS["FluxTransformer2DModel"]
    model = case.build()
    model.__class__ = type("Mine", (type(model),), {})
    model.single_transformer_blocks = nn.ModuleList()
    assert refusal(model).startswith(
        "the family of FluxTransformer2DModel does not fit this model. Stack(name='single_transformer_blocks'): "
        "Mine.single_transformer_blocks is an empty list;"
    )


def test_a_forward_put_in_place_of_diffusers_may_take_any_name(monkeypatch: pytest.MonkeyPatch):
    model = EVERY_CLASS["FluxTransformer2DModel"].build()
    block = type(model.single_transformer_blocks[0])
    stock = block.forward
    monkeypatch.setattr(block, "forward", lambda *args, **kwargs: stock(*args, **kwargs))
    tread.attach(model, {"routes": [route(0, -1)]}).detach()
