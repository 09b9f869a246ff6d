"""A `forward` that is replaced on a class after attaching, as libraries of kernels do: routing wraps the new one."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tread
from tests.attach.selected import TOY_CONFIG
from tests.tiny.toy import FAMILY, Block, Toy, inputs

pytestmark = pytest.mark.filterwarnings("ignore")


class Replacing:
    """A model whose classes, and their bases, belong to one test; `replace` counts the calls of what it puts there."""

    def __init__(self) -> None:
        class BaseModel(Toy):
            forward = Toy.forward

        class Model(BaseModel):
            pass

        class BaseLayer(Block):
            forward = Block.forward

        class Layer(BaseLayer):
            pass

        self.model, self.calls = Model(), 0
        self.classes: dict[str, Any] = {"model": Model, "model's base": BaseModel, "layer": Layer}
        self.classes["layer's base"] = BaseLayer
        for block in (*self.model.first, *self.model.second):
            block.__class__ = Layer

    def made(self, cls: Any) -> Callable[..., Tensor]:
        stock = cls.forward

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            return stock(module, *args, **kwargs)

        return forward

    def replace(self, what: str) -> Callable[..., Tensor]:
        cls = self.classes[what]
        cls.forward = made = self.made(cls)
        return made

    def own(self) -> dict[str, Any]:
        """What each class itself has as `forward`."""
        return {what: vars(cls).get("forward") for what, cls in self.classes.items()}

    def called(self) -> int:
        calls, self.calls = self.calls, 0
        return calls


WHAT = ("model", "model's base", "layer", "layer's base")


def expected_calls(what: str) -> int:
    return 1 if what.startswith("model") else 6


@pytest.mark.parametrize("what", WHAT)
def test_replaced_before_a_step(what: str, routed: Tensor):
    case = Replacing()
    model, before = case.model, case.own()
    handle = tread.attach(model, TOY_CONFIG, family=FAMILY)
    made = case.replace(what)
    handle.set_step(0)
    assert model(**inputs()).equal(routed)
    assert case.called() == expected_calls(what)
    with handle.dense():
        assert model(**inputs()).equal(Toy()(**inputs()))
    assert case.called() == expected_calls(what)
    handle.detach()
    assert case.own() == before | {what: made}, "every class has what the user gave it"
    assert model(**inputs()).equal(Toy()(**inputs()))
    assert case.called() == expected_calls(what)


@pytest.mark.parametrize("what", WHAT)
def test_a_replacement_that_is_taken_back(what: str, routed: Tensor):
    """`mock.patch.object` restores what the class itself had, even after detaching."""
    case = Replacing()
    model, before = case.model, case.own()
    handle = tread.attach(model, TOY_CONFIG, family=FAMILY)
    with mock.patch.object(case.classes[what], "forward", case.made(case.classes[what])):
        handle.set_step(0)
        assert model(**inputs()).equal(routed)
        assert case.called() == expected_calls(what)
    handle.set_step(0)
    assert model(**inputs()).equal(routed)
    assert case.called() == 0
    handle.detach()
    assert case.own() == before
    assert model(**inputs()).equal(Toy()(**inputs()))


@pytest.mark.parametrize("what", ["layer", "layer's base", "model's base"])
def test_replaced_in_a_loop_that_never_says_the_step(what: str, routed: Tensor):
    case = Replacing()
    with tread.attach(case.model, TOY_CONFIG, family=FAMILY):
        case.replace(what)
        assert case.model(**inputs()).equal(routed)


@pytest.mark.parametrize("how", ["call", "forward"])
def test_a_model_replaced_in_a_loop_that_never_says_the_step(how: str, routed: Tensor):
    case = Replacing()
    model = case.model
    with tread.attach(model, TOY_CONFIG, family=FAMILY) as handle:
        case.replace("model")
        with pytest.raises(tread.ConfigError, match=r"^Model\.forward was replaced after tread\.attach.*set_step"):
            (model if how == "call" else model.forward)(**inputs())
        assert model.eval()(**inputs()).equal(Toy()(**inputs()))
        model.train()
        handle.set_step(0)
        assert model(**inputs()).equal(routed)


def test_replaced_on_a_class_that_came_between(routed: Tensor):
    """`fully_shard` replaces a module's class by a subclass."""
    case = Replacing()
    model = case.model
    handle = tread.attach(model, TOY_CONFIG, family=FAMILY)

    class Sharded(case.classes["model"]):
        pass

    model.__class__ = case.classes["model"] = Sharded
    made = case.replace("model")
    handle.set_step(0)
    assert model(**inputs()).equal(routed)
    assert case.called() == 1
    handle.detach()
    assert vars(Sharded)["forward"] is made
    assert model(**inputs()).equal(Toy()(**inputs()))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("what", WHAT)
def test_replaced_between_a_checkpointed_forward_and_its_backward(what: str, reentrant: bool):
    gradients = []
    for replaced in (False, True):
        case, x = Replacing(), inputs()["x"]
        with tread.attach(case.model, TOY_CONFIG, family=FAMILY) as handle:
            handle.set_step(0)
            output: Any = checkpoint(lambda x: case.model(**{**inputs(), "x": x}), x, use_reentrant=reentrant)  # noqa: B023
            if replaced:
                case.replace(what)
            output.square().sum().backward()
        assert case.called() == replaced * expected_calls(what)
        gradients.append([parameter.grad for parameter in (x, *case.model.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
