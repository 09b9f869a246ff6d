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
from tests.tiny.transformers import STOCK, TARGETS, call_flux, flux
from tread.errors import ConfigError
from tread.finetune.adapters import add_adapter
from tread.finetune.quantize import (
    METHODS,
    FrozenLinear,
    check_precision,
    footprint,
    layer_linears,
    quantize,
    unpack,
)

pytestmark = pytest.mark.filterwarnings("ignore")
#                 how far off   bytes per weight
EXPECTED = {
    "int8-torchao":  (0.02, 1.1),
    "int4-torchao":  (0.3,  0.7),
    "fp8wo-torchao": (0.08, 1.1),
    "int8-bnb":      (0.04, 1.1),
    "nf4-bnb":       (0.3,  0.6),
}  # fmt: skip
FLOAT8_COMPUTE = ("fp8-torchao", "fp8-both-ways")
on_cpu = pytest.mark.parametrize("precision", EXPECTED)
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}


def test_the_table_covers_every_method():
    """Other names are the same objects."""
    assert {id(method) for method in METHODS.values()} == {id(METHODS[name]) for name in (*EXPECTED, *FLOAT8_COMPUTE)}
    assert [name for name, method in METHODS.items() if method.float8_compute] == list(FLOAT8_COMPUTE)


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
    """A copy of it computes the same."""
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
        quantized = call(model)
        torch.testing.assert_close(call(copy.deepcopy(model)), quantized)
    error, size = EXPECTED[precision]
    off = (quantized - exact).norm() / exact.norm()
    assert 1e-4 < off < error
    assert (footprint(model) - before) / count + 4 < size
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name in others:
        assert type(model.get_submodule(name)) is nn.Linear


KINDS = ("standard", "lokr", "lycoris")


def adapt(model: nn.Module, kind: Any = "standard") -> None:
    config = {"algo": "lokr", "factor": 4} if kind == "lycoris" else None
    add_adapter(model, kind=kind, rank=4, alpha=4, targets=TARGETS, seed=0, factor=4, lycoris_config=config)


@pytest.mark.parametrize("kind", KINDS)
@on_cpu
def test_an_adapter_learns_on_top(precision: str, kind: str):
    """In bfloat16 under autocast, as a run has it, routed."""
    model = flux().to(torch.bfloat16)
    quantize(model, precision, "cpu")
    if (precision, kind) == ("nf4-bnb", "lokr"):
        with pytest.raises(ConfigError, match="peft cannot combine: set base_model_precision to 'int4-torchao'"):
            adapt(model, kind)
        return
    # layer norms give float32 under autocast; a linear's output is the base's precision again
    linear = model.get_submodule("transformer_blocks.0.attn.to_q")
    for autocast in (False, True):
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
def test_nothing_is_unpacked_to_put_an_adapter_on(kind: Any, monkeypatch: pytest.MonkeyPatch):
    model = flux()
    quantize(model, "int8-torchao", "cpu")
    linear = model.get_submodule("transformer_blocks.0.attn.to_q")
    weight, unpacked = linear.weight, Mock(wraps=unpack)
    monkeypatch.setattr("tread.finetune.quantize.unpack", unpacked)
    adapt(model, kind)
    assert unpacked.call_count == 0
    assert linear.weight.equal(weight), "later it is there again"  # pyright: ignore[reportArgumentType, reportCallIssue]


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
        ("float8", quanto_weight, "qfloat8", True),
        ("float8", torchao_weight, "Float8WeightOnlyConfig", True),
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


