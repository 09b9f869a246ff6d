"""The trials of float8 that stand beside the product's."""

import pytest
import torch
from torch import nn

from benchmarks.common.float8 import FrozenFloat8Linear, train_in_float8, two_copies
from benchmarks.common.lora import adapt, build
from benchmarks.flux import SHAPES
from tread.finetune.model.quantize import FrozenLinear
from tread.kernels.float8 import Float8Linear
from tread.models import DiT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FINE = 0.05  # what rounding both operands of a product to e4m3 is off by, 3.7 %, and some room


def apart(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def run(layer, x):
    x = x.detach().requires_grad_()
    out = layer(x)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).sin().to(out.dtype))
    return out.detach(), x.grad


@pytest.mark.parametrize("device", DEVICES)
def test_two_copies_compute_what_one_does(device):
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, device=device).requires_grad_(False)
    x = torch.randn(2, 16, 64, device=device)
    expected = run(plain, x)
    for layer in (FrozenFloat8Linear(plain), FrozenLinear(plain, "fp8-matmul")):
        for found, one in zip(run(layer, x), expected, strict=True):
            assert apart(found, one) < FINE


def test_the_base_changes_and_the_adapter_stays():
    model = build(SHAPES["smoke"], torch.device("cpu"))
    adapt(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    two_copies(model)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["transformer_blocks.0.attn.to_q.base_layer"] is FrozenFloat8Linear
    assert kinds["transformer_blocks.0.norm1.linear"] is nn.Linear  # one row per sample: nothing to gain
    assert kinds["proj_out"] is nn.Linear


@pytest.mark.parametrize("way", ["rowwise", "tensorwise"])
def test_the_product_trains_small_models_in_float8_for_a_trial(way):
    model = DiT(input_size=4, patch=1, in_channels=1, depth=2, width=32, heads=2, num_classes=3)
    train_in_float8(model, way)
    assert [module.granularity for module in model.modules() if isinstance(module, Float8Linear)] == [way] * 8


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_torchao_trains_the_same_linears(recipe):
    pytest.importorskip("torchao")
    model = DiT(input_size=4, patch=1, in_channels=1, depth=2, width=32, heads=2, num_classes=3)
    train_in_float8(model, f"torchao-{recipe}")
    kinds = {name: type(module).__module__ for name, module in model.named_modules()}
    found = {name for name, module in kinds.items() if module.startswith("torchao.float8")}
    assert found == {f"blocks.{i}.{part}" for i in range(2) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
