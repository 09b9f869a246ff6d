"""What `attach` takes and refuses: configs, seeds, classes of models, a second attach."""

import inspect
import json
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_flux
from torch import nn

import tread
from tests.attach.attached import FLUX, ROUTES, Attach, rotary_function, routed
from tests.attach.selected import route
from tests.programs import ROOT
from tread.around import around
from tread.attach.families import REFUSED
from tread.attach.registry import family_of
from tread.attach.rotary import _users  # pyright: ignore[reportPrivateUsage]

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_stock(model: nn.Module) -> None:
    """Nothing stands around any module."""
    assert not [name for name, module in model.named_modules() if around(module) is not None]


def test_a_second_attach_replaces_the_first(attach: Attach):
    model, stock = FLUX.model(), rotary_function()
    first = attach(model, ROUTES)
    second = attach(model, {"routes": [route(0, -1, 0.75)]})
    FLUX.call(model, FLUX.inputs(2))
    assert first.selections == []
    assert second.selections[0].shape == (2, 4)
    first.detach()  # nothing of the second's goes with it
    FLUX.call(model, FLUX.inputs(2))
    assert second.selections[0].shape == (2, 4)
    second.detach()
    assert rotary_function() is stock, "the first handle holds nothing"
    assert_stock(model)


ASK: dict[str, Callable[[tread.Attachment], Any]] = {
    "force_keep": lambda handle: handle.force_keep(torch.zeros(2, 16, dtype=torch.bool)).__enter__(),
    "routed": lambda handle: handle.routed(0.5).__enter__(),
    "reroute": lambda handle: handle.reroute(ROUTES),
}
TELL: dict[str, Callable[[tread.Attachment], Any]] = {
    "dense": lambda handle: handle.dense().__enter__(),
    "set_step": lambda handle: handle.set_step(1),
    "load_state_dict": lambda handle: handle.load_state_dict(handle.state_dict()),
}


@pytest.mark.parametrize("name", [*ASK, *TELL])
def test_a_handle_that_was_replaced_refuses_to_be_set(name: str, attach: Attach):
    model, do = FLUX.model(), (ASK | TELL)[name]
    first, second = attach(model, ROUTES), attach(model, ROUTES)
    with pytest.raises(tread.ConfigError, match=r"a later tread\.attach of the same model replaced this handle"):
        do(first)
    do(second)
    first.detach()
    assert second.attached


@pytest.mark.parametrize("name", [*ASK, *TELL])
def test_a_handle_that_was_detached_refuses_to_route(name: str, attach: Attach):
    """A loop that ends dense may go on telling it the step."""
    handle = attach(FLUX.model(), ROUTES)
    handle.detach()
    refused = pytest.raises(tread.ConfigError, match="this handle was detached, so its model runs dense")
    with refused if name in ASK else nullcontext():
        (ASK | TELL)[name](handle)
    handle.detach()  # as often as one likes


def test_a_handle_is_not_pickled_but_its_state_is(attach: Attach):
    handle = attach(FLUX.model(), ROUTES)
    with pytest.raises(TypeError, match=r"^a handle cannot be pickled: save handle\.state_dict\(\)"):
        pickle.dumps(handle)
    assert pickle.loads(pickle.dumps(handle.state_dict())) == handle.state_dict()


def test_the_handle_is_a_context_manager_that_detaches_on_errors_too():
    model = FLUX.model()
    with pytest.raises(RuntimeError, match="mine"), tread.attach(model, ROUTES):
        raise RuntimeError("mine")
    assert_stock(model)


@pytest.mark.parametrize(
    "form",
    [
        lambda folder: ROUTES,
        lambda folder: json.dumps(ROUTES),
        lambda folder: folder / "plan.json",
        lambda folder: "lora",
    ],
    ids=["mapping", "JSON", "file", "preset"],
)
def test_every_form_of_a_config(form: Callable[[Path], Any], tmp_path: Path):
    (tmp_path / "plan.json").write_text(json.dumps({"tread_config": ROUTES}))
    model = build_flux(layers=4, single=6)
    with tread.attach(model, form(tmp_path)) as handle:
        model(**FLUX.inputs(2))
        assert handle.plan.routes[0].end_layer_idx > 0, "resolved against the depth"
        assert len(handle.selections) == 1


