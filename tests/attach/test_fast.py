"""`handle.compile()` in a loop of anyone's: the same gradients, whatever changes in between; nothing is left behind.

On a CPU layers are traced, which takes seconds, instead of compiled; graphs need a GPU. Where gradients and what is
saved are not the point, the backward pass is not traced either.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as lowering
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.attach.attached import BY_NAME, FLUX, ROUTES, Attach
from tests.attach.selected import route
from tests.attach.steps import DEVICES, LORA, TRACED, adapted, assert_same, inputs_of, options, step
from tread.around import around
from tread.kernels import fast, graphs
from tread.kernels.compiling import CompiledLayer
from tread.kernels.experts import MIXTURES, AllExperts
from tread.routing import noise

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ["flux", "sd3", "wan", "qwenimage", "flux2", "z-image", "hidream-image"]
FIRST = ["wan"]
"""What `make test` compiles checkpointed on a CPU; `make contract` takes every family."""
QWEN = BY_NAME["qwenimage"]
FORWARD: dict[str, Any] = {"backend": "eager"}


@pytest.fixture(autouse=True)
def fresh(attach: Attach) -> Iterator[None]:
    """Everything is detached, and then nothing is compiled any more."""
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [
        ("flux", False),
        *(pytest.param(name, True, marks=[] if name in FIRST else [pytest.mark.contract]) for name in FAMILIES),
    ],
)
def test_the_gradients_are_those_of_the_eager_model(name: str, checkpointed: bool, device: str, attach: Attach) -> None:
    case = BY_NAME[name]
    model, inputs = adapted(case, device), inputs_of(case, device)
    if checkpointed:
        model.enable_gradient_checkpointing()
    handle = attach(model, ROUTES)
    numbers = range(graphs.CALLS + 3)
    expected = [step(case, model, handle, inputs, number) for number in numbers]
    assert handle.compile(**options(device)) is handle
    for number in numbers:
        assert_same(step(case, model, handle, inputs, number), expected[number], 1e-4 if device == "cpu" else 2e-3)
    assert handle.fast is not None
    assert not handle.fast.failed
    if device == "cuda":
        assert handle.fast.graphs is not None
        assert handle.fast.graphs.count == 1


def test_the_models_own_switch_decides_about_checkpointing(attach: Attach) -> None:
    """Call by call, and the recomputation is within the compiled code."""
    model, inputs = adapted(QWEN), inputs_of(QWEN, "cpu")
    handle = attach(model, {"routes": [route(0, -1)]}).compile(**TRACED)
    code = [layer._compiled_call_impl for layer in model.transformer_blocks]
    saved = []
    for on in (False, True, False):
        model.enable_gradient_checkpointing() if on else model.disable_gradient_checkpointing()
        seen: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x.numel()) or x, lambda x: x):
            handle.set_step(0)
            prediction = QWEN.call(model, inputs)
        prediction.sum().backward()
        saved.append(len(seen))
    assert saved[1] < saved[0] == saved[2]
    assert all(isinstance(one, CompiledLayer) for one in code)


@pytest.fixture
def as_torch_sets_them(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's limits, whatever other tests have raised them to, or left to be restored with a freed model."""
    monkeypatch.setattr(fast, "SETTINGS", fast.Settings())
    limits = torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256)
    with limits, lowering.patch(force_non_lazy_backward_lowering=False):
        yield


@pytest.mark.usefixtures("as_torch_sets_them")
def test_detach_leaves_nothing_behind(attach: Attach) -> None:
    from torch._dynamo import config as limits

    def settings() -> tuple[Any, ...]:
        sdpa = F.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled()
        limit = limits.recompile_limit, limits.accumulated_recompile_limit, lowering.force_non_lazy_backward_lowering
        return *sdpa, *limit, noise.draw_two

    model, other, inputs = adapted(FLUX), adapted(FLUX), inputs_of(FLUX, "cpu")
    before, stock = settings(), {name: dict(vars(module)) for name, module in model.named_modules()}
    handle, beside = attach(model, ROUTES).compile(**FORWARD), attach(other, ROUTES).compile(**FORWARD)
    step(FLUX, model, handle, inputs)
    assert settings() != before
    handle.detach()
    assert settings() != before, "another model still needs them"
    beside.detach()
    assert settings() == before
    for name, module in model.named_modules():
        now = vars(module)
        assert now.keys() == stock[name].keys(), name
        assert now.get("_compiled_call_impl") is None


def test_mixtures_of_experts_compute_at_fixed_shapes_until_detached(attach: Attach) -> None:
    case = BY_NAME["hidream-image"]
    model = case.build()
    mixtures = [one for one in model.modules() if type(one).__name__ in MIXTURES]
    assert mixtures
    handle = attach(model, ROUTES).compile(**TRACED)
    assert all(isinstance(around(one), AllExperts) for one in mixtures)
    handle.detach()
    assert not any(around(one) for one in mixtures)


def test_validation_between_steps_runs_eager(attach: Attach) -> None:
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    handle = attach(model, ROUTES)
    counter = CompileCounterWithBackend("eager")
    handle.compile(backend=counter)
    step(FLUX, model, handle, inputs)
    count = counter.frame_count
    model.eval()
    with torch.no_grad():
        FLUX.call(model, inputs_of(FLUX, "cpu", batch=1))
    model.train()
    step(FLUX, model, handle, inputs)
    assert counter.frame_count == count


