"""The operator on a CPU: torch's attention whatever lies how, what the compiler must know of it, and whom it refuses.

The kernel itself is tried in tests/gpu.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tread.kernels.attention import cudnn

HEADS, SIZE = 3, 16
Attend = Callable[..., Tensor]
# what float32 sums differ by, and bfloat16's steps of 2**-8
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.01}


def drawn(tokens: int, layout: str = "heads first", dtype: torch.dtype = torch.float32) -> Tensor:
    """(2, HEADS, tokens, SIZE), however it lies."""
    shapes = {
        "heads first": lambda: torch.randn(2, HEADS, tokens, SIZE),
        "tokens first": lambda: torch.randn(2, tokens, HEADS, SIZE).transpose(1, 2),
        "packed": lambda: torch.randn(2, tokens, 3, HEADS, SIZE)[:, :, 1].transpose(1, 2),
        "last axis apart": lambda: torch.randn(2, HEADS, SIZE, tokens).mT,
        "a slice": lambda: torch.randn(2, tokens, 2 * HEADS, SIZE)[:, :, :HEADS].transpose(1, 2),
        "expanded": lambda: torch.randn(2, HEADS, 1, 1).expand(2, HEADS, tokens, SIZE),
    }
    return shapes[layout]().to(dtype)


def masks(queries: int, keys: int) -> dict[str, Tensor]:
    """As models give them: for the keys of each sample, for pairs, for heads; shared, repeated, and as numbers."""
    used = torch.arange(keys) < torch.tensor([keys - 2, keys // 2])[:, None]
    pairs = torch.rand(2, 1, queries, keys) < 0.5
    pairs[..., 0] = True
    return {
        "keys": used[:, None, None],
        "pairs": pairs,
        "heads": torch.rand(1, HEADS, queries, keys) < 0.9,
        "shared": pairs[0, 0],
        "expanded": used[:, None, None].expand(2, 1, queries, keys),
        "numbers": torch.randn(2, 1, 1, keys),
    }


def run(attend: Attend, inputs: list[Tensor], gradient: Tensor, scale: float | None = None) -> list[Tensor]:
    """The output and the three gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", list(NEAR), ids=["float32", "bf16"])
@pytest.mark.parametrize("gradient", ["tokens first", "a slice", "expanded"])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "packed", "last axis apart"])
def test_it_is_attention_however_things_lie(layout: str, gradient: str, dtype: torch.dtype) -> None:
    inputs, back = [drawn(12, layout, dtype) for _ in range(3)], drawn(12, gradient, dtype)
    wanted = run(F.scaled_dot_product_attention, [x.double() for x in inputs], back.double())
    found = run(cudnn.attend, inputs, back)
    assert [x.dtype for x in found] == [dtype] * 4
    assert apart(found, wanted) < NEAR[dtype]


def test_one_tensor_cut_in_three_gets_its_gradient_whole() -> None:
    """As in DiT's layers: queries, keys and values are slices of one product."""
    qkv = torch.randn(2, 12, 3, HEADS, SIZE, requires_grad=True)
    results: list[Tensor] = []
    for attend in (cudnn.attend, F.scaled_dot_product_attention):
        query, key, value = (x.transpose(1, 2) for x in qkv.unbind(2))
        results += torch.autograd.grad(attend(query, key, value).sin().sum(), qkv)
    assert apart(results[:1], results[1:]) < 1e-5


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("keys", [5, 20])
def test_keys_need_not_be_as_many_as_queries(keys: int, scale: float | None) -> None:
    inputs, back = [drawn(12), drawn(keys), drawn(keys)], drawn(12)
    wanted = run(F.scaled_dot_product_attention, [x.double() for x in inputs], back.double(), scale)
    assert apart(run(cudnn.attend, inputs, back, scale), wanted) < 1e-5