def call_keeping_only_stored(frozen: FrozenLinear, x: Tensor) -> Tensor:
    """The output; the stored weight, not the unpacked one, is kept for the gradient."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = frozen(x)
    assert {tensor.data_ptr() for tensor in kept} <= {buffer.data_ptr() for buffer in frozen.buffers()}
    return output


@pytest.mark.parametrize("form", ["int8", "int4", "float8"])
def test_a_frozen_linear_is_the_linear_of_its_weight(form: str):
    linear = linear_of()
    frozen = FrozenLinear(linear, form)
    x, gradient = torch.randn(2, 5, 128, requires_grad=True), torch.randn(2, 5, 96)
    output = call_keeping_only_stored(frozen, x)
    expected = nn.functional.linear(x, frozen.weight, linear.bias)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, gradient)[0] for y in (output, expected)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_float8_both_ways_is_exact_where_rounding_is(device: str):
    """-1, 0 and 1 in rows of their own scale: output and gradient are the plain linear's."""
    generator = torch.Generator().manual_seed(0)

    def ones(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(device, torch.bfloat16)

    linear = nn.Linear(128, 96, device=device, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(
        ones(96, 128) * torch.tensor(2.0, device=device) ** (torch.arange(96, device=device) % 4)[:, None]
    )
    linear.bias.copy_(ones(96))
    frozen = FrozenLinear(linear, "float8-both-ways")
    x, gradient = ones(2, 5, 128).requires_grad_(), ones(2, 5, 96)
    output = call_keeping_only_stored(frozen, x)
    expected = linear(x)
    near = {"rtol": 0, "atol": 1e-5 if device == "cpu" else 0.1}  # the GPU sums in some 14 bits
    torch.testing.assert_close(output, expected, **near)
    found, wanted = (torch.autograd.grad(out, x, gradient)[0] for out in (output, expected))
    torch.testing.assert_close(found, wanted, **near)
    assert sum(buffer.nbytes for buffer in frozen.buffers()) == 96 * 128 + 4 * 96, "the weight is stored once"


def test_float8_both_ways_is_as_near_as_rounding_allows():
    """3.7 %: each operand of a product is off by 2.6 % on average."""
    linear = linear_of()
    x, gradient = torch.randn(2, 64, 128, requires_grad=True), torch.randn(2, 64, 96)
    found, expected = FrozenLinear(linear, "float8-both-ways")(x), linear(x)
    off = [(found - expected).norm() / expected.norm()]
    found, expected = (torch.autograd.grad(y, x, gradient)[0] for y in (found, expected))
    off.append((found - expected).norm() / expected.norm())
    assert all(0.025 < one < 0.045 for one in off)


@pytest.mark.parametrize("precision", ["int8-torchao", "int4-torchao", "fp8-both-ways"])
def test_layers_compile_without_a_break(precision: str):
    """FLUX's layers return views of one tensor, which no tensor subclass may be an input beside."""
    model = flux()
    quantize(model, precision, "cpu")
    adapt(model)
    handle = tread.attach(model.train(), ROUTES)

    def gradients() -> list[Tensor]:
        handle.set_step(0)
        model.zero_grad()
        call_flux(model).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    eager = gradients()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.single_transformer_blocks[0].compile(dynamic=False, backend="aot_eager")
    rounded = precision == "fp8-both-ways"  # a last bit that differs may fall on the other side of a rounding
    for expected, found in zip(eager, gradients(), strict=True):
        if rounded:
            assert (found - expected).norm() <= 0.05 * expected.norm()
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", ["int8-torchao", "int4-torchao", "fp8wo-torchao"])
def test_compiled_layers_do_not_keep_what_they_unpacked(precision: str):
    def kept(precision: str | None) -> set[tuple[int, ...]]:
        """The shapes that the backward pass of a layer is given, its weights aside."""
        model = flux()
        if precision is not None:
            quantize(model, precision, "cpu")
        adapt(model)
        torch._dynamo.reset()
        model.train().single_transformer_blocks[0].compile(dynamic=False, backend="aot_eager")
        own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        shapes: set[tuple[int, ...]] = set()

        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                shapes.add(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            call_flux(model)
        torch._dynamo.reset()
        return shapes

    weights = {tuple(linear.weight.shape) for linear in layer_linears(flux()).values()}
    assert kept(None).isdisjoint(weights)
    assert kept(precision).isdisjoint(weights)


def test_float8_compute_needs_its_gpu():
    with pytest.raises(ConfigError, match=r"'fp8-torchao', which computes in float8 .* on cpu. Use 'fp8wo-torchao'"):
        check_precision("fp8-torchao", torch.device("cpu"))


def test_an_unknown_precision():
    with pytest.raises(ConfigError, match=r"base_model_precision is 'int8-torchoa'. Did you mean 'int8-torchao'\?"):
        quantize(flux(), "int8-torchoa", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", ["int8", "int4", "float8", "float8-compute", "float8-both-ways"])
def test_a_frozen_linear_on_a_gpu(form: str, compiled: bool):
    frozen = FrozenLinear(nn.Linear(1024, 512).to("cuda", torch.bfloat16).requires_grad_(False), form)
    x = torch.randn(2, 77, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(2, 77, 512, device="cuda", dtype=torch.bfloat16)
    expected = nn.functional.linear(x, frozen.weight, frozen.bias)
    output = torch.compile(frozen)(x) if compiled else frozen(x)
    assert (output - expected).norm() / expected.norm() < (0.06 if form.startswith("float8-") else 0.01)
    found, known = (torch.autograd.grad(y, x, gradient)[0] for y in (output, expected))
    assert (found - known).norm() / known.norm() < (0.06 if form == "float8-both-ways" else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [*EXPECTED, *FLOAT8_COMPUTE])
def test_on_a_gpu(precision: str):
    if precision.endswith("bnb"):
        pytest.importorskip("bitsandbytes")
    model = flux().to(torch.bfloat16)
    with torch.no_grad():
        exact = call_flux(model, torch.bfloat16).float()
    quantize(model, precision, "cuda")
    adapt(model)
    model.cuda().train()
    with torch.autocast("cuda", torch.bfloat16):
        output = call_flux(Moved(model), torch.bfloat16)
        output.float().square().sum().backward()
    assert (output.float().cpu() - exact).norm() / exact.norm() < 0.4
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


class Moved(nn.Module):
    """Calls a model on the GPU with inputs from the CPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> Any:
        return self.model(**{n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})
