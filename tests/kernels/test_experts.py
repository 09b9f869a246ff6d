"""Mixtures of experts that compute every token by every expert, against the stock code that gathers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import (
    MOEFeedForwardSwiGLU,
)
from torch import Tensor, nn

from tread.around import around
from tread.kernels.experts import compute_all_experts

STOCK = MOEFeedForwardSwiGLU.forward


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return MOEFeedForwardSwiGLU(dim=12, hidden_dim=24, num_routed_experts=4, num_activated_experts=2).double()


def results(run: Callable[..., Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = torch.randn(2, 9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    module.zero_grad()
    out = run(x)
    out.square().sum().backward()
    assert x.grad is not None
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {"output": out.detach(), "input": x.grad, **found}


def test_outputs_and_gradients_are_the_stock_ones() -> None:
    module = mixture()
    expected = results(module, module)
    restore = compute_all_experts([nn.Sequential(module)])
    found = results(module, module)
    assert found.keys() == expected.keys() >= {"gate.weight", "experts.0.w1.weight", "experts.3.w2.weight"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    restore()
    assert MOEFeedForwardSwiGLU.forward is STOCK
    assert around(module) is None


def test_no_shape_depends_on_values() -> None:
    """Tensors without values have none to look at; stock code does."""
    module, x = mixture().to("meta"), torch.empty(2, 9, 12, dtype=torch.float64, device="meta")
    with pytest.raises(RuntimeError):
        module(x)
    compute_all_experts([nn.Sequential(module)])
    module(x).sum().backward()


def test_it_compiles_as_one_graph() -> None:
    module = mixture()
    expected = results(module, module)
    compute_all_experts([nn.Sequential(module)])
    found = results(torch.compile(module, backend="aot_eager", fullgraph=True), module)
    torch._dynamo.reset()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_evaluation_is_stock() -> None:
    module = mixture().eval()
    calls: list[Any] = []
    for expert in module.experts:  # pyright: ignore[reportGeneralTypeIssues]
        expert.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    compute_all_experts([nn.Sequential(module)])
    with torch.no_grad():
        module(x)
    assert sum(calls) == 2 * 18, "two experts for each token"
    module.train()(x)
    assert calls[-4:] == [18] * 4


def test_a_mixture_that_is_told_to_infer_stays_stock() -> None:
    module = MOEFeedForwardSwiGLU(12, 24, 4, 2, _force_inference_output=True)
    compute_all_experts([nn.Sequential(module)])
    assert around(module) is None


def test_autocast_keeps_the_type() -> None:
    module = mixture().float()
    x = torch.randn(2, 9, 12)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x.bfloat16())
        compute_all_experts([nn.Sequential(module)])
        found = module(x.bfloat16())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
