"""Linears that multiply in float8, going forward and back: trials that decide what the product offers.

- `TrainedFloat8Linear` is for pretraining: one scale per tensor, e4m3 for inputs and weights, e5m2 for gradients, all
  three products of a step in float8 (Micikevicius et al. 2022, arXiv 2209.05433).
- `FrozenFloat8Linear` is for the base under LoRA: the weight is stored twice, with one scale per row of each product's
  own operand, so that both products take it as it lies. It saves time, not memory.
- `torch._scaled_mm` needs a GPU; elsewhere a plain product of the rounded operands computes the same.
- torchao's own ways are tried under their names; they need compiled layers to be fast.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tread.train.finetune.quantize import layer_linears

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def to_float8(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """x rounded to float8 and the float32 scale that undoes it, one for the tensor or one for each row over `dim`."""
    largest = torch.finfo(dtype).max
    size = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = size.float().clamp(min=1e-12) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, fast: bool = True) -> Tensor:
    """(M, K) @ (N, K).T of float8 operands that both lie row by row -> bf16 (M, N)."""
    if a.is_cuda:
        if b_scale.ndim == 2:
            b_scale = b_scale.t()  # (1, N)
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return multiply(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return ((a.float() * a_scale) @ (b.float() * b_scale).t()).bfloat16()


class _Trained(torch.autograd.Function):
    """x (M, K) @ weight (N, K).T, with both gradients in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = to_float8(x, FORWARD)
        weight8, weight_scale = to_float8(weight, FORWARD)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.weight_dtype = weight.dtype
        return product(x8, weight8, x_scale, weight_scale)  # (M, N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        gradient8, scale = to_float8(gradients[0], BACKWARD)  # (M, N)
        to_x = product(gradient8, weight8.t().contiguous(), scale, weight_scale, fast=False)  # (M, K)
        to_weight = product(gradient8.t().contiguous(), x8.t().contiguous(), scale, x_scale, fast=False)  # (N, K)
        return to_x, to_weight.to(ctx.weight_dtype)


class TrainedFloat8Linear(nn.Linear):
    """A linear whose products are in float8; its weight stays as it is."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2).bfloat16()  # (M, K)
        out = _Trained.apply(rows, self.weight)
        out = out if self.bias is None else out + self.bias.to(out.dtype)  # pyright: ignore[reportOptionalMemberAccess]
        return out.view(*input.shape[:-1], -1)


class _Frozen(torch.autograd.Function):
    """x (M, K) @ weight (N, K).T, the gradient of x in float8 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Tensor, ahead_scale: Tensor, back: Tensor, back_scale: Tensor) -> Tensor:
        ctx.save_for_backward(back, back_scale)
        x8, scale = to_float8(x, FORWARD, 1)
        return product(x8, ahead.view(FORWARD), scale, ahead_scale)  # (M, N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back, back_scale = ctx.saved_tensors
        gradient8, scale = to_float8(gradients[0], FORWARD, 1)  # (M, N)
        return product(gradient8, back.view(FORWARD), scale, back_scale), None, None, None, None  # (M, K)


class FrozenFloat8Linear(nn.Linear):
    """A frozen linear that multiplies in float8 both ways."""

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
        """For peft, which looks at its dtype and device."""
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


def float8_both_ways(model: nn.Module) -> None:
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
    "float8-both-ways": float8_both_ways,
    "torchao-float8-dynamic": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "torchao-int8-dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
}
"""Bases that are no setting of the product, applied to a model that has its adapter."""


def train_in_float8(model: nn.Module, way: str) -> None:
    """Make the token linears of a DiT's blocks multiply in float8: `own`, or torchao's `tensorwise` or `rowwise`."""

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.startswith("blocks.") and "modulation" not in name

    if way == "own":
        for name, linear in model.named_modules():
            if chosen(linear, name):
                linear.__class__ = TrainedFloat8Linear
        return
    float8: Any = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(way)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=chosen)
