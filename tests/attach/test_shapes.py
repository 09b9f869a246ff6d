"""Many shapes in one loop: compilations and graphs stay few, and no layer falls back to eager code."""

import random
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from tests.attach.attached import BY_NAME, FLUX, ROUTES, Attach
from tests.attach.steps import DEVICES, adapted, assert_same, inputs_of, options, step
from tread.attach import static
from tread.kernels import graphs
from tread.kernels.fast import SETTINGS

pytestmark = pytest.mark.filterwarnings("ignore")
QWEN = BY_NAME["qwenimage"]
BUCKETS, SHAPES = 12, 1
SECOND = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}
"""The first layer's input needs no gradient, so its code is not the second one's."""


@pytest.fixture(autouse=True)
def strict(attach: Attach) -> Iterator[None]:
    """Code that is compiled too often fails instead of running eager; torch's own limit is no help."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        yield
    torch._dynamo.reset()


def streams(inputs: dict[str, Any], rows: int, columns: int, text: int) -> dict[str, Any]:
    """The inputs of one sample with an image and a prompt of other sizes."""
    image, prompt = (inputs[name].shape[-1] for name in ("hidden_states", "encoder_hidden_states"))
    sizes = {"hidden_states": (1, rows * columns, image), "encoder_hidden_states": (1, text, prompt)}
    return inputs | {name: torch.randn(size) for name, size in sizes.items()}


def flux_inputs(rows: int, columns: int, text: int) -> dict[str, Any]:
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float())
    return streams(FLUX.inputs(1), rows, columns, text) | {"img_ids": places, "txt_ids": torch.zeros(text, 3)}


def qwen_inputs(rows: int, columns: int, text: int) -> dict[str, Any]:
    mask = torch.arange(text)[None] < text - 1
    others = {"encoder_hidden_states_mask": mask, "img_shapes": [[(1, rows, columns)]]}
    return streams(QWEN.inputs(1), rows, columns, text) | others


def z_image_inputs(rows: int, columns: int, text: int) -> dict[str, Any]:
    inputs = BY_NAME["z-image"].inputs(1)
    channels, wide = inputs["x"].shape[1], inputs["cap_feats"][0].shape[-1]
    return inputs | {
        "x": torch.randn(1, channels, 1, 2 * rows, 2 * columns),
        "cap_feats": [torch.randn(8 * text, wide)],  # the model rounds it up to a multiple of 32
    }


INPUTS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "flux": flux_inputs,
    "qwenimage": qwen_inputs,
    "z-image": z_image_inputs,
}


def buckets(name: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Inputs in `count` sizes, with prompts of random lengths."""
    draw = random.Random(seed)
    return [INPUTS[name](2 + index % 6, 4 + 3 * (index // 6), draw.randrange(3, 9)) for index in range(count)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [pytest.param("flux", True, marks=pytest.mark.contract), ("qwenimage", False), ("z-image", True)],
)
def test_many_shapes_keep_the_compilations_few(
    name: str, checkpointed: bool, device: str, capsys: pytest.CaptureFixture[str], attach: Attach
) -> None:
    case, model = BY_NAME[name], adapted(BY_NAME[name], device)
    if checkpointed:
        model.enable_gradient_checkpointing()
    handle = attach(model, SECOND if name == "flux" else ROUTES)
    counter = CompileCounterWithBackend("eager")

    def run(inputs: dict[str, Any]) -> Any:
        return step(case, model, handle, pytree.tree_map_only(Tensor, lambda x: x.to(device), inputs))

    first, again, more = buckets(name, BUCKETS), buckets(name, BUCKETS, seed=1), buckets(name, BUCKETS + 4, seed=2)
    expected = [run(inputs) for inputs in first + again]
    handle.compile(**options(device) | {"backend": counter, "shapes": SHAPES})
    for inputs, one in zip(first + again, expected, strict=True):
        assert_same(run(inputs), one, 1e-4 if device == "cpu" else 2e-3)
    classes, gradients, any_shape = 2, 2, 2  # rotary embeddings of all samples or of each
    assert counter.frame_count <= classes * gradients * (SHAPES + any_shape)
    count = counter.frame_count
    for inputs in more[BUCKETS:]:
        run(inputs)
    assert counter.frame_count == count, "code for any shape serves new ones"
    said = capsys.readouterr().out
    assert said.count(f"layers saw more than {SHAPES} shapes: further ones share code for any shape, slower.") == 1
    assert "failed" not in said


@pytest.mark.gpu
def test_graphs_are_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], attach: Attach
) -> None:
    monkeypatch.setattr(graphs, "MOST", 5)
    model = adapted(FLUX, "cuda")
    handle = attach(model, ROUTES).compile(attention="math", backend="eager")
    for _ in range(graphs.CALLS + 2):
        for inputs in buckets("flux", 8):
            step(FLUX, model, handle, pytree.tree_map_only(Tensor, lambda x: x.cuda(), inputs))
    fast = handle.fast
    assert fast is not None
    assert fast.graphs is not None
    assert fast.graphs.count == 5
    assert capsys.readouterr().out.count("there are CUDA graphs for 5 call signatures; further ones run without") == 1


