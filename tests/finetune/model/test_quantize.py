"""Quantized bases: small, near the model they came from, frozen, and with gradients for adapters on top."""

import copy
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import tread
from tests.finetune.tasks import ROUTES
from tests.tiny.transformers import STOCK, TARGETS, call_flux, flux
from tread.errors import ConfigError
from tread.finetune.model.adapters import add_adapter
from tread.finetune.model.quantize import METHODS, FrozenLinear, check_precision, layer_linears, quantize, unpack

pytestmark = pytest.mark.filterwarnings("ignore")
#                 how far off   bytes per weight
EXPECTED = {
    "int8":     (0.02, 1.1),
    "int4":     (0.3,  0.7),
    "fp8":      (0.08, 1.1),
    "int8-bnb": (0.04, 1.1),
    "nf4":      (0.3,  0.6),
}  # fmt: skip
on_cpu = pytest.mark.parametrize("precision", EXPECTED)
KINDS = ("standard", "lokr", "lycoris")


def quantized(precision: str | None, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny FLUX."""
    model = flux().to(dtype)
    if precision is not None:
        quantize(model, precision, "cpu")
    return model


def adapt(model: nn.Module, kind: Any = "standard") -> None:
    config = {"algo": "lokr", "factor": 4} if kind == "lycoris" else None
    add_adapter(model, kind=kind, rank=4, alpha=4, targets=TARGETS, seed=0, factor=4, lycoris_config=config)


def test_the_table_covers_what_a_cpu_can_do():
    assert set(METHODS) == {*EXPECTED, "fp8-forward", "fp8-matmul"}


@on_cpu
def test_one_linear_at_a_time(precision: str, monkeypatch: pytest.MonkeyPatch):
    """A linear that has been quantized is let go: on a GPU all of them together are what quantizing is to avoid."""
    model, method = flux(), METHODS[precision]
    weights = [weakref.ref(linear.weight) for linear in layer_linears(model).values()]
    left: list[int] = []

    def apply(linear: nn.Linear) -> nn.Module:
        left.append(sum(weight() is not None for weight in weights))
        return method.apply(linear)

    monkeypatch.setitem(METHODS, precision, replace(method, apply=apply))
    quantize(model, precision, "cpu")
    assert left == list(range(len(weights), 0, -1))


@on_cpu
@pytest.mark.parametrize("stock", STOCK)
def test_near_the_model_and_small(precision: str, stock: str):
    build, call = STOCK[stock]
    model = build()
    with torch.no_grad():
        exact = call(model)
    linears = layer_linears(model)
    others = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in linears]
    assert others, "embedders and the final projection"
    count = sum(linear.weight.numel() for linear in linears.values())
    before = footprint(model)
    quantize(model, precision, "cpu")
    with torch.no_grad():
        found = call(model)
        torch.testing.assert_close(call(copy.deepcopy(model)), found)
    error, size = EXPECTED[precision]
    off = (found - exact).norm() / exact.norm()
    assert 1e-4 < off < error
    assert (footprint(model) - before) / count + 4 < size
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name in others:
        assert type(model.get_submodule(name)) is nn.Linear


def footprint(model: nn.Module) -> int:
    """Bytes of the weights and buffers, with the scales that bitsandbytes keeps beside them."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    scales = [getattr(getattr(tensor, "quant_state", None), "absmax", None) for tensor in tensors]
    scales += [getattr(tensor, "SCB", None) for tensor in tensors]
    return sum(tensor.nbytes for tensor in (*tensors, *scales) if tensor is not None)


@pytest.mark.parametrize("kind", KINDS)
@on_cpu
def test_an_adapter_learns_on_top(precision: str, kind: str):
    """In bfloat16 under autocast, as a run has it, routed."""
    model = quantized(precision, torch.bfloat16)
    if (precision, kind) == ("nf4", "lokr"):
        with pytest.raises(ConfigError, match="peft cannot combine: set base_model_precision to 'int4'"):
            adapt(model, kind)
        return
    linear = model.get_submodule("transformer_blocks.0.attn.to_q")
    for autocast in (False, True):  # under it, layer norms hand float32 to a linear
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert linear(torch.randn(2, 64)).dtype == torch.bfloat16
    adapt(model, kind)
    model.train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {weight.dtype for weight in weights} == {torch.float32}
    optimizer = torch.optim.Adam(weights, lr=2e-2)
    losses = []
    handle = tread.attach(model, ROUTES)
    for _ in range(4):
        handle.set_step(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (call_flux(model, torch.bfloat16).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_unpacked_to_put_an_adapter_on(kind: str, monkeypatch: pytest.MonkeyPatch):
    model = quantized("int8")
    linear = model.get_submodule("transformer_blocks.0.attn.to_q")
    weight, unpacked = linear.weight, Mock(wraps=unpack)
    monkeypatch.setattr("tread.finetune.model.quantize.unpack", unpacked)
    adapt(model, kind)
    assert unpacked.call_count == 0
    assert linear.weight.equal(weight), "later it is there again"


def linear_of(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 96).to(dtype).requires_grad_(False)


def torchao_weight(config: str) -> Tensor:
    import torchao.quantization as torchao

    linear = linear_of()
    torchao.quantize_(linear, getattr(torchao, config)())
    return linear.weight.dequantize()  # pyright: ignore[reportAttributeAccessIssue]


def quanto_weight(weights: str) -> Tensor:
    from optimum import quanto

    linear: Any = quanto.QLinear.from_module(linear_of(), weights=getattr(quanto, weights))
    linear.freeze()
    return linear.weight.dequantize()


@pytest.mark.parametrize(
    ("form", "library", "name", "same"),
    [
        ("int8", quanto_weight, "qint8", True),
        ("int8", torchao_weight, "Int8WeightOnlyConfig", False),  # it has one level more below than above
        ("fp8", quanto_weight, "qfloat8", True),
        ("fp8", torchao_weight, "Float8WeightOnlyConfig", True),
    ],
)
def test_as_good_as_the_librarys(form: str, library: Any, name: str, same: bool):
    exact, found, expected = linear_of().weight, FrozenLinear(linear_of(), form).weight, library(name)
    error = (expected - exact).norm().item()
    assert error > 0
    assert (found - exact).norm().item() == pytest.approx(error, rel=0.02)
    if same:  # but for ties that round the other way
        assert ((found - expected).abs() > 1e-6).float().mean() < 0.02


def test_four_bits_are_the_nearest_of_sixteen_levels():
    linear = linear_of()
    frozen = FrozenLinear(linear, "int4")
    exact, found = (weight.view(96, 2, 64) for weight in (linear.weight, frozen.weight))
    span = exact.amax(2) - exact.amin(2)
    assert (exact - found).abs().amax(2).le(span / 30 * 1.001 + 1e-6).all()
    assert max(len(group.unique()) for group in found.flatten(0, 1)) <= 16
    assert frozen.codes.shape == (96, 64)


def call_frozen(frozen: FrozenLinear, x: Tensor) -> Tensor:
    """The output; for the gradient only the stored weight is saved, not the unpacked one."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = frozen(x)
    assert {tensor.data_ptr() for tensor in kept} <= {buffer.data_ptr() for buffer in frozen.buffers()}
    return output


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_frozen_linear_is_the_linear_of_its_weight(form: str):
    linear = linear_of()
    frozen = FrozenLinear(linear, form)
    x, gradient = torch.randn(2, 5, 128, requires_grad=True), torch.randn(2, 5, 96)
    output = call_frozen(frozen, x)
    expected = nn.functional.linear(x, frozen.weight, linear.bias)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, gradient)[0] for y in (output, expected)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_matmul_is_exact_where_rounding_is(device: str):
    """-1, 0 and 1 in rows of their own scale: output and gradient are the plain linear's."""
    generator = torch.Generator().manual_seed(0)

    def ones(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(device, torch.bfloat16)

    linear = nn.Linear(128, 96, device=device, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(
        ones(96, 128) * torch.tensor(2.0, device=device) ** (torch.arange(96, device=device) % 4)[:, None]
    )
    linear.bias.copy_(ones(96))
    frozen = FrozenLinear(linear, "fp8-matmul")
    x, gradient = ones(2, 5, 128).requires_grad_(), ones(2, 5, 96)
    output = call_frozen(frozen, x)
    expected = linear(x)
    near = {"rtol": 0, "atol": 1e-5 if device == "cpu" else 0.1}  # the GPU sums in some 14 bits
    torch.testing.assert_close(output, expected, **near)
    found, wanted = (torch.autograd.grad(out, x, gradient)[0] for out in (output, expected))
    torch.testing.assert_close(found, wanted, **near)
    assert sum(buffer.nbytes for buffer in frozen.buffers()) == 96 * 128 + 4 * 96, "the weight is stored once"


def test_fp8_matmul_is_as_near_as_rounding_allows():
    """3.7 %: each operand of a product is off by 2.6 % on average."""
    linear = linear_of()
    x, gradient = torch.randn(2, 64, 128, requires_grad=True), torch.randn(2, 64, 96)
    pair = FrozenLinear(linear, "fp8-matmul")(x), linear(x)
    for found, expected in (pair, [torch.autograd.grad(y, x, gradient)[0] for y in pair]):
        assert 0.025 < (found - expected).norm() / expected.norm() < 0.045


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "fp8-matmul"])
def test_layers_compile_without_a_break_and_save_nothing_unpacked(precision: str):
    """FLUX's layers return views of one tensor, which no tensor subclass may be an input beside."""
    weights = {linear.weight.shape for linear in layer_linears(flux()).values()}
    model = quantized(precision)
    adapt(model)
    handle = tread.attach(model.train(), ROUTES)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: list[Tensor] = []

    def gradients() -> list[Tensor]:
        handle.set_step(0)
        model.zero_grad()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = call_flux(model).square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    eager = gradients()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.single_transformer_blocks[0].compile(dynamic=False, backend="aot_eager")
    for expected, found in zip(eager, gradients(), strict=True):
        if precision == "fp8-matmul":  # a last bit that differs may fall on the other side of a rounding
            assert (found - expected).norm() <= 0.05 * expected.norm()
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert weights.isdisjoint(tensor.shape for tensor in saved if tensor.data_ptr() not in own)
    torch._dynamo.reset()


def test_float8_compute_needs_its_gpu():
    with pytest.raises(ConfigError, match=r"'fp8-forward', which multiplies in float8 .* on cpu. Set it to 'fp8'"):
        check_precision("fp8-forward", torch.device("cpu"))


def test_an_unknown_precision():
    with pytest.raises(ConfigError, match=r"base_model_precision is 'fp8-matmull'. Did you mean 'fp8-matmul'\?"):
        quantize(flux(), "fp8-matmull", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "fp8-forward", "fp8-matmul"])
def test_a_frozen_linear_on_a_gpu(form: str, compiled: bool):
    frozen = FrozenLinear(nn.Linear(1024, 512).to("cuda", torch.bfloat16).requires_grad_(False), form)
    x = torch.randn(2, 77, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(2, 77, 512, device="cuda", dtype=torch.bfloat16)
    expected = nn.functional.linear(x, frozen.weight, frozen.bias)
    output = torch.compile(frozen)(x) if compiled else frozen(x)
    assert (output - expected).norm() / expected.norm() < (0.06 if form.startswith("fp8-") else 0.01)
    found, known = (torch.autograd.grad(y, x, gradient)[0] for y in (output, expected))
    assert (found - known).norm() / known.norm() < (0.06 if form == "fp8-matmul" else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", METHODS)
def test_on_a_gpu(precision: str):
    if METHODS[precision].package:
        pytest.importorskip("bitsandbytes")
    model = flux().to(torch.bfloat16)
    with torch.no_grad():
        exact = call_flux(model, torch.bfloat16).float()
    quantize(model, precision, "cuda")
    adapt(model)
    model.cuda().train()
    with torch.autocast("cuda", torch.bfloat16):
        output = call_flux(model, torch.bfloat16, "cuda")
        output.float().square().sum().backward()
    assert (output.float().cpu() - exact).norm() / exact.norm() < 0.4
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
