"""Training steps of tiny models with an adapter, and their comparison."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tread
from tests.tiny.case import Case

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LORA = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"])
TRACED: dict[str, Any] = {"backend": "aot_eager"}


def options(device: str) -> dict[str, Any]:
    """What `compile` gets: tiny heads are beyond cuDNN's kernel."""
    return TRACED if device == "cpu" else {"attention": "math"}


def adapted(case: Case, device: str = "cpu", **lora: Any) -> Any:
    """The tiny model, frozen, with an adapter that is not zero."""
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # in torch 2.11 its kernel for these tiny heads is not finite
    model: Any = case.model().to(device).requires_grad_(False)
    model.add_adapter(LORA, **lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def inputs_of(case: Case, device: str, batch: int = 2) -> dict[str, Any]:
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), case.inputs(batch))


def step(case: Case, model: nn.Module, handle: tread.Attachment, inputs: dict[str, Any], number: int = 3) -> Any:
    """The prediction and the gradients of a training step."""
    handle.set_step(number)
    model.zero_grad()
    prediction = case.call(model, inputs)
    prediction.float().square().mean().backward()
    return prediction.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance * scale + 1e-9)
