"""Offloaded weights are the model's own: saved, copied, moved and wrapped as ever, and as they were after `detach`."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from tests.attach.attached import FLUX, ROUTES, Attach
from tests.attach.offload.offloaded import DEPTH
from tests.attach.steps import adapted, inputs_of, step
from tread.attach.registry import layers_of
from tread.errors import ConfigError
from tread.kernels.offload.call import is_offloaded
from tread.kernels.offload.offload import Offload
from tread.routing import recompute

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_weights_are_as_they_were(attach: Attach, tmp_path: Path) -> None:
    """In `state_dict`, in saved files, in copies, and after `detach`, which leaves nothing of it."""
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stock = {name: dict(vars(module)) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    handle = attach(model, ROUTES).offload(DEPTH)
    step(FLUX, model, handle, inputs)

    def assert_kept(found: dict[str, Tensor]) -> None:
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in before)

    assert_kept(model.state_dict())
    model.save_pretrained(tmp_path)
    assert_kept(load_file(tmp_path / "diffusion_pytorch_model.safetensors"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_kept(copied.state_dict())
        assert not any(is_offloaded(layer) for layer in layers_of(copied))
        copied.to(torch.float64)
    model.zero_grad(set_to_none=True)
    handle.detach()
    assert_kept(model.state_dict())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == stock
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any(is_offloaded(layer) for layer in layers_of(model))


def test_detached_between_forward_and_backward(attach: Attach) -> None:
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    expected = step(FLUX, model, attach(model, ROUTES), inputs)[1]
    model.zero_grad()
    handle = attach(model, ROUTES).offload(DEPTH)
    handle.set_step(3)
    loss = FLUX.call(model, inputs).float().square().mean()
    handle.detach()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert handle not in recompute._handles


def test_moving_the_model_leaves_offloaded_weights_alone(attach: Attach) -> None:
    model = adapted(FLUX)
    attach(model, ROUTES).offload(2)
    held = model.transformer_blocks[0].attn.to_q.base_layer.weight
    start = held.data_ptr()
    model.to("cpu").to(torch.device("cpu"))
    assert held.data_ptr() == start
    with pytest.raises(ConfigError, match="keep their dtype"):
        model.to(torch.float64)


def test_ddp_leaves_offloaded_weights_alone(tmp_path: Path) -> None:
    """It requires its parameters on one device, and synchronises them."""
    plain, model, inputs = adapted(FLUX), adapted(FLUX), inputs_of(FLUX, "cpu")
    Offload(model, layers_of(model), DEPTH, say=lambda _: None)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        held = {id(parameter) for parameter in wrapped._module_parameters}
        layers = [parameter for layer in layers_of(model) for parameter in layer.parameters()]
        assert all((id(parameter) in held) == parameter.requires_grad for parameter in layers)
        for one in (plain, wrapped):
            FLUX.call(one, inputs).square().mean().backward()
    finally:
        distributed.destroy_process_group()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