@pytest.mark.parametrize("keys", [7, 16])
@pytest.mark.parametrize("name", list(masks(1, 1)))
def test_masks_are_added(name: str, keys: int) -> None:
    inputs, back, mask = [drawn(12), drawn(keys), drawn(keys)], drawn(12), masks(12, keys)[name]
    exact = partial(F.scaled_dot_product_attention, attn_mask=mask.double() if mask.is_floating_point() else mask)
    wanted = run(exact, [x.double() for x in inputs], back.double())
    assert apart(run(partial(cudnn.attend, mask=mask), inputs, back), wanted) < 1e-5


def test_the_kernel_is_given_masks_of_four_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    query, shapes = drawn(12), list[torch.Size]()
    monkeypatch.setattr(cudnn, "attention", lambda q, k, v, mask, scale: shapes.append(mask.shape) or (q, None))
    for shape in ((12, 12), (HEADS, 12, 12), (2, 1, 1, 12)):
        cudnn.attend(query, query, query, torch.ones(shape, dtype=torch.bool))
    assert shapes == [(1, 1, 12, 12), (1, HEADS, 12, 12), (2, 1, 1, 12)]


def test_a_query_that_sees_nothing_leaves_the_others_alone() -> None:
    inputs, back, mask = [drawn(12) for _ in range(3)], drawn(12), torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[:, :, 9:] = mask[..., 9:] = False
    back[:, :, 9:] = 0
    found = run(partial(cudnn.attend, mask=mask), inputs, back)
    wanted = run(F.scaled_dot_product_attention, [x[:, :, :9] for x in inputs], back[:, :, :9])
    assert all(x.isfinite().all() for x in found)
    assert apart([x[:, :, :9] for x in found], wanted) < 1e-5


@pytest.mark.parametrize(("layout", "scale"), [("heads first", 0.7), ("packed", None), ("last axis apart", 0.7)])
def test_the_compiler_is_told_the_truth(layout: str, scale: float | None) -> None:
    """torch's own check of an operator: schema, fake shapes and strides, gradients, and all of it traced."""
    query, key, value = drawn(12, layout), drawn(7, layout), drawn(7, layout)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    for mask in (None, *(masks(12, 7)[name] for name in ("keys", "numbers"))):
        torch.library.opcheck(cudnn.attention, (*leaves, mask, scale))
        out, logsumexp = cudnn.attention(query, key, value, mask, scale)
        for gradient in ("tokens first", "a slice", "expanded"):
            given = (drawn(12, gradient), query, key, value, mask, out, logsumexp, scale)
            torch.library.opcheck(cudnn.attention_backward, given)


def test_outputs_and_gradients_lie_alike_whatever_came() -> None:
    """One plan of the kernel serves every layer only because of this."""
    for layout, gradient in (("heads first", "a slice"), ("packed", "expanded"), ("last axis apart", "heads first")):
        found = run(cudnn.attend, [drawn(12, layout) for _ in range(3)], drawn(12, gradient))
        assert {x.stride() for x in found} == {(12 * HEADS * SIZE, SIZE, HEADS * SIZE, 1)}


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_it_compiles_in_one_graph(backend: str) -> None:
    torch._dynamo.reset()

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return cudnn.attend(query.sin(), key, value, scale=scale).flatten(2).cos().view_as(query)

    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=backend)
    for layout in ("packed", "heads first"):
        inputs, back = [drawn(12, layout) for _ in range(3)], drawn(12, "a slice")
        assert apart(run(compiled, inputs, back), run(attend, inputs, back)) < 1e-6
    torch._dynamo.reset()


def test_flops_are_as_torch_counts_its_own() -> None:
    query, key, value = (drawn(tokens).requires_grad_() for tokens in (12, 7, 7))
    with FlopCounterMode(display=False) as ahead:
        out = cudnn.attend(query, key, value)
    with FlopCounterMode(display=False) as back:
        out.sum().backward()
    aten = torch.ops.aten
    assert ahead.get_total_flops() == flop_registry[aten._scaled_dot_product_flash_attention](
        query, key, value, out_val=out
    )
    assert back.get_total_flops() == flop_registry[aten._scaled_dot_product_flash_attention_backward](
        out, query, key, value, out_val=(query, key, value)
    )
    one = 2 * 2 * HEADS * 12 * 7 * SIZE
    assert (ahead.get_total_flops(), back.get_total_flops()) == (2 * one, 5 * one)


