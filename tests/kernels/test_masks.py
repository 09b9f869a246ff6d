"""Masks as a bias: the numbers that are added, where rows begin in memory, and what the compiler must know of them."""

import pytest
import torch

from tread.kernels.attention.masks import ALIGNED, additive, bias_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocked_keys_weigh_nothing(dtype: torch.dtype) -> None:
    mask = torch.rand(2, 1, 3, 13) < 0.5
    mask[..., 0], mask[0, 0, 1] = True, False
    bias = bias_of(mask, dtype)
    assert bias.dtype == dtype
    assert bias[0, 0, 1].eq(0).all(), "a query that may look at nothing looks at everything"
    mask[0, 0, 1] = True
    assert bias[mask].eq(0).all()
    assert (bias[~mask].float() + 1000).exp().eq(0).all()


def test_numbers_stay_as_they_are() -> None:
    mask = torch.randn(2, 1, 3, 13)
    assert bias_of(mask, torch.float32).equal(mask)
    assert bias_of(mask, torch.bfloat16).equal(mask.bfloat16())


@pytest.mark.parametrize("keys", [8, 13])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_rows_begin_where_kernels_read_them(keys: int, dtype: torch.dtype) -> None:
    bias = bias_of(torch.ones(2, 1, 3, keys, dtype=dtype), torch.bfloat16)
    assert bias.shape[-1] == keys
    assert bias.stride(-1) == 1
    assert all(stride % ALIGNED == 0 for stride in bias.stride()[:-1])


@pytest.mark.parametrize("shape", [(2, 1, 1, 13), (2, 1, 3, 8), (3, 13)])
def test_the_compiler_is_told_the_truth(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    torch.library.opcheck(additive, (mask, torch.bfloat16))
    assert additive(mask, torch.bfloat16).equal(bias_of(mask, torch.bfloat16))


def test_a_mask_that_is_repeated_for_queries_is_repeated_as_a_bias() -> None:
    mask = (torch.rand(2, 1, 1, 13) < 0.5).expand(2, 1, 4, 13)
    torch.library.opcheck(additive, (mask, torch.bfloat16))
    assert additive(mask, torch.float32).equal(bias_of(mask, torch.float32))
