"""Forms of checkpointing on stock models, against the oracle: text joined to the stream, rope per sample, reference
tokens, and a modulation of each token that has a gradient."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import tread
from tests.attach.attached import BY_NAME
from tests.attach.oracle import oracle
from tests.attach.selected import route
from tests.attach.test_contract import assert_same, kept_mask
from tests.tiny.case import Case

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = ["flux", "flux-kontext", "wan-ti2v", "qwenimage", "lumina2"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _custom(block: Any) -> Callable[..., Any]:
    def custom_forward(*args: Any, **kwargs: Any) -> Any:
        return block(*args, **kwargs)

    return custom_forward


def _checkpointed(function: Callable[..., Any]) -> Callable[[Any, Case], Any]:
    """Enable the model's own checkpointing with another function."""

    def put_on(model: Any, case: Case) -> Any:
        model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
        return model

    return put_on


def _wrapped(model: Any, case: Case) -> Any:
    for blocks in case.blocks:
        stack = model.get_submodule(blocks.name)
        for i, block in enumerate(stack):
            stack[i] = checkpoint_wrapper(block)
    return model


def _composed(model: Any, case: Case) -> Any:
    for _, block in case.layers(model):
        composable(block)
    return model


def _in_pairs(model: Any, case: Case) -> Any:
    """Every layer's forward is a checkpointed function on the instance, as patches of others have it."""
    for _, block in case.layers(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


class _Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> Any:
        return checkpoint(self.model, **arguments, use_reentrant=False)


def _compiled(model: Any, case: Case) -> Any:
    for _, block in case.layers(model):
        block.compile(backend="aot_eager", dynamic=False)
    return _checkpointed(
        lambda block, *args, **kwargs: checkpoint(_custom(block), *args, **kwargs, use_reentrant=False)
    )(model, case)


FORMS: dict[str, Callable[[Any, Case], Any]] = {
    "layers": _checkpointed(lambda block, *args, **kw: checkpoint(block, *args, **kw, use_reentrant=False)),
    "layers, reentrant": _checkpointed(lambda block, *args: checkpoint(block, *args, use_reentrant=True)),
    "closures": _checkpointed(lambda block, *args, **kw: checkpoint(_custom(block), *args, **kw, use_reentrant=False)),
    "closures, reentrant": _checkpointed(lambda block, *args: checkpoint(_custom(block), *args, use_reentrant=True)),
    "checkpoint_wrapper": _wrapped,
    "the composable checkpoint": _composed,
    "the instance's forward": _in_pairs,
    "the model": lambda model, case: _Whole(model),
    "compiled layers in closures": _compiled,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _forms() -> Iterator[Any]:
    """Each form of each case; compiling takes seconds, so one case of it runs always."""
    for form in FORMS:
        for name in CASES:
            costly = "compiled" in form and name != "flux-kontext"
            yield pytest.param(form, name, marks=[pytest.mark.contract] if costly else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("form", "name"), list(_forms()))
def test_gradients_equal_the_oracle(form: str, name: str, device: str):
    case = BY_NAME[name]
    depth = case.depth
    routes = [route(0, depth // 2 - 1, 0.25), route(depth // 2, -1, 0.6)]
    compare(case, FORMS[form], routes, device, forwards=2)


def compare(
    case: Case,
    put_on: Callable[[Any, Case], Any],
    routes: list[dict[str, Any]],
    device: str,
    *,
    forwards: int,
    selector: str = "random",
    around: bool | None = None,
) -> None:
    """Outputs and gradients of routed forwards are the oracle's, when the step has moved on before the backward.

    `around`: the call of the model is checkpointed too, reentrant or not.
    """
    model, plain, arguments = case.model().to(device), case.model().to(device), _to(case.inputs(case.batch), device)
    outputs, expected = [], []
    with tread.attach(model, {"routes": routes, "selector": selector}) as handle:
        called = put_on(model, case)
        handle.set_step(3)
        for _ in range(forwards):
            outputs.append(_call(case, called, arguments, around))
            kept = [kept_mask(ids, case.tokens) for ids in handle.selections]
            ends = [(one.start_layer_idx, one.end_layer_idx) for one in handle.plan.routes]
            with oracle(case, plain, [(*end, mask) for end, mask in zip(ends, kept, strict=True)]):
                expected.append(case.call(plain, arguments))
        handle.set_step(9)
        got = _backward(outputs, model)
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, other, rtol=1e-4, atol=1e-4)
    assert_same(got, _backward(expected, plain), rtol=1e-4, atol=1e-4)


def _call(case: Case, model: Any, arguments: dict[str, Any], around: bool | None) -> Tensor:
    if around is None:
        return case.call(model, arguments)
    x = arguments["hidden_states"].detach().requires_grad_()
    return checkpoint(lambda x: case.call(model, arguments | {"hidden_states": x}), x, use_reentrant=around)


def _nested(shells: list[bool]) -> Callable[..., Any]:
    """A layer inside checkpointed functions, reentrant or not, from the innermost to the outermost."""

    def run(block: Any, *args: Any) -> Any:
        function = block
        for reentrant in shells:
            function = functools.partial(checkpoint, function, use_reentrant=reentrant)
        return function(*args)

    return run


def _by_turns(choices: list[list[bool]]) -> Callable[[Any, Case], Any]:
    """Give each layer one of `choices`, in turn."""

    def put_on(model: Any, case: Case) -> Any:
        runs = {block: _nested(choices[i % len(choices)]) for i, (_, block) in enumerate(case.layers(model))}

        def run(block: Any, *args: Any) -> Any:
            return runs[getattr(block, "__self__", block)](block, *args)

        model.enable_gradient_checkpointing(gradient_checkpointing_func=run)
        return model

    return put_on


@st.composite
def route_lists(draw: st.DrawFn, depth: int) -> list[dict[str, Any]]:
    first = draw(st.integers(0, depth - 1))
    last = draw(st.integers(first, depth - 1))
    rest = [] if last >= depth - 1 else [route(last + 1, depth - 1, draw(st.sampled_from([0.25, 0.75])))]
    return [route(first, last), *(rest if draw(st.booleans()) else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("examples", [10, pytest.param(25, marks=pytest.mark.contract)])
@pytest.mark.parametrize("name", ["flux", "wan-ti2v"])
def test_random_nestings_equal_the_oracle(name: str, examples: int, device: str):
    case = BY_NAME[name]

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        choices=st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=4),
        routes=route_lists(case.depth),
        around=st.sampled_from([None, True, False]),
        forwards=st.integers(1, 3),
        selector=st.sampled_from(["random", "l1"]),
    )
    def draw(choices: Any, routes: Any, around: Any, forwards: int, selector: str) -> None:
        compare(case, _by_turns(choices), routes, device, forwards=forwards, selector=selector, around=around)

    draw()


def _to(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in arguments.items()}


def _backward(outputs: list[Tensor], model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients of all outputs at once, by the names that parameters have without wrappers."""
    total = sum(((i + 1) * output.square()).sum() for i, output in enumerate(outputs))
    assert isinstance(total, Tensor)
    model.zero_grad()
    total.backward()
    named = model.named_parameters()  # what nothing uses has no gradient, or zeros where checkpointing is reentrant
    found = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in named}
    return {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}
