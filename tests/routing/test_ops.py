"""Gather and restore: values, gradients, and how little they keep."""

import pytest
import torch
from torch.autograd import forward_ad, functional

from tread import TREADRouter
from tread.routing.ops import gather, restore


def ids_of(batch: int, tokens: int, kept: int) -> torch.Tensor:
    return torch.stack([torch.randperm(tokens)[:kept].sort().values for _ in range(batch)])


def test_values_against_loops():
    x, ids = torch.randn(3, 10, 4), ids_of(3, 10, 6)
    rows = gather(x, ids)
    for b in range(3):
        for k in range(6):
            assert rows[b, k].equal(x[b, ids[b, k]])
    out = restore(rows + 1, ids, x)
    for b in range(3):
        for s in range(10):
            assert out[b, s].equal(x[b, s] + 1 if s in ids[b] else x[b, s])


def test_restore_leaves_the_bypass_alone():
    bypass, ids = torch.zeros(1, 4, 2), torch.tensor([[1, 3]])
    restore(torch.ones(1, 2, 2), ids, bypass)
    assert bypass.equal(torch.zeros(1, 4, 2))


def test_restore_keeps_the_strides_of_the_bypass():
    ids = torch.tensor([[1, 3]])
    bypass = torch.zeros(1, 2, 4).transpose(1, 2)
    out = restore(torch.ones(1, 2, 2), ids, bypass)
    assert out.stride() == bypass.stride()
    assert out[0, :, 0].tolist() == [0, 1, 0, 1]
    assert bypass.equal(torch.zeros(1, 4, 2))


def test_gradcheck_in_float64():
    ids = ids_of(2, 5, 3)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    bypass = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)

    def window(x, bypass):
        return restore(torch.tanh(gather(x, ids)) * 2, ids, bypass)

    assert torch.autograd.gradcheck(window, (x, bypass))
    assert torch.autograd.gradgradcheck(window, (x, bypass))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # in torch's own rules of forward mode
def test_forward_mode_and_torch_func_have_the_gradient_of_backward():
    ids = ids_of(2, 4, 2)
    x, tangent = torch.randn(2, 2, 4, 3, dtype=torch.float64)

    def window(x):
        return restore(torch.tanh(gather(x, ids)) * 2, ids, x)

    jacobian = functional.jacobian(window, x)
    torch.testing.assert_close(torch.func.jacrev(window)(x), jacobian)
    torch.testing.assert_close(torch.func.jacfwd(window)(x), jacobian)
    with forward_ad.dual_level():
        moved = forward_ad.unpack_dual(window(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(moved, torch.einsum("bsdcte,cte->bsd", jacobian, tangent))


def test_draws_inside_torch_func_are_counted():
    """The counter is changed in place, and its value must outlive the transform."""
    router, plain, x = TREADRouter(), TREADRouter(), torch.randn(2, 16, 3)

    def window(x):
        info = router.get_mask(x, 0.5, l1_reg=0.5)
        return router.end_route(router.start_route(x, info) * 2, info, x).sum()

    for _ in range(2):
        gradient = torch.func.grad(window)(x)
        assert gradient[..., 0].equal(2.0 - plain.get_mask(x, 0.5, l1_reg=0.5).mask.float())
    assert router.calls.tolist() == 2


def test_every_token_has_a_gradient_path():
    ids = ids_of(2, 9, 4)
    x = torch.randn(2, 9, 3, requires_grad=True)
    restore(torch.tanh(gather(x, ids)), ids, x).sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).all()
    dropped = torch.ones(2, 9, dtype=torch.bool).scatter(1, ids, False)
    assert (x.grad[dropped] == 1).all(), "dropped tokens pass unchanged"


def test_only_indices_are_saved_for_backward():
    ids = ids_of(4, 64, 32)
    x = torch.randn(4, 64, 256, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        restore(gather(x, ids), ids, x)
    assert 0 < sum(saved.values()) <= 2 * ids.numel() * 8, "two flat index lists, no rows"


def test_mixed_precision_rows_return_in_the_bypass_dtype():
    out = restore(torch.ones(1, 1, 2, dtype=torch.bfloat16), torch.tensor([[0]]), torch.zeros(1, 2, 2))
    assert out.dtype == torch.float32
    assert out[0, 0].tolist() == [1, 1]
