"""Products in float8: the arithmetic, and linears that train with it.

- `tensorwise`: one scale per tensor, e4m3 for inputs and weights, e5m2 for gradients, all three products of a step in
  float8 (Micikevicius et al. 2022, arXiv 2209.05433). The kernel wants both operands with the summed axis last, so each
  is needed as it lies for one product and turned for another; only the turned ones, at a byte per number, are kept.
- `rowwise`: one scale per row, e4m3 throughout, two products in float8 and the weight's gradient, which sums over rows,
  in bf16; inputs are kept in bf16.
- Scales are taken from the tensors themselves in every step. Weights, their gradients and their average stay as they
  are, so checkpoints do not know about it.
- The largest value is taken by rows first: compiled code then finds it in the pass that computes the rows.
- On GPUs rows are rounded, and stored bytes turned, by kernels of our own (`tread.kernels.float8_triton`).
- Validation, previews and every other forward in eval mode compute as without float8.
- Where there is no such kernel (CPUs), a plain product of the rounded operands computes the same.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.kernels import triton_support

Float8 = Literal["rowwise", "tensorwise"]
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 512
"""Linears with a side below this stay as they are: rounding would cost more than the product gains."""
PIECE = 512
"""Of a row, where compiled code looks for its largest value."""
MULTIPLE = 16
"""The sides of a product are multiples of this."""
LONGEST = 16384
"""Numbers in a row that one program of our kernel holds."""


def to_float8(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """x (M, K) rounded to float8, row by row in memory, and the float32 scale that undoes it: one, (), or by rows,
    (M, 1), where dim is 1."""
    largest = torch.finfo(dtype).max
    size = _largest_in_rows(x)  # (M, 1)
    size = (size.amax() if dim is None else size).float().clamp(min=1e-12)
    rounded = (x.float() * (size.reciprocal() * largest)).clamp(-largest, largest)
    return rounded.to(dtype, memory_format=torch.contiguous_format), size * (1 / largest)


def round_rows(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`to_float8` by rows and to e4m3, of x (M, K) times `columns` (K,) where given."""
    if triton_support.run_on(x.device) and x.shape[1] <= LONGEST:
        from tread.kernels import float8_triton  # Triton, which only GPUs need

        return float8_triton.round_rows(x, columns, FORWARD)
    return to_float8(x if columns is None else x.float() * columns, FORWARD, 1)


def _largest_in_rows(x: Tensor) -> Tensor:
    """(M, K) -> (M, 1), by pieces of a row: a compiled kernel holds a piece, and would compute a long row twice."""
    if x.shape[1] > PIECE and x.shape[1] % PIECE == 0:
        x = x.unflatten(1, (-1, PIECE)).abs().amax(2)  # (M, K / PIECE)
    return x.abs().amax(1, keepdim=True)


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, *, fast: bool = True
) -> Tensor:
    """(M, K) @ (N, K).T of float8 operands that both lie row by row -> bf16 (M, N); `fast` sums less exactly."""
    bias = None if bias is None else bias.bfloat16()
    if b_scale.ndim == 2:
        b_scale = b_scale.t()  # (1, N)
    if a.is_cuda:
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return multiply(a, b.t(), a_scale, b_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
    out = (a.float() @ b.float().t()) * a_scale * b_scale
    # a copy: compiled by torch 2.11, a function that ends in a cast to what it already has gives no gradient
    return (out if bias is None else out + bias).to(torch.bfloat16, copy=True)


def turned(x: Tensor) -> Tensor:
    """(M, K) -> (K, M), row by row; what was just computed is best turned by compiled code, as it is written."""
    return x.t().contiguous()


def turn_bytes(x: Tensor) -> Tensor:
    """`turned`, of bytes that lie in memory."""
    if triton_support.run_on(x.device):
        from tread.kernels import float8_triton

        return float8_triton.turn(x)
    return turned(x)


class _Product(torch.autograd.Function):
    """x (M, K) @ weight (N, K).T, with both gradients in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x8, x_scale = to_float8(x, FORWARD)
        weight8, weight_scale = to_float8(weight, FORWARD)
        ctx.save_for_backward(turned(x8), x_scale, turned(weight8), weight_scale)
        ctx.dtype, ctx.biased = weight.dtype, bias is not None
        return product(x8, weight8, x_scale, weight_scale, bias)  # (M, N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors  # (K, M), (), (K, N), ()
        gradient8, scale = to_float8(gradients[0], BACKWARD)  # (M, N)
        to_x = product(gradient8, weight8, scale, weight_scale, fast=False)  # (M, K)
        to_weight = product(turned(gradient8), x8, scale, x_scale, fast=False)  # (N, K)
        return to_x, to_weight.to(ctx.dtype), _to_bias(gradients[0], ctx.dtype) if ctx.biased else None


class _RowProduct(torch.autograd.Function):
    """x (M, K) @ weight (N, K).T and the gradient of x in float8, the gradient of the weight in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        x8, x_scale = round_rows(x)
        weight8, weight_scale = round_rows(weight)
        return product(x8, weight8, x_scale, weight_scale, bias)  # (M, N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient8, scale = round_rows(gradients[0])  # (M, N)
        weight8, weight_scale = round_rows(turned(weight.bfloat16()))  # (K, N)
        to_x = product(gradient8, weight8, scale, weight_scale)  # (M, K)
        to_weight = gradients[0].t() @ x  # (N, K)
        return to_x, to_weight.to(weight.dtype), _to_bias(gradients[0], weight.dtype) if ctx.biased else None


def _to_bias(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.sum(0, dtype=torch.float32).to(dtype)  # (N,)


PRODUCTS = {"rowwise": _RowProduct, "tensorwise": _Product}


class Float8Linear(nn.Linear):
    """A linear that trains with products in float8; its weight stays as it is."""

    way: Float8

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2)  # (M, K)
        if not self.training or rows.shape[0] % MULTIPLE:
            return super().forward(input)
        out: Tensor = PRODUCTS[self.way].apply(rows.bfloat16(), self.weight, self.bias)  # pyright: ignore[reportAssignmentType]
        return out.view(*input.shape[:-1], -1)


def supported(device: torch.device) -> bool:
    """Whether the device multiplies in float8."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def check_float8(device: torch.device, setting: str, precision: str) -> None:
    """Refuse what cannot compute in float8; `precision` is autocast's."""
    if not supported(device):
        raise ConfigError(
            f"{setting} is set, which needs a GPU of compute capability 8.9 or above (Ada, Hopper); this run is on "
            f"{device}. Set {setting} to null."
        )
    if precision != "bf16":
        raise ConfigError(f"{setting} is set, which computes beside bf16: set train.precision to 'bf16' too.")


def train_in_float8(layers: nn.Module, way: Float8, *, smallest: int = SMALLEST) -> int:
    """Make the linears of `layers` that see every token multiply in float8; returns how many do.

    Modulations, which see one row per sample, and linears with a side below `smallest` stay as they are.
    """
    count = 0
    for name, linear in layers.named_modules():
        sides = (linear.in_features, linear.out_features) if type(linear) is nn.Linear else (0,)
        if "modulation" in name or min(sides) < smallest or any(side % MULTIPLE for side in sides):
            continue
        linear.__class__ = Float8Linear
        linear.way = way  # pyright: ignore[reportArgumentType]
        count += 1
    return count
