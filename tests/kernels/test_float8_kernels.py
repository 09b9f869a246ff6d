"""Float8's kernels against their plain twins, bit for bit: interpreted on CPUs, as they are on a GPU."""

import pytest
import torch

from tests.programs import run
from tread.kernels import float8
from tread.kernels.float8 import FORWARD, round_rows, to_float8, transpose_bytes, transposed


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 does not wrap interpreted kernels")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run("-m", "tests.kernels.interpreted", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 1000), (2560, 3072), (512, 15360)], ids=str)
def test_rows_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype, compiled: bool) -> None:
    from tests.kernels.interpreted import rows_of_many_sizes, same

    torch.manual_seed(0)
    x = rows_of_many_sizes(shape, dtype, "cuda")
    columns = torch.rand(shape[1], device="cuda")
    function = torch.compile(round_rows, dynamic=False) if compiled else round_rows
    for given in (None, columns):
        assert same(function(x, given), to_float8(x if given is None else x.float() * given, FORWARD, 1))
    codes, scale = function(x.t().contiguous().t(), None)
    assert codes.is_contiguous()
    assert same((codes, scale), to_float8(x, FORWARD, 1))


@pytest.mark.gpu
def test_turning_on_a_gpu() -> None:
    for shape in ((16, 16), (130, 300), (3072, 15360)):
        x = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
        assert transpose_bytes(x).equal(transposed(x))


@pytest.mark.gpu
def test_rows_that_are_too_long_are_rounded_without_the_kernel() -> None:
    from tests.kernels.interpreted import same

    x = torch.randn(4, 2 * float8.LONGEST, device="cuda")
    assert same(round_rows(x), to_float8(x, FORWARD, 1))
