"""What layers keep and compute again, seen by counting operations and by torch's hooks on saved tensors."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tread.models import recompute
from tread.models.layers import Block
from tread.models.recompute import Checkpointing, recomputing

WIDTH, TOKENS = 256, 24
WAYS: list[Checkpointing] = [False, True, "selective"]
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


class Adapted(nn.Module):
    """A block whose first linear has a small product beside it, as an adapter has."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 2, mlp_ratio=4.0, qk_norm=True, norm="layer", mlp="gelu")
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.block(x + self.up(self.down(x)), c, None)


class Count(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, TOKENS, WIDTH).requires_grad_(), torch.randn(2, WIDTH).requires_grad_()


def gradients(call: Callable[..., Tensor], layer: nn.Module, x: Tensor, c: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(call(layer, x, c).sin().sum(), [x, c, *layer.parameters()]))


def plainly(layer: nn.Module, *args: Any) -> Any:
    return layer(*args)


@pytest.fixture
def layer() -> Adapted:
    torch.manual_seed(1)
    return Adapted()


def test_gradients_are_the_same_bit_for_bit(layer: Adapted) -> None:
    x, c = inputs()
    expected = gradients(plainly, layer, x, c)
    for how in WAYS[1:]:
        found = gradients(recomputing(how), layer, x, c)
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True)), how


def test_what_is_dear_is_computed_once(layer: Adapted) -> None:
    """The linears of the layer are modulation, qkv, the projection and two of the MLP; the adapter's are two more."""
    x, c = inputs()
    found: dict[Checkpointing, Counter[str]] = {}
    for how in WAYS:
        with Count() as count:
            gradients(recomputing(how) if how else plainly, layer, x, c)
        found[how] = count.found
    plain, full, selective = (found[how] for how in WAYS)
    products = [sum(count[name] for name in PRODUCTS) for count in (plain, full, selective)]
    assert products == [products[0], products[0] + 7, products[0] + 1], "the adapter's second product sums over 8"
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert [count[attention] for count in (plain, full, selective)] == [1, 2, 1]
    for name in ("aten::native_layer_norm", "aten::gelu"):
        assert selective[name] == full[name] == 2 * plain[name], "what is cheap is computed again"


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [(9, 256), (256, 4)], True),
        ("aten::mm", [(9, 255), (255, 4)], False),
        ("aten::addmm", [(4,), (9, 256), (256, 4)], True),
        ("aten::addmm", [(256,), (9, 16), (16, 256)], False),
        ("aten::bmm", [(2, 512, 64), (2, 64, 512)], False),
        ("aten::bmm", [(2, 512, 512), (2, 512, 64)], True),
        ("aten::_scaled_mm", [(9, 512), (512, 4)], True),
        ("bitsandbytes::gemm_4bit", [(9, 512), (4, 256)], True),
        ("aten::convolution", [(1, 64, 8, 8), (64, 64, 3, 3)], True),
        ("aten::convolution", [(1, 64, 8, 8), (64, 1, 3, 3)], False),
        ("tread::attention", [], True),
        ("aten::_scaled_dot_product_cudnn_attention", [], True),
        ("aten::gelu", [(9, 512)], False),
    ],
)
def test_what_is_dear(name: str, shapes: list[tuple[int, ...]], expected: bool) -> None:
    assert recompute._is_dear(name, tuple(torch.empty(shape) for shape in shapes)) is expected


@pytest.mark.parametrize("how", WAYS[1:])
def test_a_compiled_layer_keeps_the_same(layer: Adapted, how: Checkpointing) -> None:
    """The last linear's result too: the gradient of its gate needs it. The adapter's second product is not dear."""
    x, c = inputs()
    expected = gradients(plainly, layer, x, c)
    # the partitioner decides what is kept; this backend runs what it decided without generating code
    options: dict[str, Any] = {"backend": "aot_eager_decomp_partition", "fullgraph": True, "dynamic": False}
    function = recomputing(how, compiled=True)
    compiled = torch.compile(lambda x, c: function(layer, x, c), **options)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        out = compiled(x, c)
    found = torch.autograd.grad(out.sin().sum(), [x, c, *layer.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    given = {tensor.data_ptr() for tensor in (x, c, *layer.parameters())}
    sizes = sorted(t.numel() for place, t in kept.items() if place not in given and t.dtype == torch.float32)
    row = 2 * TOKENS
    modulation, qkv, attended, hidden, down = 2 * 6 * WIDTH, row * 3 * WIDTH, row * WIDTH, row * 4 * WIDTH, row * 8
    logsumexp = row * 2
    dear = [modulation, qkv, *[attended] * 3, hidden, down, logsumexp]  # attention, projection, the last linear
    assert sizes == ([] if how is True else sorted(dear))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_kept_may_change_in_place_where_it_is_compiled(compiled: bool) -> None:
    """Eager code would see the changed one, so torch refuses."""

    class Layer(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).mul_(2).sin() * 3

    x, weight = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, 8, requires_grad=True)
    expected = torch.autograd.grad((x @ weight * 2).sin().sum() * 3, [x, weight])
    layer, function = Layer(), recomputing("selective", compiled=compiled)
    if not compiled:
        with pytest.raises(RuntimeError, match="mutated"):
            torch.autograd.grad(function(layer, x, weight).sum(), [x, weight])
        return
    call = torch.compile(lambda x, weight: function(layer, x, weight), backend="aot_eager_decomp_partition")
    for one, other in zip(torch.autograd.grad(call(x, weight).sum(), [x, weight]), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_random_numbers_are_drawn_again(compiled: bool) -> None:
    """Where dropout zeroed an output, it zeroes the gradient."""

    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x.sin(), 0.5, training=True)

    x, layer = torch.rand(64, 8).add(0.1).requires_grad_(), Dropped()
    function = recomputing("selective", compiled=compiled)
    call = torch.compile(lambda x: function(layer, x), backend="aot_eager_decomp_partition") if compiled else None
    out = call(x) if call is not None else function(layer, x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert (out == 0).equal(gradient == 0)


def test_compiled_code_is_cached_under_different_names() -> None:
    names = {function.__dict__["cache_hash"] for function in (recompute._dear_is_kept, recompute._nothing_is_kept)}
    assert len(names) == 2
