"""Compiled models: routing adds no graph break, no recompilation when the step changes, and changes no number."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import tread
from tests.attach.selected import cases_of, inner
from tests.tiny.case import Case
from tests.tiny.stock import CASES
from tests.tiny.toy import DEPTH, FAMILY, Toy, inputs

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before, nothing left behind."""
    fresh_count()
    yield
    torch._dynamo.reset()


def fresh_count(backend: str = "aot_eager") -> Any:
    """A counting backend; what was compiled and counted before is forgotten."""
    torch._dynamo.reset()
    counters.clear()
    return CompileCounterWithBackend(backend)


def breaks() -> set[str]:
    """Reasons of graph breaks, without the names of graph inputs: torch takes those from the compiled function's
    arguments, and a hook calls its own `kwargs`."""
    return {re.sub(r"\bl_\w+", "input", reason, flags=re.IGNORECASE) for reason in counters["graph_break"]}


def compile_layers(case: Case, model: nn.Module, **options: Any) -> None:
    """As the docs say: by the class's own method where it lists its layers, else one by one."""
    if getattr(model, "_repeated_blocks", None):
        model.compile_repeated_blocks(**options)  # pyright: ignore[reportCallIssue]
    for _, layer in case.layers(model):
        if layer._compiled_call_impl is None:
            layer.compile(**options)


