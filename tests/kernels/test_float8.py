"""Float8 against plain products: exact where rounding is, near where it is not, and unseen by everything around."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.tiny.runs import final_state, forget, losses, make_session, train
from tread.errors import ConfigError
from tread.kernels import float8
from tread.kernels.float8 import (
    BACKWARD,
    FORWARD,
    Float8,
    Float8Linear,
    product,
    to_float8,
    train_in_float8,
    transposed,
)
from tread.models import DiT
from tread.pretrain import task as pretrain

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# rounding to e4m3 is off by 2.6 % of the values on average (root mean square), to e5m2 by 5.1 %; of random numbers a
# product is off by as much as its two operands together: 3.7 % and 5.8 %
FINE, COARSE = 0.05, 0.075
WAYS: list[Float8] = ["rowwise", "tensorwise"]


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def in_float8(linear: nn.Linear, way: Float8) -> Float8Linear:
    linear = copy.deepcopy(linear)
    assert train_in_float8(nn.ModuleList([linear]), way, smallest=1) == 1
    assert isinstance(linear, Float8Linear)
    return linear


def gradients(layer: nn.Linear, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x)
    out.backward(gradient.to(out.dtype))
    found = {"out": out.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_uses_the_whole_range(device: str) -> None:
    x = torch.randn(4, 64, device=device) * torch.tensor([1e-3, 1.0, 10.0, 1e4], device=device)[:, None]
    for dtype, bound in ((FORWARD, 0.04), (BACKWARD, 0.08)):
        codes, scale = to_float8(x, dtype, 1)
        assert scale.shape == (4, 1)
        assert codes.float().abs().amax(1).tolist() == [torch.finfo(dtype).max] * 4
        assert max(apart(codes[i].float() * scale[i], x[i]) for i in range(4)) < bound
        codes, scale = to_float8(x, dtype)
        assert scale.shape == ()
        assert codes.float().abs().max() == torch.finfo(dtype).max
        assert apart(codes.float() * scale, x) < bound
    codes, scale = to_float8(torch.zeros(4, 64, device=device), FORWARD)
    assert not (codes.float() * scale).any(), "nothing divides by zero"


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_per_row_and_per_tensor(device: str) -> None:
    a, b = torch.randn(32, 64, device=device), torch.randn(48, 64, device=device)
    for dim in (None, 1):
        (a8, a_scale), (b8, b_scale) = to_float8(a, FORWARD, dim), to_float8(b, FORWARD, dim)
        expected = (a8.float() * a_scale) @ (b8.float() * b_scale).t()
        assert apart(product(a8, b8, a_scale, b_scale), expected) < 5e-3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("device", DEVICES)
def test_small_whole_numbers_are_exact(device: str, compiled: bool, way: Float8) -> None:
    """-1, 0 and 1 have no rounding in any format: every product is the plain one, but for scales a hair off 1 / 448."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)

    def ones(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float().to(device)

    plain = nn.Linear(64, 96, device=device)
    with torch.no_grad():
        plain.weight.copy_(ones(96, 64))
        plain.bias.copy_(ones(96))
    x, gradient = ones(2, 16, 64), ones(2, 16, 96)
    other = in_float8(plain, way)
    if compiled:
        other.compile(dynamic=False, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    expected, found = gradients(plain, x, gradient), gradients(other, x, gradient)
    assert len(expected) == 4
    for name, value in expected.items():
        near = 1e-5 if device == "cpu" else 0.1  # the GPU sums in some 14 bits
        assert torch.allclose(found[name].float(), value, rtol=0, atol=near), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_as_near_as_rounding_allows(device: str, way: Float8) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, device=device)
    x, gradient = torch.randn(2, 16, 64, device=device), torch.randn(2, 16, 96, device=device)
    expected, found = gradients(plain, x, gradient), gradients(in_float8(plain, way), x, gradient)
    # by rows, gradients are in e4m3 too, and the weight's is computed in bf16
    bounds = {"out": FINE, "x": COARSE, "weight": COARSE} | ({"x": FINE, "weight": 0.01} if way == "rowwise" else {})
    for name, bound in (bounds | {"bias": 0.01}).items():
        assert apart(found[name], expected[name]) < bound, name
        assert apart(found[name], expected[name]) > (0.01 if bound > 0.01 else 0), "nothing was rounded"
    assert found["weight"].dtype == torch.float32


def rounded(x: Tensor) -> Tensor:
    """x (M, K) after e4m3 by rows, by hand: 448 is the largest, steps are 2**-3 of the power of two below a value."""
    scale = x.double().abs().amax(1, keepdim=True) / 448  # (M, 1)
    y = x.double() / scale
    step = 2.0 ** (y.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (y / step).round() * step * scale


@pytest.mark.parametrize("device", DEVICES)
def test_rowwise_is_rounding_by_rows(device: str) -> None:
    """Against float64: each row of inputs, weights and gradients by its own largest value, however much they differ."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 96)
    with torch.no_grad():
        plain.weight *= torch.logspace(-2, 2, 96)[:, None]
        plain.bias.zero_()
    sizes = torch.logspace(-3, 3, 32)[:, None]
    x, gradient = ((sizes * torch.randn(32, size)).bfloat16().to(device) for size in (64, 96))
    found = gradients(in_float8(plain.to(device), "rowwise"), x, gradient)
    weight = plain.weight.detach()
    expected = {
        "out": rounded(x) @ rounded(weight).t(),
        "x": rounded(gradient) @ rounded(weight.bfloat16().t()).t(),
        "weight": gradient.double().t() @ x.double(),
    }
    for name, value in expected.items():
        rows = (found[name].double() - value).norm(dim=1) / value.norm(dim=1)
        # bf16 rounds the result: without any rounding of one operand rows would be 0.026 apart
        assert rows.median() < 3e-3, name
        # a value right between two codes may go either way; with one scale for all, small rows would be lost
        assert rows.max() < 0.06, name


@pytest.mark.parametrize(
    ("way", "bytes_kept"), [("tensorwise", [4, 4, 32 * 64, 96 * 64]), ("rowwise", [2 * 32 * 64, 4 * 96 * 64])]
)
def test_what_is_kept_for_the_backward_pass(way: Float8, bytes_kept: list[int]) -> None:
    """A byte per number, or the bf16 input and the weight itself."""
    kept: list[Tensor] = []
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        in_float8(nn.Linear(64, 96, bias=False), way)(x)
    assert sorted(tensor.nbytes for tensor in kept) == bytes_kept


def test_turned_is_in_one_piece() -> None:
    x = torch.arange(6).view(2, 3)
    assert transposed(x).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert transposed(x).is_contiguous()


@pytest.mark.parametrize("way", WAYS)
def test_eval_and_odd_rows_compute_as_before(way: Float8) -> None:
    plain = nn.Linear(64, 96)
    other, x = in_float8(plain, way), torch.randn(2, 16, 64)
    assert other(x[:, :15]).equal(plain(x[:, :15])), "30 rows, which the kernel for the weight's gradient cannot take"
    assert not other(x).equal(plain(x))
    assert other.eval()(x).equal(plain(x))


def test_the_token_linears_of_blocks_and_no_others() -> None:
    model = DiT(input_size=4, patch=1, in_channels=1, depth=2, width=32, heads=2, num_classes=3)
    names = list(model.state_dict())
    assert train_in_float8(model.blocks, "rowwise") == 0, "too small to gain"
    assert train_in_float8(model.blocks, "rowwise", smallest=32) == 8
    found = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert found == {f"blocks.{i}.{part}" for i in range(2) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("way", WAYS)
def test_a_block_is_one_graph(way: Float8) -> None:
    torch._dynamo.reset()
    model = DiT(input_size=4, patch=1, in_channels=1, depth=1, width=32, heads=2, num_classes=3).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    train_in_float8(model.blocks, way, smallest=32)
    block, x, c = model.blocks[0], torch.randn(2, 16, 32), torch.randn(2, 32)
    results = []
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = block(x, c)
        out.float().square().sum().backward()
        found = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
        results.append({"out": out.detach(), **found})
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    for name, value in results[0].items():
        assert apart(results[1][name], value) < 0.05, name


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float8 on a CPU, where it computes the same and is slow, on linears of a tiny model."""
    monkeypatch.setattr(pretrain, "check_float8", lambda *_: None)
    monkeypatch.setattr(pretrain, "train_in_float8", lambda blocks, way: train_in_float8(blocks, way, smallest=16))


@pytest.mark.usefixtures("allowed")
def test_a_run_learns_as_in_bf16_and_leaves_the_same_checkpoint(tmp_path: Path) -> None:
    settings = ["train.steps=20", "log.every=1", "train.precision=bf16"]
    plain = train(tmp_path / "plain", *settings)
    one = final_state(plain)
    for way in WAYS:
        other = train(tmp_path / way, *settings, f"train.float8={way}")
        assert losses(other) != losses(plain)
        assert losses(other) == pytest.approx(losses(plain), rel=0.05)
        two = final_state(other)
        for part in one:
            assert {name: (x.shape, x.dtype) for name, x in one[part].items()} == {
                name: (x.shape, x.dtype) for name, x in two[part].items()
            }
        assert not two["ema"]["blocks.0.attn.qkv.weight"].equal(two["model"]["blocks.0.attn.qkv.weight"])


def test_what_cannot_compute_in_float8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        make_session(tmp_path, "train.float8=tensorwise")
    assert str(error.value) == (
        "train.float8 is set, which needs a GPU of compute capability 8.9 or above (Ada, Hopper); this run is on cpu. "
        "Set train.float8 to null."
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, precision, words in (
        ((8, 6), "bf16", "compute capability 8.9 or above"),
        ((9, 0), "no", "train.float8 is set, which needs bf16 autocast: set train.precision to 'bf16' too."),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.raises(ConfigError, match=words):
            pretrain.check_float8(torch.device("cuda"), precision)
    pretrain.check_float8(torch.device("cuda"), "bf16")
    monkeypatch.setattr(pretrain, "check_float8", lambda *_: None)
    with pytest.raises(ConfigError) as error:
        make_session(tmp_path, "train.float8=tensorwise")
    assert str(error.value) == (
        "train.float8 is set, but no linear of this model, which is 16 wide, has two sides of at least "
        f"{float8.SMALLEST}, so nothing would be faster: set train.float8 to null."
    )
    forget()


@pytest.mark.parametrize("width", [float8.PIECE, 3 * float8.PIECE, 2 * float8.PIECE + 8])
def test_the_largest_value_of_a_long_row_is_found_wherever_it_is(width: int) -> None:
    for place in (0, width // 2, width - 1):
        x = torch.ones(2, width)
        x[1, place] = -7.0
        codes, scale = float8.to_float8(x, float8.FORWARD, 1)
        torch.testing.assert_close(scale.flatten() * 448, torch.tensor([1.0, 7.0]))
        torch.testing.assert_close(codes.float() * scale, x, rtol=0.07, atol=0)


@pytest.mark.parametrize("dim", [None, 1])
def test_rounded_operands_lie_row_by_row(dim: int | None) -> None:
    """As the kernel wants them, however the tensor lies that they are rounded from."""
    x = torch.randn(16, 32).t()
    found, scale = to_float8(x, FORWARD, dim)
    assert found.is_contiguous()
    assert apart(found.float() * scale, x) < FINE
