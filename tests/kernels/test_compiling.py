"""Compiling layers: one function for every trainer, bounded shapes, and a run that goes on where it fails.

Checkpointing within compiled layers: what they keep is seen by torch's hooks on saved tensors.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as lowering
from torch.nn import functional as F

import tread
from tests.programs import ROOT, run
from tests.tiny.runs import ROUTE, TINY, make_session
from tread.kernels.attention import cudnn
from tread.kernels.attention.kernel import use_attention
from tread.kernels.compiling import (
    Attempt,
    CompiledLayer,
    compile_layers,
    compile_noise,
    compiles,
    lengths,
    raise_recompile_limit,
)
from tread.models import DiT
from tread.routing import noise
from tread.routing.plan import RoutePlan

ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}]}

FIRST, SECOND = ROUTES["routes"][0], {"selection_ratio": 0.5, "start_layer_idx": 4, "end_layer_idx": 5}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.linear(hidden_states).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(hidden_states=x)
        return x


FAMILY = tread.Family(models=("Model",), stacks=(tread.Stack(name="layers"),))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    limits = torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256)
    with limits, lowering.patch(force_non_lazy_backward_lowering=False, activation_memory_budget=1.0):
        yield
    torch._dynamo.reset()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_auto_is_on_for_gpus() -> None:
    for device, expected in (("cuda", True), ("cpu", False), ("mps", False)):
        assert compiles("auto", torch.device(device)) is expected
        assert compiles(True, torch.device(device)) is True
        assert compiles(False, torch.device(device)) is False


@pytest.mark.parametrize(
    ("config", "masked", "expected"),
    [
        (None, False, 1),
        (ROUTES, False, 2),
        (ROUTES, True, 18),
        ({"routes": [FIRST, SECOND]}, False, 2),
        ({"routes": [FIRST, SECOND | {"selection_ratio": 0.25}]}, False, 3),
        (ROUTES | {"schedule": {"warmup_steps": 10, "levels": 4}}, False, 5),
        (ROUTES | {"schedule": {"cooldown_fraction": 0.1}}, False, 2),
    ],
)
def test_lengths_of_a_plan(config, masked: bool, expected: int) -> None:
    assert lengths(None if config is None else RoutePlan.from_config(config), masked=masked) == expected


def test_the_lengths_that_are_seen_are_as_many_as_were_said() -> None:
    """Every length a run meets, against `lengths`; torch's limit must hold them all."""
    # the first layer's input needs no gradient, so it has code of its own for every length
    first = {"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": 2}
    plan = RoutePlan.from_config({"routes": [first], "schedule": {"warmup_steps": 16, "levels": 16}})
    model, said = Model().train(), []
    frames = CompileCounter()
    handle = tread.attach(model, plan, family=FAMILY)
    compile_layers(list(model.layers), shapes=lengths(plan), say=said.append, backend=frames)
    assert lengths(plan) > 8, "beyond torch's own limit"
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for step in range(20):
            handle.set_step(step)
            gradients(model, torch.randn(2, 64, 4))
    assert lengths(plan) <= frames.frame_count <= 2 * lengths(plan)
    assert said == [f"4 layers will be compiled when first run, for up to {lengths(plan)} shapes each."]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(20):
            handle.set_step(step)
            gradients(model, torch.randn(2, 64, 4))


def test_each_sort_of_layer_has_its_own_shapes() -> None:
    said: list[str] = []
    attempt = Attempt(said.append, shapes=1)
    assert attempt.admit("block", 64)
    assert attempt.admit("block", 64)
    assert not attempt.admit("block", 32)
    assert attempt.admit("single block", 32)
    assert not attempt.admit("single block", 64)
    assert said == ["layers saw more than 1 shapes: further ones share code for any shape, slower."]


