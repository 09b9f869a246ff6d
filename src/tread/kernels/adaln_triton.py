"""adaLN as Triton kernels: one forward, which norms and modulates a row, and one backward.

- A backward program handles several rows of one sample and accumulates the gradients of shift, scale and gate while it
  reads them, which leaves a few partial sums. No atomics: every run gives the same bits.
- They are `triton_op`s, so the compiler sees and launches them. Its launcher passes an argument named `stream`, so the
  kernels call the token stream `added`.
- The plain version is `tread.kernels.adaln.AdaNorm._plain`. In a routed step of DiT-XL/2 the kernels take 13 ms; the
  compiled plain version takes 24 (docs/performance.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS = 32
"""Rows handled by one backward program."""
PREFETCH_BYTES = 64 * 1024
"""Shared memory for prefetched rows, in bytes; every supported GPU has as much."""


@triton.jit
def _norm_row(
    x,
    branch,
    gate,
    shift,
    scale,
    added,
    out,
    mean,
    rstd,
    tokens,
    width,
    gate_stride,
    shift_stride,
    scale_stride,
    EPS: tl.constexpr,
    LENGTH: tl.constexpr,
    CENTRED: tl.constexpr,
    GATED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sample = row // tokens
    at = tl.arange(0, LENGTH)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        branch_values = tl.load(branch + row * width + at, mask=inside, other=0.0).to(tl.float32)
        values += tl.load(gate + sample * gate_stride + at, mask=inside, other=0.0).to(tl.float32) * branch_values
        rounded = values.to(added.dtype.element_ty)
        tl.store(added + row * width + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    row_mean = 0.0
    if CENTRED:
        row_mean = tl.sum(values, 0) / width
        values = tl.where(inside, values - row_mean, 0.0)
    row_rstd = tl.rsqrt(tl.sum(values * values, 0) / width + EPS)
    factor = 1.0 + tl.load(scale + sample * scale_stride + at, mask=inside, other=0.0).to(tl.float32)
    term = tl.load(shift + sample * shift_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (values * row_rstd * factor + term).to(out.dtype.element_ty), mask=inside)
    tl.store(mean + row, row_mean)
    tl.store(rstd + row, row_rstd)


@triton.jit
def _back_rows(
    to_added,
    to_out,
    added,
    branch,
    gate,
    scale,
    mean,
    rstd,
    to_x,
    to_branch,
    sums,
    tokens,
    width,
    gate_stride,
    scale_stride,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
    GATED: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    at = tl.arange(0, LENGTH)
    inside = at < width
    factor = 1.0 + tl.load(scale + sample * scale_stride + at, mask=inside, other=0.0).to(tl.float32)
    to_shift = tl.zeros([LENGTH], tl.float32)
    to_scale = tl.zeros([LENGTH], tl.float32)
    to_gate = tl.zeros([LENGTH], tl.float32)
    gate_values = tl.load(gate + sample * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    for token in tl.range(piece * ROWS, min(piece * ROWS + ROWS, tokens), num_stages=STAGES):  # pyright: ignore
        row = sample * tokens + token
        gradient = tl.load(to_out + row * width + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(added + row * width + at, mask=inside, other=0.0).to(tl.float32)
        to_added_row = tl.load(to_added + row * width + at, mask=inside, other=0.0).to(tl.float32)
        row_rstd = tl.load(rstd + row)
        if CENTRED:
            values -= tl.load(mean + row)
        normed = tl.where(inside, values * row_rstd, 0.0)
        to_shift += gradient
        to_scale += gradient * normed
        gradient *= factor
        to_values = gradient - normed * (tl.sum(gradient * normed, 0) / width)
        if CENTRED:
            to_values -= tl.sum(gradient, 0) / width
        total = to_added_row + row_rstd * to_values
        tl.store(to_x + row * width + at, total.to(to_x.dtype.element_ty), mask=inside)
        if GATED:
            branch_values = tl.load(branch + row * width + at, mask=inside, other=0.0).to(tl.float32)
            to_gate += total * branch_values
            to_branch_row = (total * gate_values).to(to_branch.dtype.element_ty)
            tl.store(to_branch + row * width + at, to_branch_row, mask=inside)
    first = sums + (sample * pieces + piece) * 3 * width + at  # sums (B, pieces, 3, D)
    tl.store(first, to_shift, mask=inside)
    tl.store(first + width, to_scale, mask=inside)
    tl.store(first + 2 * width, to_gate, mask=inside)


def warps(length: int) -> int:
    """Warps of a program whose rows are padded to `length` elements."""
    return max(2, length // 1024)


def stages(length: int, size: int) -> int:
    """Pipeline stages of the loop over rows; `size` is the bytes read per element, all inputs together."""
    return 3 if 2 * length * size <= PREFETCH_BYTES else 1


@triton_op("tread::ada_norm", mutates_args=())
def ada_norm(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream x + gate * branch, empty without a branch; the stream normed and modulated, in `dtype`; the mean and
    the reciprocal standard deviation of each row, (B, S). x and branch are (B, S, D); gate, shift, scale (B, 1, D)."""
    samples, tokens, width = x.shape
    stream = x.new_empty(0)
    if branch is not None and gate is not None:
        wide = torch.promote_types(x.dtype, torch.promote_types(branch.dtype, gate.dtype))
        stream = x.new_empty(x.shape, dtype=wide)
    out = x.new_empty(x.shape, dtype=dtype)
    mean, rstd = (x.new_empty(samples, tokens, dtype=torch.float32) for _ in range(2))
    gate, shift, scale = (_in_rows(one) for one in (shift if gate is None else gate, shift, scale))
    length = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        wrap_triton(_norm_row)[(samples * tokens,)](
            x.contiguous(),
            x if branch is None else branch.contiguous(),
            gate,
            shift,
            scale,
            stream,
            out,
            mean,
            rstd,
            tokens,
            width,
            gate.stride(0),
            shift.stride(0),
            scale.stride(0),
            EPS=eps,
            LENGTH=length,
            CENTRED=centred,
            GATED=branch is not None,
            num_warps=warps(length),
        )
    return stream, out, mean, rstd


@triton_op("tread::ada_norm_backward", mutates_args=())
def ada_norm_backward(
    to_stream: Tensor,
    to_out: Tensor,
    stream: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients: x in `dtype`; the branch, empty without one; shift, scale and gate stacked, (B, 3, D)."""
    samples, tokens, width = stream.shape
    to_x = stream.new_empty(stream.shape, dtype=dtype)
    to_branch = stream.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    gate, scale = (_in_rows(one) for one in (scale if gate is None else gate, scale))
    pieces, length = triton.cdiv(tokens, ROWS), triton.next_power_of_2(width)
    sums = mean.new_empty(samples, pieces, 3, width)
    read = sum(one.element_size() for one in (to_stream, to_out, stream, stream if branch is None else branch))
    with torch.cuda.device_of(stream):
        wrap_triton(_back_rows)[(samples, pieces)](
            to_stream.contiguous(),
            to_out.contiguous(),
            stream.contiguous(),
            stream if branch is None else branch.contiguous(),
            gate,
            scale,
            mean,
            rstd,
            to_x,
            to_branch,
            sums,
            tokens,
            width,
            gate.stride(0),
            scale.stride(0),
            ROWS=ROWS,
            LENGTH=length,
            STAGES=stages(length, read),
            CENTRED=centred,
            GATED=branch is not None,
            num_warps=warps(length),
        )
    return to_x, to_branch, sums.sum(1)


def _in_rows(x: Tensor) -> Tensor:
    """x (B, 1, D) with each row contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
