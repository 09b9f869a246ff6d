"""cuDNN's attention as an operator: torch's plain computation, whatever layouts come one after the other."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tread.kernels.attention import cudnn
from tread.kernels.attention.kernel import use_attention

pytestmark = pytest.mark.gpu
LAYOUTS = {
    "tokens first": lambda shape: torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2),
    "heads first": lambda shape: torch.randn(shape),
    "packed": lambda shape: torch.randn(shape[0], shape[2], 3, shape[1], shape[3])[:, :, 1].transpose(1, 2),
    "last axis apart": lambda shape: torch.randn(*shape[:2], shape[3], shape[2]).transpose(2, 3),
}
GRADIENTS = {
    "as the output": lambda shape: torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2),
    "a slice": lambda shape: torch.randn(shape[0], shape[2], 2 * shape[1], shape[3])[:, :, : shape[1]].transpose(1, 2),
    "expanded": lambda shape: torch.randn(shape[0], 1, 1, shape[3]).expand(shape),
}


def run(attend, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def exactly(inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return run(F.scaled_dot_product_attention, [x.double() for x in inputs], gradient.double())


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("head_size", [64, 72, 128])
def test_it_is_attention_in_every_order_of_layouts(head_size: int, compiled: bool) -> None:
    shape = (2, 3, 320, head_size)
    attend = torch.compile(cudnn.attend, dynamic=False) if compiled else cudnn.attend
    layouts = list(LAYOUTS)[:: 3 if compiled else 1]
    for layout, given in product(layouts, GRADIENTS):
        inputs = [LAYOUTS[layout](shape).cuda().bfloat16() for _ in range(3)]
        gradient = GRADIENTS[given](shape).cuda().bfloat16()
        assert cudnn.fits(*inputs)
        with sdpa_kernel(SDPBackend.MATH):
            by_torch = run(F.scaled_dot_product_attention, inputs, gradient)
        wanted = exactly(inputs, gradient)
        assert error(run(attend, inputs, gradient), wanted) < 2 * error(by_torch, wanted) + 1e-3, (layout, given)


def test_keys_may_be_fewer_than_queries() -> None:
    q, k, v = (torch.randn(2, 3, tokens, 64, device="cuda", dtype=torch.bfloat16) for tokens in (256, 77, 77))
    gradient = torch.randn_like(q)
    assert error(run(cudnn.attend, [q, k, v], gradient), exactly([q, k, v], gradient)) < 0.01


@pytest.mark.parametrize("tokens", [64, 128, 192, 250])
def test_many_samples_of_few_tokens(tokens: int) -> None:
    """As in training from scratch, at the lengths that ratios leave."""
    q, k, v, gradient = (torch.randn(256, 6, tokens, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    assert error(run(cudnn.attend, [q, k, v], gradient), exactly([q, k, v], gradient)) < 0.01


def masks(batch: int, heads: int, queries: int, keys: int) -> dict[str, Tensor]:
    """As models give them: a key is blocked for all queries, for some, for a head; true numbers that are added."""
    lengths = torch.tensor([keys - 3, keys // 2], device="cuda")[:batch]
    used = torch.arange(keys, device="cuda") < lengths[:, None]
    pairs = torch.rand(batch, 1, queries, keys, device="cuda") < 0.5
    pairs[..., 0] = True
    return {
        "keys": used[:, None, None],
        "pairs": pairs,
        "heads": torch.rand(1, heads, queries, keys, device="cuda") < 0.9,
        "shared": pairs[0, 0],
        "expanded": used[:, None, None].expand(batch, 1, queries, keys),
        "numbers": torch.randn(batch, 1, 1, keys, device="cuda", dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(2, 3, 320, 320, 128), (2, 3, 256, 77, 64), (1, 2, 250, 333, 72)], ids=str)
def test_masks_are_added(shape: tuple[int, ...], compiled: bool) -> None:
    batch, heads, queries, keys, size = shape
    q, k, v = (torch.randn(batch, heads, n, size, device="cuda", dtype=torch.bfloat16) for n in (queries, keys, keys))
    gradient = torch.randn_like(q)
    for name, mask in masks(batch, heads, queries, keys).items():
        assert cudnn.fits(q, k, v, mask)
        attend = torch.compile(cudnn.attend, dynamic=False) if compiled else cudnn.attend
        given = mask.double() if mask.is_floating_point() else mask
        with sdpa_kernel(SDPBackend.MATH):
            by_torch = run(partial(F.scaled_dot_product_attention, attn_mask=mask), [q, k, v], gradient)
            exact = partial(F.scaled_dot_product_attention, attn_mask=given)
            wanted = run(exact, [x.double() for x in (q, k, v)], gradient.double())
        found = run(partial(attend, mask=mask), [q, k, v], gradient)
        assert error(found, wanted) < 2 * error(by_torch, wanted) + 1e-3, name


def test_a_query_that_sees_nothing_leaves_the_others_alone() -> None:
    q, k, v = (torch.randn(2, 3, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(2, 1, 64, 64, device="cuda", dtype=torch.bool)
    mask[:, :, 60:] = mask[..., 60:] = False
    gradient = torch.randn_like(q)
    gradient[:, :, 60:] = 0
    found = run(partial(cudnn.attend, mask=mask), [q, k, v], gradient)
    wanted = exactly([x[:, :, :60] for x in (q, k, v)], gradient[:, :, :60])
    assert all(x.isfinite().all() for x in found)
    assert error([x[:, :, :60] for x in found], wanted) < 0.01


def test_a_run_takes_it_with_masks_too() -> None:
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, 64, 64, device="cuda", dtype=torch.bool).tril()
    try:
        use_attention("cudnn", q.device)
        assert "attention" in type(F.scaled_dot_product_attention(q, q, q).grad_fn).__name__.lower()
        masked = F.scaled_dot_product_attention(q, q, q, mask)
        assert "tread" in type(masked.grad_fn).__name__.lower() or "generated" in type(masked.grad_fn).__name__.lower()
        grouped = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], mask, enable_gqa=True)
        with torch.autocast("cuda", torch.bfloat16):
            assert F.scaled_dot_product_attention(q.float(), q.float(), q.float()).dtype == torch.bfloat16
            assert F.scaled_dot_product_attention(q.float(), q.float(), q.float(), mask).dtype == torch.bfloat16
        exact = F.scaled_dot_product_attention(q.float(), q.float(), q.float(), mask)
        assert exact.dtype == torch.float32
        use_attention("efficient", q.device)
        efficient = F.scaled_dot_product_attention(q, q, q, mask)
    finally:
        use_attention("default", q.device)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(q, q, q, mask)
        assert (masked - wanted).abs().max() < 0.05
        assert (efficient - wanted).abs().max() < 0.05
        assert (exact - wanted).abs().max() < 0.05
        one = q[:, :1].expand_as(q)
        assert (grouped - F.scaled_dot_product_attention(q, one, one, mask)).abs().max() < 0.05