@pytest.mark.parametrize("size", [8, 64, 72, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_fits(size: int, dtype: torch.dtype) -> None:
    with FakeTensorMode():  # tensors of a GPU, without one
        query = torch.empty(2, 3, 16, size, device="cuda", dtype=dtype)
        key = torch.empty(2, 3, 5, size, device="cuda", dtype=dtype)
        assert cudnn.fits(query, query, query)
        assert cudnn.fits(query, key, key)


BF16, SHAPE = torch.bfloat16, (2, 3, 16, 64)
REFUSED: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "float32": [(SHAPE, torch.float32)] * 3,
    "float64": [(SHAPE, torch.float64)] * 3,
    "keys of another dtype": [(SHAPE, BF16), (SHAPE, torch.float16), (SHAPE, BF16)],
    "values of another dtype": [(SHAPE, BF16), (SHAPE, BF16), (SHAPE, torch.float16)],
    "no heads": [((2, 16, 64), BF16)] * 3,
    "grouped keys": [(SHAPE, BF16), ((2, 1, 16, 64), BF16), ((2, 1, 16, 64), BF16)],
    "another batch": [(SHAPE, BF16), ((1, 3, 16, 64), BF16), ((1, 3, 16, 64), BF16)],
    "shorter values": [(SHAPE, BF16), (SHAPE, BF16), ((2, 3, 16, 32), BF16)],
    "shorter keys": [(SHAPE, BF16), ((2, 3, 16, 32), BF16), (SHAPE, BF16)],
    "heads that are no multiple of 8": [((2, 3, 16, 60), BF16)] * 3,
    "heads above 128": [((2, 3, 16, 136), BF16)] * 3,
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_does_not_fit(kind: str) -> None:
    with FakeTensorMode():
        assert not cudnn.fits(*(torch.empty(shape, device="cuda", dtype=dtype) for shape, dtype in REFUSED[kind]))


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 3, 16, 5), (1, 3, 1, 5), (2, 16, 5), (3, 1, 5), (16, 5), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_which_masks_fit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Torch aligns a mask's axes with the last ones, and so does the operator: three axes begin with the heads."""
    with FakeTensorMode():
        query, key = (torch.empty(2, 3, tokens, 64, device="cuda", dtype=BF16) for tokens in (16, 5))
        mask = torch.empty(shape, device="cuda", dtype=dtype)
        fits = len(shape) != 3 or shape[0] == 3
        assert cudnn.fits(query, key, key, mask) is fits


def test_which_masks_do_not_fit() -> None:
    with FakeTensorMode():
        query, key = (torch.empty(2, 3, tokens, 64, device="cuda", dtype=BF16) for tokens in (16, 5))
        made = partial(torch.empty, device="cuda")
        for mask in (
            made(2, 1, 1, 1, dtype=BF16),
            made(5, dtype=BF16),
            made(2, 2, 16, 5, dtype=BF16),
            made(3, 1, 1, 5, dtype=BF16),
            made(1, 2, 1, 1, 5, dtype=BF16),
            made(2, 1, 1, 5, dtype=torch.int64),
            made(2, 1, 1, 5, dtype=BF16, requires_grad=True),  # whose gradient the operator does not compute
        ):
            assert not cudnn.fits(query, key, key, mask)


def test_cpus_do_not_fit() -> None:
    assert not cudnn.fits(*(torch.empty(SHAPE, dtype=BF16) for _ in range(3)))


def test_the_kernel_sees_dense_rows_and_nothing_expanded() -> None:
    shared = torch.randn(2, 1, 12, SIZE).expand(2, HEADS, 12, SIZE)  # one head of keys for all of queries
    for x in (shared, drawn(12, "last axis apart"), drawn(12, "expanded")):
        dense = cudnn._dense_rows(x)
        assert dense.equal(x)
        assert dense.stride(-1) == 1
        assert 0 not in dense.stride()
    packed = drawn(12, "packed")
    assert cudnn._dense_rows(packed) is packed
