"""Other ways to multiply in float8, measured beside the product's (`tread.kernels.float8`, `fp8-matmul`).

- `FrozenFloat8Linear` is a base under LoRA that stores its weight twice, once per matmul operand layout and with row
  scales for each: no transpose in the backward pass, at the memory of bfloat16.
- torchao's recipes are measured under their own names; they need compiled layers to be fast.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.model.quantize import layer_linears
from tread.kernels import float8
from tread.kernels.float8 import FORWARD, product, round_rows, to_float8
from tread.models import DiT


class _Frozen(torch.autograd.Function):
    """x (M, K) @ weight (N, K).T in float8, and the gradient of x in float8 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Tensor, ahead_scale: Tensor, back: Tensor, back_scale: Tensor) -> Tensor:
        ctx.save_for_backward(back, back_scale)
        x8, scale = round_rows(x)
        return product(x8, ahead.view(FORWARD), scale, ahead_scale)  # (M, N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back, back_scale = ctx.saved_tensors
        gradient8, scale = round_rows(gradients[0])  # (M, N)
        return product(gradient8, back.view(FORWARD), scale, back_scale), None, None, None, None  # (M, K)


class FrozenFloat8Linear(nn.Linear):
    """A frozen linear that multiplies in float8 in forward and backward."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        for name, rows in (("ahead", weight), ("back", weight.t().contiguous())):  # (N, K), (K, N)
            codes, scale = to_float8(rows, FORWARD, 1)
            self.register_buffer(name, codes.view(torch.uint8))  # as bytes: `.to(dtype)` leaves them alone
            self.register_buffer(f"{name}_scale", scale)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A stand-in for peft, which reads its dtype and device."""
        return self.ahead_scale  # pyright: ignore[reportReturnType]

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2).bfloat16()  # (M, K)
        out = _Frozen.apply(rows, self.ahead, self.ahead_scale, self.back, self.back_scale)
        out = out if self.bias is None else out + self.bias.to(out.dtype)  # pyright: ignore[reportOptionalMemberAccess]
        return out.view(*input.shape[:-1], -1)


def token_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of an adapted model's layers that see every token; modulations see one row per sample."""
    names = [name for name in layer_linears(model) if "lora_" not in name and "norm" not in name]
    return {name: model.get_submodule(name) for name in names}  # pyright: ignore[reportReturnType]


def two_copies(model: nn.Module) -> None:
    """Replace the base's linears; the adapter around them stays."""
    for name, linear in token_linears(model).items():
        model.set_submodule(name, FrozenFloat8Linear(linear))


def _torchao(config: str) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        quantization: Any = importlib.import_module("torchao.quantization")
        arguments = {"granularity": quantization.PerRow()} if config.startswith("Float8") else {}
        linears = token_linears(model)
        quantization.quantize_(model, getattr(quantization, config)(**arguments), lambda _, name: name in linears)

    return apply


BASES: dict[str, Callable[[nn.Module], None]] = {
    "float8-two-copies": two_copies,
    "torchao-float8-dynamic": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "torchao-int8-dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
}
"""Experimental float8 bases that are not settings of the product, applied to a model with its adapter."""


def train_in_float8(model: DiT, way: str) -> None:
    """Make the token linears of a DiT's blocks multiply in float8: the product's ways, or torchao's."""
    if not way.startswith("torchao-"):
        float8.train_in_float8(model.blocks, way, smallest=min(float8.SMALLEST, model.width))  # pyright: ignore[reportArgumentType]
        return

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.startswith("blocks.") and "modulation" not in name

    torchao: Any = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(way.removeprefix("torchao-"))
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=chosen)