def test_limits_are_raised_and_never_lowered() -> None:
    limits = torch._dynamo.config
    for needed, expected in ((300, 300), (9, 300)):
        raise_recompile_limit(needed)
        assert (limits.recompile_limit, limits.accumulated_recompile_limit) == (expected, expected)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_where_compiling_fails_the_layers_run_as_they_are(attached: bool, checkpointed: bool) -> None:
    """Or checkpointed by torch, which calls each layer's code again in the backward pass."""
    plain = Model().train()
    model, said, runs, tries = copy.deepcopy(plain), [], [], []
    for one in (plain, model) if attached else ():
        tread.attach(one, ROUTES, family=FAMILY)
    layers = list(model.layers)

    def broken(*_: Any) -> Any:
        tries.append(1)
        raise RuntimeError("no compiler here\nand much more")

    attempt = compile_layers(layers, shapes=2, checkpointed=checkpointed, say=said.append, backend=broken)
    x = torch.randn(2, 8, 4)
    for one in (model, plain):
        gradients(one, x)
    assert attempt.failed
    assert len(tries) == 1
    for name, module in model.named_modules():
        if name.endswith("linear"):
            module.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(2):
        runs.clear()
        found, expected = gradients(model, x), gradients(plain, x)
        assert all(found[name].equal(expected[name]) for name in expected)
        assert len(runs) == (8 if checkpointed else 4)
    assert len(said) == 2, "one line at the start, one about the failure"
    assert said[1] == ("compiling failed, so the run goes on without it, slower (RuntimeError: no compiler here).")


def test_a_backward_that_cannot_be_compiled_fails_before_the_step() -> None:
    def backward(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        raise RuntimeError("no backward")

    forward_alone = aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward)
    plain = Model().train()
    model, said = copy.deepcopy(plain), []
    compile_layers(list(model.layers), shapes=2, say=said.append, backend=forward_alone)
    x = torch.randn(2, 8, 4)
    found, expected = gradients(model, x), gradients(plain, x)
    assert all(found[name].equal(expected[name]) for name in expected)
    assert "no backward" in said[1]


def block_of(model: DiT) -> tuple[nn.Module, list[Tensor]]:
    """Its layer, no parameter at zero, and inputs that want gradients."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    assert model.rope_table is not None
    return model.blocks[0], [
        torch.randn(2, 16, 32).requires_grad_(),
        torch.randn(2, 32).requires_grad_(),
        model.rope_table,
    ]


def step(block: nn.Module, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What the forward kept, parameters aside, and all gradients."""
    kept: list[Tensor] = []
    wanted = [*inputs[:2], *block.parameters()]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = block(*inputs)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    found = [*torch.autograd.grad(out.sin().sum(), wanted)]
    return [x for x in kept if x.untyped_storage().data_ptr() not in own], found


