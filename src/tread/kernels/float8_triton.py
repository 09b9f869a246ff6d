"""Float8 work other than products, as Triton kernels: rounding rows, and transposing bytes.

- `round_rows` reads a row once; compiled code would read it twice, for the maximum and for the rounding, because the
  rows of these models are longer than an Inductor reduction holds.
- `transpose` moves tiles through shared memory, so that reads and writes are coalesced.
- They are `triton_op`s, so the compiler sees and launches them.
- Each has a plain version in `tread.kernels.float8` with the same bits. With both kernels a routed FLUX step on a
  float8 base takes 146 instead of 156 ms (docs/performance.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

TILE = 64, 128


@triton.jit
def _round_row(x, columns, out, scale, size, LARGEST: tl.constexpr, LENGTH: tl.constexpr, SCALED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LENGTH)
    inside = at < size
    values = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(columns + at, mask=inside, other=0.0)
    most = tl.maximum(tl.max(tl.abs(values), 0), 1e-12)
    nans = tl.sum((values != values).to(tl.int32), 0)  # tl.max ignores NaN
    most = tl.where(nans != 0, float("nan"), most)
    scaled = values * (tl.div_rn(1.0, most) * LARGEST)
    rounded = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * size + at, rounded.to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, most * (1.0 / LARGEST))


def warps(length: int) -> int:
    """Warps of a program whose rows are padded to `length` elements."""
    return max(4, min(16, length // 1024))


@triton_op("tread::round_rows", mutates_args=())
def round_rows(x: Tensor, columns: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (M, K), times `columns` (K,) if given, rounded to float8 -> (M, K), and each row's scale (M, 1)."""
    x = x.contiguous()
    rows, size = x.shape
    out, scale = torch.empty_like(x, dtype=dtype), x.new_empty(rows, 1, dtype=torch.float32)
    length = triton.next_power_of_2(size)
    with torch.cuda.device_of(x):
        wrap_triton(_round_row)[(rows,)](
            x,
            scale if columns is None else columns.contiguous(),
            out,
            scale,
            size,
            LARGEST=torch.finfo(dtype).max,
            LENGTH=length,
            SCALED=columns is not None,
            num_warps=warps(length),
        )
    return out, scale


@triton.jit
def _transpose_tile(x, out, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton_op("tread::transpose_bytes", mutates_args=())
def transpose(x: Tensor) -> Tensor:
    """The contiguous transpose of bytes, (M, K) -> (K, M)."""
    rows, columns = x.shape
    out = x.new_empty(columns, rows)
    grid = triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1])
    with torch.cuda.device_of(x):
        wrap_triton(_transpose_tile)[grid](x, out, rows, columns, HEIGHT=TILE[0], WIDTH=TILE[1], num_warps=8)
    return out
