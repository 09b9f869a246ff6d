"""Float8's kernels against their plain twins, in Triton's interpreter.

`TRITON_INTERPRET=1 python -m tests.kernels.interpreted`: a program of its own, because Triton decides when it is
imported.
"""

from typing import Any

import torch
from torch import Tensor

from tread.kernels import float8_triton
from tread.kernels.float8 import FORWARD, to_float8, transposed

SHAPES = [(1, 16), (5, 48), (7, 1000), (4, 3072)]
DTYPES = [torch.bfloat16, torch.float32]


def rows_of_many_sizes(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Where there are four, one is zero, one has a number that is infinite, and one has one that is none."""
    x = torch.randn(shape, device=device) * torch.logspace(-9, 3, shape[0], device=device)[:, None]
    x[1:2] = 0
    x[2:3, 7], x[3:4, 5] = torch.inf, torch.nan
    return x.to(dtype)


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Codes and scales, bit for bit but for the signs of what is no number."""
    codes, known = (x.view(torch.uint8).masked_fill(x.float().isnan(), 0x7F) for x, _ in (found, expected))
    scale, known_scale = (x.nan_to_num(nan=-1.0, posinf=torch.inf) for _, x in (found, expected))
    return codes.equal(known) and scale.equal(known_scale)


def check_rows() -> None:
    """Up to the last rounding, which the interpreter does not get right: the result is stored in float32."""
    kernel: Any = float8_triton._round_row
    torch.manual_seed(0)
    for shape in SHAPES:
        for dtype in DTYPES:
            for columns in (None, torch.rand(shape[1])):
                x = rows_of_many_sizes(shape, dtype)
                found, scale = torch.full(shape, torch.nan), torch.full((shape[0], 1), torch.nan)
                kernel[(shape[0],)](
                    x,
                    scale if columns is None else columns,
                    found,
                    scale,
                    shape[1],
                    LARGEST=448.0,
                    LENGTH=1 << (shape[1] - 1).bit_length(),
                    SCALED=columns is not None,
                )
                codes, expected = to_float8(x if columns is None else x.float() * columns, FORWARD, 1)
                assert same((found.to(FORWARD), scale), (codes, expected)), (shape, dtype)


def check_turning() -> None:
    for shape in ((1, 1), (64, 128), (130, 300), (16, 512)):
        x = torch.randint(256, shape, dtype=torch.uint8)
        assert float8_triton.transpose(x).equal(transposed(x)), shape


if __name__ == "__main__":
    check_rows()
    check_turning()