@pytest.mark.parametrize("by_cudnn", [False, True], ids=["torch", "operator"])
def test_a_checkpointed_layer_keeps_its_inputs_alone(by_cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's operator is no exception, and gradients are those of the layer as it is."""
    torch.manual_seed(0)
    model = DiT(
        input_size=4, patch=1, in_channels=1, depth=1, width=32, heads=2, num_classes=3, rope=True, qk_norm=True
    )
    block, inputs = block_of(model.train())
    expected = step(block, inputs)[1]
    monkeypatch.setattr(cudnn, "fits", lambda *_: True)
    use_attention("cudnn" if by_cudnn else "default", torch.device("cuda"))
    try:
        names = {x.untyped_storage().data_ptr() for x in inputs}
        for checkpointed in (False, True):
            torch._dynamo.reset()
            # the partitioner decides what is kept; this backend runs what it decided without generating code
            options = {"backend": "aot_eager_decomp_partition", "fullgraph": True}
            said: list[str] = []
            attempt = compile_layers([block], shapes=1, checkpointed=checkpointed, say=said.append, **options)
            saved, found = step(block, inputs)
            assert not attempt.failed
            # torch's own attention has dropout, so the generator's state is kept with it, some bytes
            saved = [x for x in saved if x.dtype != torch.uint8]
            others = [x for x in saved if x.untyped_storage().data_ptr() not in names]
            assert len(others) == 0 if checkpointed else len(others) > 10
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    finally:
        use_attention("default", torch.device("cuda"))


class Product(torch.autograd.Function):
    """With its own gradient, as those with packed weights have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight.t(), None


def test_a_function_with_its_own_gradient_is_computed_again_too() -> None:
    class Layer(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x.sin(), self.weight).tanh() * 2  # pyright: ignore[reportAttributeAccessIssue]

    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    attempt = compile_layers([layer], shapes=1, checkpointed=True, say=lambda _: None, backend="aot_eager")
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda x: x):
        out = layer(x)
    assert not attempt.failed
    assert set(kept) <= {x.data_ptr(), layer.weight.data_ptr()}
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_trainer_checkpoints_one_way(checkpointed: bool, compiled: bool, tmp_path: Path) -> None:
    """Within compiled layers, or around others; never both."""
    switches = [f"train.compile={compiled}".lower(), f"train.checkpointing={checkpointed}".lower()]
    task, _ = make_session(tmp_path, *switches)
    assert task.model.checkpointing is (checkpointed and not compiled)
    call = getattr(task.model.blocks[0], "_compiled_call_impl", None)
    assert getattr(call, "checkpointed", None) is (checkpointed if compiled else None)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_a_checkpointed_layer_draws_the_same_numbers_again(backend: str) -> None:
    """Where dropout zeroed an output, it zeroes the gradient."""

    class Dropped(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return F.dropout(hidden_states.sin(), 0.5, training=True)

    torch.manual_seed(0)
    layer, x = Dropped(), torch.rand(64, 8).add(0.1).requires_grad_()
    attempt = compile_layers([layer], shapes=1, checkpointed=True, say=lambda _: None, backend=backend)
    for _ in range(2):
        out = layer(hidden_states=x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert (out == 0).equal(gradient == 0)
        assert 0.3 < (out == 0).float().mean() < 0.7
    assert not attempt.failed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_noise_has_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.arange(3, 35, device=device)
    expected = [noise.per_sample_normal(seed, index, (4, 6, 6), word) for seed, word in ((0, 1), (7, 1), (7, 2))]
    monkeypatch.setattr(noise, "draw_two", noise.two_uniforms)  # put back afterwards
    said: list[str] = []
    compile_noise(Attempt(said.append))
    found = [noise.per_sample_normal(seed, index, (4, 6, 6), word) for seed, word in ((0, 1), (7, 1), (7, 2))]
    assert not said, "it was compiled"
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_errors_of_the_model_itself_are_not_hidden() -> None:
    model = Model().train()
    compile_layers(list(model.layers), shapes=2, say=lambda _: None, backend="eager")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(2, 8, 5))


def test_errors_of_compiled_code_are_not_hidden() -> None:
    """Eager code would need more memory, not less."""

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    model = Model().train()
    attempt = compile_layers(list(model.layers), shapes=2, say=lambda _: None, backend=lambda *_: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        model(torch.randn(2, 8, 4))
    assert not attempt.failed


def test_names_stay_and_copies_are_plain() -> None:
    model = Model()
    names = list(model.state_dict())
    compile_layers(list(model.layers), shapes=1, say=lambda _: None, backend="eager")
    assert list(model.state_dict()) == names
    assert isinstance(model.layers[0]._compiled_call_impl, CompiledLayer)
    assert copy.deepcopy(model).layers[0]._compiled_call_impl is None


def test_the_trainer_says_how_many_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"routes": [ROUTE], "schedule": {"warmup_steps": 6, "levels": 3}}
    task, _ = make_session(tmp_path, "train.compile=true", f"model.tread_config={json.dumps(plan)}")
    assert all(isinstance(block._compiled_call_impl, CompiledLayer) for block in task.model.blocks)
    assert "5 layers will be compiled when first run, for up to 4 shapes each." in capsys.readouterr().out


def test_without_a_compiler_a_run_goes_on(tmp_path: Path) -> None:
    """The real thing: inductor on a machine where no C++ compiler is found."""
    settings = [*TINY, "train.steps=2", "train.compile=true", f"output_dir={tmp_path / 'run'}"]
    said = run(ROOT / "train.py", *settings, CXX="/nowhere/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert said.count("compiling failed, so the run goes on without it, slower (") == 1
