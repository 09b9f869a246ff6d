"""Matrix products in float8: the arithmetic, and linears that train with it.

- `tensorwise`: one scale per tensor, e4m3 for inputs and weights, e5m2 for gradients, all three products of a step in
  float8 (Micikevicius et al. 2022, arXiv 2209.05433). The kernel needs the inner dimension last in both operands, so
  each operand is used as stored in one product and transposed in another; backward saves only the transposed ones, at
  one byte per element.
- `rowwise`: one scale per row, e4m3 throughout, two products in float8 and the weight's gradient, which reduces over
  rows, in bf16; inputs are saved in bf16.
- Scales are dynamic: computed from the tensors in every step. Weights, gradients and the EMA keep their dtype, so
  checkpoints do not change.
- The maximum is reduced by rows first, so that compiled code fuses it into the kernel that computes the rows.
- On GPUs, Triton kernels (`tread.kernels.float8_triton`) round rows and transpose bytes.
- Forwards in eval mode (validation, previews) do not use float8.
- CPUs compute a plain product of the rounded operands.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tread.kernels import triton_support

Float8 = Literal["rowwise", "tensorwise"]
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 512
"""Linears with fewer input or output features are not converted: rounding costs more than the product gains."""
PIECE = 512
"""Elements of a row reduced at once in compiled code."""
MULTIPLE = 16
"""The dimensions of a product must be multiples of this."""
LONGEST = 16384
"""Largest row, in elements, that one kernel program holds."""


def to_float8(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """x (M, K) rounded to contiguous float8, and the float32 scale that undoes it: () for the tensor, or (M, 1) for
    each row if dim is 1."""
    largest = torch.finfo(dtype).max
    size = _largest_in_rows(x)  # (M, 1)
    size = (size.amax() if dim is None else size).float().clamp(min=1e-12)
    rounded = (x.float() * (size.reciprocal() * largest)).clamp(-largest, largest)
    return rounded.to(dtype, memory_format=torch.contiguous_format), size * (1 / largest)


def round_rows(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`to_float8` by rows to e4m3, of x (M, K), times `columns` (K,) if given."""
    if triton_support.run_on(x.device) and x.shape[1] <= LONGEST:
        from tread.kernels import float8_triton  # imports Triton, which only GPUs need

        return float8_triton.round_rows(x, columns, FORWARD)
    return to_float8(x if columns is None else x.float() * columns, FORWARD, 1)


def _largest_in_rows(x: Tensor) -> Tensor:
    """max |x| of each row, (M, K) -> (M, 1), in pieces: Inductor would compute a longer row twice."""
    if x.shape[1] > PIECE and x.shape[1] % PIECE == 0:
        x = x.unflatten(1, (-1, PIECE)).abs().amax(2)  # (M, K / PIECE)
    return x.abs().amax(1, keepdim=True)


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, *, fast: bool = True
) -> Tensor:
    """(M, K) @ (N, K).T of contiguous float8 operands -> bf16 (M, N); `fast` accumulates less exactly."""
    bias = None if bias is None else bias.bfloat16()
    if b_scale.ndim == 2:
        b_scale = b_scale.t()  # (1, N)
    if a.is_cuda:
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return multiply(a, b.t(), a_scale, b_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
    out = (a.float() @ b.float().t()) * a_scale * b_scale
    # a copy: compiled by torch 2.11, a function that ends in a cast to its own dtype has no gradient
    return (out if bias is None else out + bias).to(torch.bfloat16, copy=True)


def transposed(x: Tensor) -> Tensor:
    """The contiguous transpose, (M, K) -> (K, M), which compiled code fuses into the producer of x."""
    return x.t().contiguous()


def transpose_bytes(x: Tensor) -> Tensor:
    """The contiguous transpose of a float8 tensor that is stored already."""
    if triton_support.run_on(x.device):
        from tread.kernels import float8_triton

        return float8_triton.transpose(x)
    return transposed(x)


class _Product(torch.autograd.Function):
    """x (M, K) @ weight (N, K).T, with both gradients in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x8, x_scale = to_float8(x, FORWARD)
        weight8, weight_scale = to_float8(weight, FORWARD)
        ctx.save_for_backward(transposed(x8), x_scale, transposed(weight8), weight_scale)
        ctx.dtype, ctx.biased = weight.dtype, bias is not None
        return product(x8, weight8, x_scale, weight_scale, bias)  # (M, N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors  # (K, M), (), (K, N), ()
        gradient8, scale = to_float8(gradients[0], BACKWARD)  # (M, N)
        to_x = product(gradient8, weight8, scale, weight_scale, fast=False)  # (M, K)
        to_weight = product(transposed(gradient8), x8, scale, x_scale, fast=False)  # (N, K)
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
        weight8, weight_scale = round_rows(transposed(weight.bfloat16()))  # (K, N)
        to_x = product(gradient8, weight8, scale, weight_scale)  # (M, K)
        to_weight = gradients[0].t() @ x  # (N, K)
        return to_x, to_weight.to(weight.dtype), _to_bias(gradients[0], weight.dtype) if ctx.biased else None


def _to_bias(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.sum(0, dtype=torch.float32).to(dtype)  # (N,)


PRODUCTS = {"rowwise": _RowProduct, "tensorwise": _Product}


class Float8Linear(nn.Linear):
    """A linear that trains with products in float8; its weight keeps its dtype."""

    granularity: Float8

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2)  # (M, K)
        if not self.training or rows.shape[0] % MULTIPLE:
            return super().forward(input)
        out: Tensor = PRODUCTS[self.granularity].apply(rows.bfloat16(), self.weight, self.bias)  # pyright: ignore[reportAssignmentType]
        return out.view(*input.shape[:-1], -1)


def supported(device: torch.device) -> bool:
    """Whether the device has float8 matrix products."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def train_in_float8(layers: nn.Module, granularity: Float8, *, smallest: int = SMALLEST) -> int:
    """Convert the linears of `layers` that see every token to float8 training; returns their number.

    Modulations, which see one row per sample, and linears with fewer than `smallest` features are not converted.
    """
    count = 0
    for name, linear in layers.named_modules():
        sides = (linear.in_features, linear.out_features) if type(linear) is nn.Linear else (0,)
        if "modulation" in name or min(sides) < smallest or any(side % MULTIPLE for side in sides):
            continue
        linear.__class__ = Float8Linear
        linear.granularity = granularity  # pyright: ignore[reportArgumentType]
        count += 1
    return count
