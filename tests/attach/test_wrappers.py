"""Attached beside what else changes a model: checkpointing, copies, peft, torch.compile, and its own methods."""

import copy
from pathlib import Path

import pytest
import torch
from attached import FLUX, ROUTES, Attach, rotary_function, routed
from diffusers.models.transformers import transformer_flux
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tread

pytestmark = pytest.mark.filterwarnings("ignore")


def test_torchs_checkpoint_wrapper_is_refused(attach: Attach):
    model = FLUX.model()
    model.single_transformer_blocks[1] = checkpoint_wrapper(model.single_transformer_blocks[1])
    with pytest.raises(tread.ConfigError, match="layer 3 is inside torch's checkpoint_wrapper"):
        attach(model, ROUTES)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not hasattr(rotary_function(), "stock")


def test_checkpointing_turned_on_off_and_on_again_while_attached(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    for turn in (model.enable_gradient_checkpointing, model.disable_gradient_checkpointing) * 2:
        turn()
        assert routed(FLUX, model, handle).equal(expected)
    model.enable_gradient_checkpointing()
    stock = FLUX.model()
    stock.enable_gradient_checkpointing()
    handle.detach()
    assert type(model._gradient_checkpointing_func) is type(stock._gradient_checkpointing_func)


def test_two_models_share_a_rotary_function_and_the_last_puts_it_back(attach: Attach, expected: torch.Tensor):
    stock = rotary_function()
    model, other = FLUX.model(), FLUX.model()
    first, second = attach(model, ROUTES), attach(other, ROUTES)
    assert rotary_function() is not stock
    first.detach()
    first.detach()  # a second time does nothing
    assert routed(FLUX, other, second).equal(expected)
    second.detach()
    assert rotary_function() is stock


def test_a_deep_copy_and_its_original_are_attached_apart(attach: Attach, expected: torch.Tensor):
    stock, function = FLUX.model(), rotary_function()
    model = FLUX.model()
    handle = attach(model, ROUTES)
    handle.set_step(0)
    twin = copy.deepcopy(model)
    assert FLUX.call(model, FLUX.inputs(2)).equal(expected)
    handle.detach()
    assert FLUX.call(model, FLUX.inputs(2)).equal(FLUX.call(stock, FLUX.inputs(2)))
    assert FLUX.call(twin, FLUX.inputs(2)).equal(expected), "it goes on by itself from where it was copied"
    again = attach(twin, ROUTES)
    assert routed(FLUX, twin, again).equal(expected)
    again.detach()
    assert FLUX.call(twin, FLUX.inputs(2)).equal(FLUX.call(stock, FLUX.inputs(2)))
    assert rotary_function() is function


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
        assert "_tread_attachment" not in model.state_dict()
        model.to(torch.float64).float()
        model.enable_gradient_checkpointing()
        model.disable_gradient_checkpointing()
        model.save_pretrained(tmp_path / "saved")
    loaded = transformer_flux.FluxTransformer2DModel.from_pretrained(tmp_path / "saved").train()
    assert FLUX.call(loaded, FLUX.inputs(2)).equal(FLUX.call(model, FLUX.inputs(2)))
