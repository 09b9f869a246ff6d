"""Gather and restore: values, gradients, and how little they keep."""

import torch

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


def test_gradcheck_in_float64():
    ids = ids_of(2, 5, 3)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    bypass = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)

    def window(x, bypass):
        return restore(torch.tanh(gather(x, ids)) * 2, ids, bypass)

    assert torch.autograd.gradcheck(window, (x, bypass))
    assert torch.autograd.gradgradcheck(window, (x, bypass))


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