def build_flux(layers: int, single: int) -> Any:
    config = dict(FLUX.build().config) | {"num_layers": layers, "num_single_layers": single}
    model: Any = transformer_flux.FluxTransformer2DModel.from_config(config)
    return model.train()


def test_the_seed_decides_and_replaces_the_plans(attach: Attach):
    model, other = FLUX.model(), FLUX.model()
    ours = attach(model, {**ROUTES, "seed": 1}, seed=7)
    theirs = attach(other, {**ROUTES, "seed": 7})
    assert routed(FLUX, model, ours).equal(routed(FLUX, other, theirs))
    assert not routed(FLUX, model, attach(model, ROUTES, seed=8)).equal(routed(FLUX, other, theirs))


def test_an_unknown_class_names_the_nearest_family_and_the_how_to(attach: Attach):
    class FluxTransformer3DModel(nn.Module):
        pass

    with pytest.raises(tread.ConfigError, match="there is no family for FluxTransformer3DModel") as error:
        attach(FluxTransformer3DModel(), ROUTES)
    assert "Did you mean 'FluxTransformer2DModel'?" in str(error.value)
    assert "docs/own-model.md says how to declare one with tread.Family." in str(error.value)
    assert (ROOT / "docs" / "own-model.md").is_file()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_class_says_why(attach: Attach, name: str):
    model = type(name, (nn.Module,), {})()
    with pytest.raises(tread.ConfigError) as error:
        attach(model, ROUTES)
    assert str(error.value) == f"{name} cannot be routed: {REFUSED[name]}"


def test_a_subclass_is_found_through_the_mro(expected: torch.Tensor):
    class Mine(transformer_flux.FluxTransformer2DModel):
        pass

    model = FLUX.model()
    model.__class__ = Mine
    with tread.attach(model, ROUTES) as handle:
        assert routed(FLUX, model, handle).equal(expected)


def test_mistakes_in_a_plan_are_refused_and_leave_nothing_behind(attach: Attach):
    model, rotate = FLUX.model(), rotary_function()
    with pytest.raises(tread.ConfigError, match="outside a model of 5 layers"):
        attach(model, {"routes": [route(1, 9)]})
    with pytest.raises(tread.ConfigError, match="TREAD training requires you to configure the routes"):
        attach(model, {})
    assert_stock(model)
    assert rotary_function() is rotate


def test_a_failed_second_attach_keeps_the_first(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    with pytest.raises(tread.ConfigError):
        attach(model, {"routes": [route(1, 9)]})
    assert routed(FLUX, model, handle).equal(expected)


def test_two_declarations_of_one_rotary_function_are_not_in_use_at_once(
    attach: Attach, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    stock = inspect.unwrap(rotary_function())
    family = family_of(FLUX.model())
    (rotary,) = family.rotary
    monkeypatch.delitem(_users, rotary.function, raising=False)  # another test's handle may not be collected yet
    monkeypatch.setattr(rotary.function, stock)
    model, other = FLUX.model(), FLUX.model()
    changed = replace(family, rotary=(replace(rotary, axis=rotary.axis + 1),))
    handle = attach(model, ROUTES)
    message = rf"^{rotary.function} is in use by an attached model whose family declares it differently .* Detach that"
    with pytest.raises(tread.ConfigError, match=message):
        attach(other, ROUTES, family=changed)
    assert_stock(other)
    assert routed(FLUX, model, handle).equal(expected)
    handle.detach()
    assert rotary_function() is stock
    second = attach(other, ROUTES, family=changed)
    assert rotary_function() is not stock
    second.detach()