def test_shapes_of_validation_take_no_room(capsys: pytest.CaptureFixture[str], attach: Attach) -> None:
    """In training mode too, as some scripts leave the model."""
    model = adapted(QWEN)
    handle = attach(model, ROUTES).compile(backend="eager", shapes=2)
    with torch.no_grad():
        for inputs in buckets("qwenimage", 3):
            QWEN.call(model, inputs)
    step(QWEN, model, handle, inputs_of(QWEN, "cpu"))
    assert "share code for any shape" not in capsys.readouterr().out


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.contract), True])
def test_code_that_the_user_compiled_is_static(checkpointed: bool, late: bool, attach: Attach) -> None:
    """With `dynamic` left alone, torch would compile the second length, the routed one, for any length."""
    symbols: list[bool] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        symbols.append(any(isinstance(one, torch.SymInt) for one in examples))
        return graph.forward

    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    if checkpointed:
        model.enable_gradient_checkpointing()
    handle = attach(model, ROUTES)
    expected = step(FLUX, model, handle, inputs)
    handle.detach()
    if late:
        handle = attach(model, ROUTES)
    model.compile_repeated_blocks(backend=backend)
    if not late:
        handle = attach(model, ROUTES)
    for _ in range(2):
        assert_same(step(FLUX, model, handle, inputs), expected)
        with handle.dense():
            step(FLUX, model, handle, inputs)
    assert symbols
    assert not any(symbols)
    count = len(symbols)
    step(FLUX, model, handle, inputs)
    assert len(symbols) == count


@torch._dynamo.config.patch(recompile_limit=8)
def test_many_lengths_share_code_that_the_user_compiled(monkeypatch: pytest.MonkeyPatch, attach: Attach) -> None:
    """So that torch's limit of variants holds, past which it would run eager; prompts count too."""
    monkeypatch.setattr(static, "STATIC_SHAPES", 2)
    limits, static_code = torch._dynamo.config, list[bool]()
    # as in a process of its own: models of other tests may still hold its settings
    monkeypatch.setattr(SETTINGS, "_users", WeakSet())
    monkeypatch.setattr(SETTINGS, "_restore", [])

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        static_code.append(not any(isinstance(one, torch.SymInt) for one in examples))
        return graph.forward

    model = adapted(QWEN)
    handle = attach(model, ROUTES)
    model.compile_repeated_blocks(backend=backend)
    for inputs in buckets("qwenimage", 3):
        step(QWEN, model, handle, inputs)
    dense, routed = 2, 1  # the first layer's input needs no gradient
    assert sum(static_code) == dense + routed, "the first bucket has two shapes, so others share code for any"
    count = len(static_code)
    for inputs in buckets("qwenimage", 6, seed=1)[3:]:
        step(QWEN, model, handle, inputs)
    assert len(static_code) == count
    assert limits.recompile_limit == static.RECOMPILE_LIMIT
    handle.detach()
    assert limits.recompile_limit == 8
