"""Attached beside what else changes a model: checkpointing, copies, peft, torch.compile, and its own methods."""

import copy
import gc
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import compile_regions
from diffusers.models.transformers import transformer_flux
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend

import tread
from tests.attach.attached import FLUX, ROUTES, Attach, rotary_function, routed
from tread.attach.compiled import CompiledCall

pytestmark = pytest.mark.filterwarnings("ignore")


def test_checkpointing_turned_on_off_and_on_again_while_attached(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    for turn in (model.enable_gradient_checkpointing, model.disable_gradient_checkpointing) * 2:
        turn()
        assert routed(FLUX, model, handle).equal(expected)
    model.enable_gradient_checkpointing()
    for _ in range(2):
        assert routed(FLUX, model, handle).equal(expected)
    stock = FLUX.model()
    stock.enable_gradient_checkpointing()
    handle.detach()
    assert type(model._gradient_checkpointing_func) is type(stock._gradient_checkpointing_func)


@pytest.mark.usefixtures("nothing_frozen")
def test_two_models_share_a_rotary_function_and_the_last_puts_it_back(attach: Attach, expected: torch.Tensor):
    gc.collect()  # models that earlier tests left attached
    stock = inspect.unwrap(rotary_function())
    model, other = FLUX.model(), FLUX.model()
    first, second = attach(model, ROUTES), attach(other, ROUTES)
    assert rotary_function() is not stock
    first.detach()
    first.detach()  # a second time does nothing
    assert routed(FLUX, other, second).equal(expected)
    second.detach()
    assert rotary_function() is stock


@pytest.mark.usefixtures("nothing_frozen")
def test_a_rotary_function_that_was_replaced_later_stays(attach: Attach, monkeypatch: pytest.MonkeyPatch):
    gc.collect()
    stock, calls = inspect.unwrap(rotary_function()), []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(*args, **kwargs)

    model = FLUX.model()
    handle = attach(model, ROUTES)
    monkeypatch.setattr(transformer_flux, "apply_rotary_emb", mine)
    handle.detach()
    FLUX.call(model, FLUX.inputs(2))
    assert calls


def test_detached_before_the_backward_of_a_checkpointed_forward(attach: Attach):
    """The recomputation rotates by a table per sample, as the forward did."""
    found = []
    for checkpointed in (False, True):
        model = FLUX.model()
        if checkpointed:
            model.enable_gradient_checkpointing()
        handle = attach(model, ROUTES)
        handle.set_step(0)
        output = FLUX.call(model, FLUX.inputs(2))
        handle.detach()
        output.square().mean().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0])


def test_a_deep_copy_is_a_stock_model(attach: Attach, expected: torch.Tensor):
    """No handle could reach it, so it must not route; the original goes on."""
    model = FLUX.model()
    handle = attach(model, ROUTES)
    model.enable_gradient_checkpointing()
    FLUX.call(model, FLUX.inputs(2))
    twin = copy.deepcopy(model)
    dense = FLUX.call(FLUX.model(), FLUX.inputs(2))
    assert FLUX.call(twin.train(), FLUX.inputs(2)).equal(dense)
    assert routed(FLUX, model, handle).equal(expected)
    again = attach(twin, ROUTES)
    assert routed(FLUX, twin, again).equal(expected)
    again.detach()
    assert FLUX.call(twin, FLUX.inputs(2)).equal(dense)
    assert routed(FLUX, model, handle).equal(expected), "the original's classes are still patched"


def test_a_pickled_model_is_a_stock_model(attach: Attach, tmp_path: Path):
    model = FLUX.model()
    attach(model, ROUTES)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert FLUX.call(loaded.train(), FLUX.inputs(2)).equal(FLUX.call(FLUX.model(), FLUX.inputs(2)))


def test_through_peft(attach: Attach, expected: torch.Tensor):
    """On the wrapper, before and after wrapping; the adapter starts at zero, so the numbers are the bare model's."""
    config = LoraConfig(r=2, target_modules=["to_q", "to_v"])
    wrapped = get_peft_model(FLUX.model(), config)
    handle = attach(wrapped, ROUTES)
    torch.testing.assert_close(routed(FLUX, wrapped, handle), expected, rtol=1e-5, atol=1e-5)
    model = FLUX.model()
    handle = attach(model, ROUTES)
    wrapped = get_peft_model(model, config)
    torch.testing.assert_close(routed(FLUX, wrapped, handle), expected, rtol=1e-5, atol=1e-5)
    with handle.dense():
        assert not torch.allclose(FLUX.call(wrapped, FLUX.inputs(2)), expected, atol=1e-4)


def test_through_torch_compile(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(torch.compile(model, backend="eager"), ROUTES)
    assert handle.model is model
    assert routed(FLUX, model, handle).equal(expected)


def test_the_models_own_methods_never_notice(tmp_path: Path):
    model = FLUX.model()
    with tread.attach(model, ROUTES):
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        assert not any("tread" in name for name in model.state_dict())
        model.to(torch.float64).float()
        model.enable_gradient_checkpointing()
        model.disable_gradient_checkpointing()
        model.save_pretrained(tmp_path / "saved")
    loaded = transformer_flux.FluxTransformer2DModel.from_pretrained(tmp_path / "saved").train()
    assert FLUX.call(loaded, FLUX.inputs(2)).equal(FLUX.call(model, FLUX.inputs(2)))


@pytest.mark.parametrize("first", ["attach", "compile"])
def test_accelerates_regional_compilation(first: str, attach: Attach, expected: torch.Tensor):
    """`prepare` returns a shallow copy of the model whose layers are compiled; routing stays outside their code."""
    torch._dynamo.reset()
    model, count = FLUX.model().eval(), CompileCounterWithBackend("eager")
    handle = attach(model, ROUTES) if first == "attach" else None
    copied: Any = compile_regions(model, backend=count, dynamic=False)
    handle = handle or attach(copied, ROUTES)
    copied.train()  # the original stays in eval mode
    with handle.dense():
        FLUX.call(copied, FLUX.inputs(2))
    dense_graphs = count.frame_count
    torch.testing.assert_close(routed(FLUX, copied, handle), expected, rtol=1e-5, atol=1e-5)
    assert count.frame_count <= 2 * dense_graphs
    copied.enable_gradient_checkpointing()
    torch.testing.assert_close(routed(FLUX, copied, handle), expected, rtol=1e-5, atol=1e-5)
    handle.detach()
    assert type(vars(copied)["_gradient_checkpointing_func"]).__name__ == "function"
    assert not any(isinstance(entry, CompiledCall) for one in copied.modules() for entry in vars(one).values())
    assert FLUX.call(copied, FLUX.inputs(2)).allclose(FLUX.call(FLUX.model(), FLUX.inputs(2)), atol=1e-5)