def test_checkpointing_is_within_code_that_the_user_compiled(attach: Attach) -> None:
    """So a step has no more calls of compiled code than without checkpointing."""
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        return lambda *args: calls.append(1) or graph(*args)

    model, inputs = adapted(QWEN), inputs_of(QWEN, "cpu")
    handle = attach(model, ROUTES)
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    counts = []
    for on in (False, True):
        model.enable_gradient_checkpointing() if on else model.disable_gradient_checkpointing()
        step(QWEN, model, handle, inputs)
        calls.clear()
        step(QWEN, model, handle, inputs)
        counts.append(len(calls))
    assert counts[0] == counts[1] == len(handle.layers)


def test_a_checkpoint_function_of_the_users_own_is_left_alone(attach: Attach) -> None:
    model, inputs = adapted(QWEN), inputs_of(QWEN, "cpu")
    calls: list[Any] = []

    def mine(block: Any, *args: Any) -> Any:
        calls.append(block)
        return checkpoint(block, *args, use_reentrant=False)

    model.enable_gradient_checkpointing(mine)
    handle = attach(model, ROUTES)
    expected = step(QWEN, model, handle, inputs)
    handle.compile(**FORWARD)
    calls.clear()
    assert_same(step(QWEN, model, handle, inputs), expected)
    assert len(calls) == len(handle.layers)


def test_no_compiler_no_harm(capsys: pytest.CaptureFixture[str], attach: Attach) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    model.enable_gradient_checkpointing()
    handle = attach(model, ROUTES)
    expected = step(FLUX, model, handle, inputs)
    handle.compile(backend=broken)
    for _ in range(2):
        assert_same(step(FLUX, model, handle, inputs), expected)
    assert capsys.readouterr().out.count("compiling failed, so the run goes on without it") == 1


def test_an_adapter_may_come_later(attach: Attach) -> None:
    torch.manual_seed(0)
    model: Any = FLUX.model().requires_grad_(False).train()
    handle = attach(model, ROUTES).compile(**FORWARD)
    model.add_adapter(LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    found = step(FLUX, model, handle, inputs_of(FLUX, "cpu"))
    handle.detach()
    handle = attach(model, ROUTES)
    assert_same(found, step(FLUX, model, handle, inputs_of(FLUX, "cpu")))
    assert found[1]


@pytest.mark.gpu
def test_eager_checkpointed_layers_are_advised_once(attach: Attach) -> None:
    model, inputs = adapted(FLUX, "cuda"), inputs_of(FLUX, "cuda")
    model.enable_gradient_checkpointing()
    handle = attach(model, ROUTES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(FLUX, model, handle, inputs)
    assert sum("add handle.compile() after tread.attach" in str(one.message) for one in caught) == 1


@pytest.mark.gpu
def test_graphs_follow_whatever_changes_on_the_python_side(attach: Attach) -> None:
    """Each state, come to from any other, gives what the eager model gives in it; outputs are copies."""
    model = adapted(FLUX, "cuda", adapter_name="one")
    model.add_adapter(LORA, adapter_name="two")
    for name, parameter in model.named_parameters():
        if "lora_B.two" in name:
            nn.init.normal_(parameter, std=0.1)
    inputs, short = inputs_of(FLUX, "cuda"), inputs_of(FLUX, "cuda", batch=1)
    layers = [module for module in model.modules() if hasattr(module, "scaling")]

    def scale(value: float) -> None:
        for layer in layers:
            for name in layer.scaling:
                layer.scaling[name] = value

    mask = torch.zeros(2, 16, dtype=torch.bool, device="cuda")
    mask[:, :3] = True
    states: dict[str, Callable[[], Any]] = {
        "one": lambda: (model.set_adapter("one"), scale(1.0)),
        "two": lambda: (model.set_adapter("two"), scale(1.0)),
        "scaled": lambda: (model.set_adapter("one"), scale(0.5)),
        "both": lambda: (model.set_adapter(["one", "two"]), scale(1.0)),
    }
    handle = attach(model, ROUTES)

    def run(name: str, number: int, inputs: dict[str, Any]) -> Any:
        states[name]()
        with handle.force_keep(mask) if name == "scaled" and number == 1 and inputs is not short else handle.routed():
            return step(FLUX, model, handle, inputs, number)

    kinds = [(name, given) for name in states for given in (inputs, short)]
    # peft changes requires_grad with the adapter, so graphs of another adapter start anew: each runs for a while
    order = [(name, number % 2, given) for _ in range(2) for name, given in kinds for number in range(graphs.CALLS + 3)]
    expected = [run(*one) for one in order]
    handle.compile(attention="math", graphs=True)
    outputs = []
    for one, other in zip(order, expected, strict=True):
        found = run(*one)
        assert_same(found, other, 2e-3)
        outputs.append(found[0])
    for out, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out, other[0], rtol=2e-3, atol=2e-3)
    fast = handle.fast
    assert fast is not None
    assert fast.graphs is not None
    assert not fast.failed
    assert fast.graphs.count


@pytest.mark.gpu
def test_memory_is_given_back_and_taken_again(attach: Attach) -> None:
    model, inputs = adapted(FLUX, "cuda"), inputs_of(FLUX, "cuda")
    handle = attach(model, ROUTES).compile(attention="math", graphs=True)
    found = [step(FLUX, model, handle, inputs) for _ in range(graphs.CALLS + 2)][-1]
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    handle.release_graphs()
    assert torch.cuda.memory_reserved() < held
    assert_same(step(FLUX, model, handle, inputs), found, 2e-3)
    fast = handle.fast
    assert fast is not None
    assert fast.graphs is not None
    assert fast.graphs.count == 1, "captured at once: it was warm"
