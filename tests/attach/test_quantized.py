"""Quantized weights: all tokens forced equals dense of the same quantized model, and gradients reach a LoRA on top."""

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import tread
from tests.attach.attached import FLUX, ROUTES
from tests.attach.selected import inner, mission_cases, route
from tests.tiny.case import Case
from tread.finetune.model.quantize import quantize

pytestmark = pytest.mark.filterwarnings("ignore")


def linears(case: Case, model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of the layers, by name."""
    stacks = tuple(f"{blocks.name}." for blocks in case.blocks)
    return {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n.startswith(stacks)}


def torchao_int8(model: nn.Module, targets: dict[str, nn.Linear]) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name in targets)


def torchao_int4(model: nn.Module, targets: dict[str, nn.Linear]) -> None:
    """Intx; torchao's Int4WeightOnlyConfig runs on a GPU only."""
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

    group = math.gcd(8, *(linear.in_features for linear in targets.values()))
    granularity = PerGroup(group) if group > 1 else PerAxis(0)  # a tiny model may have a width of 5
    config = IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"], granularity=granularity)
    quantize_(model, config, lambda module, name: name in targets)


def replaced(model: nn.Module, targets: dict[str, nn.Linear], make: Callable[[nn.Linear], nn.Module]) -> None:
    for name, linear in targets.items():
        model.set_submodule(name, make(linear))


def bitsandbytes_nf4(model: Any, targets: dict[str, nn.Linear]) -> None:
    bnb: Any = importlib.import_module("bitsandbytes.nn")

    def make(linear: nn.Linear) -> nn.Module:
        bias = linear.bias is not None
        new = bnb.Linear4bit(linear.in_features, linear.out_features, bias, torch.float32, quant_type="nf4")
        new.weight = bnb.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=new).to("cpu")
        new.bias = linear.bias
        return new

    replaced(model, targets, make)
    model.is_loaded_in_4bit = True  # what diffusers' loader says to peft


def bitsandbytes_int8(model: Any, targets: dict[str, nn.Linear]) -> None:
    bnb: Any = importlib.import_module("bitsandbytes.nn")

    def make(linear: nn.Linear) -> nn.Module:
        new = bnb.Linear8bitLt(linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False)
        new.weight = bnb.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False).to("cpu")
        new.bias = linear.bias
        return new

    replaced(model, targets, make)
    model.is_loaded_in_8bit = True


def quanto(bits: str) -> Callable[[nn.Module, dict[str, nn.Linear]], None]:
    def apply(model: nn.Module, targets: dict[str, nn.Linear]) -> None:
        from optimum.quanto import freeze, quantize

        quantize(model, weights=bits, include=list(targets))
        freeze(model)

    return apply


METHODS: dict[str, Callable[[Any, dict[str, nn.Linear]], None]] = {
    "torchao-int8": torchao_int8,
    "torchao-int4": torchao_int4,
    "bitsandbytes-nf4": bitsandbytes_nf4,
    "bitsandbytes-int8": bitsandbytes_int8,
    "quanto-int8": quanto("qint8"),
    "quanto-int4": quanto("qint4"),
}


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quanto would first build C++ code that unpacks int4, for a minute, where there is a compiler at all."""
    from optimum.quanto.library.extensions import get_extension

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

    monkeypatch.setattr(get_extension("quanto_cpp"), "_lib", SimpleNamespace(unpack=unpack))


@mission_cases
@pytest.mark.parametrize("method", METHODS)
def test_quantized(case: Case, method: str):
    model, arguments = case.model().requires_grad_(False), case.inputs(case.batch)
    exact = case.call(model, arguments)
    targets = linears(case, model)
    METHODS[method](model, targets)
    left = [name for name, module in model.named_modules() if module in targets.values() and is_plain(module)]
    assert not left, "every linear of the layers is quantized"
    dense = case.call(model, arguments)
    assert not torch.allclose(dense, exact, atol=1e-5)

    config = LoraConfig(r=2, target_modules=list(targets))
    torch.manual_seed(0)
    inject_adapter_in_model(config, model)
    model.train()
    with tread.attach(model, {"routes": [route(0, -1)]}) as handle:
        target = case.tokens - case.references
        with handle.force_keep(torch.ones(case.batch, target, dtype=torch.bool)):
            forced = case.call(model, arguments)
        assert handle.selections[0].shape == (case.batch, case.tokens)
        torch.testing.assert_close(forced, dense, rtol=1e-5, atol=1e-5)
    case.call(model, arguments).square().sum().backward()
    has = reached(model)
    assert has
    model.zero_grad()
    with tread.attach(model, {"routes": inner(case.depth)}) as handle:
        output = case.call(model, arguments)
        assert handle.selections[0].shape[1] < case.tokens
        assert not torch.allclose(output, dense, atol=1e-5)
        output.square().sum().backward()
    assert reached(model) == has


@pytest.mark.parametrize(
    "method",
    [
        *("torchao-int8", "nf4"),
        *(pytest.param(name, marks=pytest.mark.contract) for name in ("bitsandbytes-int8", "bitsandbytes-nf4", "int8")),
    ],
)
def test_the_call_for_speed_changes_no_gradient(method: str, capsys: pytest.CaptureFixture[str]):
    """On quantized layers that torch cannot compile it says so and goes on; ours, by name, it compiles."""
    model = FLUX.model().requires_grad_(False)
    targets = linears(FLUX, model)
    if method in METHODS:
        METHODS[method](model, targets)
    else:
        quantize(model, method, "cpu")
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "to_k"]), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        handle.set_step(0)
        FLUX.call(model, FLUX.inputs(2)).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.train().enable_gradient_checkpointing()
    with tread.attach(model, ROUTES) as handle:
        expected = gradients()
        assert expected
        handle.compile(backend="aot_eager")
        for _ in range(2):
            found = gradients()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    failed = capsys.readouterr().out.count("compiling failed, so the run goes on without it")
    assert failed == 0 if method in ("int8", "nf4") else failed <= 1
    torch._dynamo.reset()


def is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and type(module.weight.data) is torch.Tensor


def reached(model: nn.Module) -> set[str]:
    """The adapter's parameters that have a gradient; A has none where B is zero, as it is at the start."""
    found = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    return found