def run(
    case: Case, call: Callable[[dict[str, Any]], Tensor], handle: tread.Attachment | None, count: Any
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Outputs and first selections of a few steps, forward and backward, and the graphs compiled after each."""
    outputs, selections, graphs = [], [], []
    for step in range(STEPS):
        if handle is not None:
            handle.set_step(step)
        output = call(case.inputs(case.batch))
        output.square().sum().backward()
        outputs.append(output.detach())
        graphs.append(count.frame_count)
        if handle is not None:
            selections.append(handle.selections[0])
    return outputs, selections, graphs


class _None:
    frame_count = 0


def eager(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    model = case.model()
    with tread.attach(model, {"routes": inner(case.depth)}) as handle:
        outputs, selections, _ = run(case, lambda arguments: case.call(model, arguments), handle, _None())
    return outputs, selections


def assert_as_eager(case: Case, outputs: list[Tensor], selections: list[Tensor]) -> None:
    expected, expected_selections = eager(case)
    torch.testing.assert_close(selections, expected_selections, rtol=0, atol=0)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


@cases_of(["pixart"])  # no rope; compiling takes long, and FLUX has tests of its own
def test_compiled_layers(case: Case):
    """Each kind of layer is compiled at one more length and nothing else; the window opens outside compiled code.

    Layers are one graph each: in pieces, experts are compiled for every number of tokens that a router gives them.
    """
    dense, dense_count = case.model(), fresh_count("eager")
    compile_layers(case, dense, backend=dense_count, dynamic=False, fullgraph=True)
    _, _, dense_graphs = run(case, lambda arguments: case.call(dense, arguments), None, dense_count)

    model, count = case.model(), fresh_count()
    with tread.attach(model, {"routes": inner(case.depth)}) as handle:
        compile_layers(case, model, backend=count, dynamic=False, fullgraph=True)
        outputs, selections, graphs = run(case, lambda arguments: case.call(model, arguments), handle, count)
    assert graphs[0] <= 2 * dense_graphs[0]
    assert graphs[-1] - graphs[0] <= dense_graphs[-1] - dense_graphs[0], "compiled again when the step changed"
    assert_as_eager(case, outputs, selections)


def whole(case: Case, model: nn.Module, count: Any, *, fullgraph: bool) -> Callable[[dict[str, Any]], Tensor]:
    def forward(**arguments: Any) -> Any:
        return model(**arguments)

    compiled: Any = torch.compile(forward, backend=count, fullgraph=fullgraph, dynamic=False)
    return lambda arguments: case.call(compiled, arguments)


@cases_of(["wan-ti2v"])  # rope and modulation by token
def test_a_compiled_model(case: Case):
    """Where the dense model is one graph, so is the routed one; where it is not, routing breaks it nowhere else."""
    if "compile" in case.defects:
        pytest.xfail(case.defects["compile"])
    dense, dense_count, fullgraph = case.model(), fresh_count("eager"), True
    try:
        _, _, dense_graphs = run(case, whole(case, dense, dense_count, fullgraph=True), None, dense_count)
    except TorchDynamoException:  # the stock forward reads numbers from the device
        fullgraph, dense_count = False, fresh_count("eager")
        _, _, dense_graphs = run(case, whole(case, dense, dense_count, fullgraph=False), None, dense_count)
    dense_breaks = breaks()

    model, count = case.model(), fresh_count()
    with tread.attach(model, {"routes": inner(case.depth)}) as handle:
        call = whole(case, model, count, fullgraph=fullgraph)
        outputs, selections, graphs = run(case, call, handle, count)
    if fullgraph:
        assert graphs == [1] * STEPS
    if "graphs" not in case.defects:
        # where the stock forward breaks the graph, the hook on the model is compiled by itself
        assert graphs[0] <= dense_graphs[0] + (0 if fullgraph else 1)
        assert graphs[1] - graphs[0] <= dense_graphs[1] - dense_graphs[0], "compiled again when the step changed"
    assert graphs[-1] - graphs[1] <= dense_graphs[-1] - dense_graphs[1], "compiled again when the step changed"
    assert breaks() <= dense_breaks
    assert_as_eager(case, outputs, selections)


FLUX = next(case for case in CASES if case.name == "flux")


@pytest.mark.parametrize("way", ["model.compile()", pytest.param("torch.compile(model)", marks=pytest.mark.contract)])
@pytest.mark.parametrize("first", ["attach", "compile"])
def test_both_ways_to_compile_a_model(way: str, first: str):
    """The model is one graph as it is dense."""
    model, count = FLUX.model(), fresh_count("eager")

    def compiled(fullgraph: bool = True) -> Any:
        if way == "torch.compile(model)":
            return torch.compile(model, backend=count, fullgraph=fullgraph)
        model.compile(backend=count, fullgraph=fullgraph)
        return model

    routes = {"routes": inner(FLUX.depth), "reference_tokens": "route"}
    if first == "attach":
        handle = tread.attach(model, routes)
        called = compiled()
    else:
        called = compiled()
        handle = tread.attach(called, routes)
    outputs, selections, graphs = run(FLUX, lambda arguments: FLUX.call(called, arguments), handle, count)
    assert graphs == [1] * STEPS
    assert_as_eager(FLUX, outputs, selections)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.contract)])
def test_a_ratio_that_changes_in_a_compiled_model(dynamic: bool | None):
    """Torch compiles a number that changes for any value, which fails for a length that is computed from it."""
    model, eager_model, count = Toy(), Toy(), fresh_count("eager")
    config = {"routes": inner(DEPTH), "schedule": {"warmup_steps": 2, "levels": 2}}
    compiled: Any = torch.compile(model, backend=count, dynamic=dynamic)
    with (
        tread.attach(model, config, family=FAMILY) as handle,
        tread.attach(eager_model, config, family=FAMILY) as other,
    ):
        for step in (0, 1, 2, 3):
            handle.set_step(step)
            other.set_step(step)
            torch.testing.assert_close(compiled(**inputs()), eager_model(**inputs()))
        with handle.routed(0.75, step=4), other.routed(0.75, step=4):
            torch.testing.assert_close(compiled(**inputs()), eager_model(**inputs()))


@pytest.mark.parametrize("first", ["attach", "compile"])
def test_compiled_layers_take_dense_and_routed_forwards_by_turns(first: str):
    """A compiled layer has no routing inside, whichever came first; detached, it goes on compiled."""
    expected, _ = eager(FLUX)
    model, count = FLUX.model(), fresh_count("eager")
    if first == "compile":
        compile_layers(FLUX, model, backend=count, dynamic=False)
    handle = tread.attach(model, {"routes": inner(FLUX.depth)})
    if first == "attach":
        compile_layers(FLUX, model, backend=count, dynamic=False)
    with handle.dense():
        dense = FLUX.call(model, FLUX.inputs(2))
    dense_graphs = count.frame_count
    handle.set_step(0)
    torch.testing.assert_close(FLUX.call(model, FLUX.inputs(2)).detach(), expected[0], rtol=1e-5, atol=1e-5)
    assert count.frame_count <= 2 * dense_graphs
    with torch._dynamo.config.patch(error_on_recompile=True):
        with handle.dense():
            assert FLUX.call(model, FLUX.inputs(2)).equal(dense)
        handle.set_step(1)
        torch.testing.assert_close(FLUX.call(model, FLUX.inputs(2)).detach(), expected[1], rtol=1e-5, atol=1e-5)
    handle.detach()
    assert all(type(layer._compiled_call_impl).__name__ == "function" for _, layer in FLUX.layers(model))
    assert FLUX.call(model, FLUX.inputs(2)).equal(dense)


@pytest.mark.parametrize("what", ["layers", "model"])
def test_compiled_and_checkpointed(what: str):
    """The recomputation runs the compiled layer on tensors that were gathered already."""
    eager_model = FLUX.model()
    with tread.attach(eager_model, {"routes": inner(FLUX.depth)}) as handle:
        expected, _, _ = run(FLUX, lambda arguments: FLUX.call(eager_model, arguments), handle, _None())
    model, count = FLUX.model(), fresh_count()
    model.enable_gradient_checkpointing()
    with tread.attach(model, {"routes": inner(FLUX.depth)}) as handle:
        if what == "layers":
            compile_layers(FLUX, model, backend=count, dynamic=False)
        else:
            model.compile(backend=count)
        outputs, _, graphs = run(FLUX, lambda arguments: FLUX.call(model, arguments), handle, count)
    assert graphs[-1] == graphs[0]
    assert what == "layers" or graphs == [1] * STEPS
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, other, rtol=1e-5, atol=1e-5)
    for (name, parameter), other in zip(model.named_parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)
