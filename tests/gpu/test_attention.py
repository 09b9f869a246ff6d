"""cuDNN's attention as an operator: torch's plain computation, whatever layouts come one after the other."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tread.kernels import cudnn
from tread.kernels.attention import use_attention

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


def test_a_run_takes_it_and_masks_go_elsewhere() -> None:
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, 64, 64, device="cuda", dtype=torch.bool).tril()
    try:
        use_attention("cudnn", q.device)
        assert "attention" in type(F.scaled_dot_product_attention(q, q, q).grad_fn).__name__.lower()
        masked = F.scaled_dot_product_attention(q, q, q, mask)
        with torch.autocast("cuda", torch.bfloat16):
            assert F.scaled_dot_product_attention(q.float(), q.float(), q.float()).dtype == torch.bfloat16
        exact = F.scaled_dot_product_attention(q.float(), q.float(), q.float())
        assert exact.dtype == torch.float32
    finally:
        use_attention("default", q.device)
    with sdpa_kernel(SDPBackend.MATH):
        assert (masked - F.scaled_dot_product_attention(q, q, q, mask)).abs().max() < 0.05
