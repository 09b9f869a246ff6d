"""Whatever recomputes: routed gradients are those of the same model without checkpointing, and those of the oracle."""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import (
    DEPTH,
    FAMILY,
    FORMS,
    TOKENS,
    WHOLE,
    WRAPPED,
    Arguments,
    Call,
    Form,
    Toy,
    by_hand,
    inputs,
    plain,
    segments,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from selected import route
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tread

pytestmark = pytest.mark.filterwarnings("ignore")

ROUTES: dict[str, list[dict[str, Any]]] = {
    "inner": [route(1, 4)],
    "all": [route(0, -1)],
    "several": [route(0, 1, 0.25), route(2, 3, 0.6), route(5, 5)],
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Gradients = dict[str, Tensor]


def direct(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    return model(**arguments)


def gradients(
    model: Toy,
    handle: tread.Attachment,
    call: Call = direct,
    *,
    forwards: int = 1,
    moves: bool = False,
    mask: Tensor | None = None,
    detached: bool = False,
) -> tuple[Gradients, list[list[Tensor]]]:
    """Gradients of parameters and inputs after `forwards` forwards and one backward, and each forward's selections.

    With `moves` the step has moved on before the backward, with `detached` the handle is gone by then.
    """
    device = model.table.device
    model.zero_grad()
    handle.set_step(3)
    arguments = [inputs(seed=i, device=device) for i in range(forwards)]
    loss, selections = torch.zeros((), device=device), []
    for i, one in enumerate(arguments):
        if mask is None:
            output = call(model, one)
        else:
            with handle.force_keep(mask):
                output = call(model, one)
        weight = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
        loss = loss + (i + 1) * (output * weight).sum()
        selections.append(handle.selections)
    if moves:
        handle.set_step(9)
    if detached:
        handle.detach()
    loss.backward()
    return collected(model, arguments), selections


def collected(model: Toy, arguments: list[dict[str, Tensor]]) -> Gradients:
    """Gradients by the names that parameters have without wrappers."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        found = {name.replace(wrapper, ""): grad for name, grad in found.items()}
    return found | {f"x{i}": one["x"].grad for i, one in enumerate(arguments) if one["x"].grad is not None}


def assert_same(got: Gradients, expected: Gradients, *, exact: bool) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = float((got[name] - value).norm() / value.norm())
        assert got[name].equal(value) if exact else error < 2e-6, f"{name} is wrong by {error:.1e}"


def compare(
    form: Form = plain,
    call: Call = direct,
    *,
    exact: bool = True,
    wrap: Callable[[Toy], Any] = lambda model: None,
    late: bool = False,
    routes: str = "inner",
    config: dict[str, Any] | None = None,
    shared: bool = False,
    reference_form: Form = plain,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Checkpointed by `form`, `call` or `wrap`, gradients are the plain model's; `late` wraps after attaching."""
    config = {"routes": ROUTES[routes], **(config or {})}
    reference = Toy(shared=shared, form=reference_form).to(device)
    with tread.attach(reference, config, family=FAMILY) as handle:
        expected, selections = gradients(reference, handle, **options)
    model = Toy(shared=shared, form=form).to(device)
    if not late:
        wrap(model)
    with tread.attach(model, config, family=FAMILY) as handle:
        if late:
            wrap(model)
        got, selected = gradients(model, handle, call, **options)
    for one, other in zip(selections, selected, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    assert_same(got, expected, exact=exact and device == "cpu")


def is_exact(name: str) -> bool:
    """Reentrant checkpointing adds gradients of what several layers use in another order, and what is offloaded comes
    back contiguous, which other kernels multiply."""
    return "reentrant" not in name.replace("non-reentrant", "") and name != "offload_wrapper"


CAPTURED = "checkpoint_sequential, reentrant"  # its closures capture tensors, whose gradients reentrant calls lose
TWO: dict[str, Any] = {"forwards": 2, "moves": True}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("name", FORMS)
def test_forms_that_a_model_uses(name: str, routes: str, device: str):
    reference = detached_rest if name == CAPTURED else plain
    for selector, options in itertools.product(("random", "l1"), ({}, TWO)):
        compare(
            FORMS[name],
            routes=routes,
            exact=is_exact(name),
            config={"selector": selector},
            reference_form=reference,
            device=device,
            **options,
        )


def detached_rest(blocks: Any, arguments: Arguments) -> Tensor:
    """No checkpointing, and no gradient but the stream's."""
    x, *rest = arguments
    return plain(blocks, (x, *(one.detach() for one in rest)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("name", WHOLE)
def test_forms_around_the_model(name: str, routes: str, device: str):
    for selector, options in itertools.product(("random", "l1"), ({}, TWO)):
        compare(
            call=WHOLE[name],
            routes=routes,
            exact=is_exact(name),
            config={"selector": selector},
            device=device,
            **options,
        )
        compare(
            FORMS["halves, non-reentrant"],
            call=WHOLE[name],
            routes=routes,
            exact=is_exact(name),
            config={"selector": selector},
            device=device,
            **options,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("late", [False, True], ids=["attached after", "attached before"])
@pytest.mark.parametrize("name", WRAPPED)
def test_forms_put_on_from_outside(name: str, late: bool, routes: str, device: str):
    for options in ({}, TWO):
        compare(wrap=WRAPPED[name], late=late, routes=routes, exact=is_exact(name), device=device, **options)


SOME = [
    "a layer, non-reentrant",
    "a layer, reentrant",
    "every other layer, reentrant",
    "two layers, reentrant",
    "halves, non-reentrant",
    "reentrant halves in which layers are reentrant",
    "pointwise results are saved",
]
some_forms = pytest.mark.parametrize("name", SOME)


@some_forms
def test_force_masks(name: str):
    """The mask is gone by the time of the backward, and so is its context."""
    mask = torch.zeros(2, TOKENS, dtype=torch.bool)
    mask[0, 2:6] = mask[1, -1] = True
    for routes in ROUTES:
        compare(FORMS[name], routes=routes, exact=is_exact(name), mask=mask, **TWO)


@some_forms
def test_one_module_that_is_two_layers(name: str):
    """Its second call closes a window that its first call is inside of, and the other way round."""
    for routes in ROUTES:
        compare(FORMS[name], routes=routes, exact=is_exact(name), shared=True, **TWO)
        compare(wrap=WRAPPED["the composable checkpoint"], routes=routes, shared=True, **TWO)


@some_forms
def test_detached_before_the_backward(name: str):
    compare(FORMS[name], exact=is_exact(name), detached=True, forwards=2)


def test_torch_is_as_it_was_when_the_last_handle_is_gone():
    """In a process of its own, where nothing else is attached."""
    program = """
import torch
from forms import FAMILY, Toy, inputs
from torch.utils import checkpoint
import tread
stock = checkpoint._checkpoint_hook
model = Toy()
for _ in range(2):
    handle = tread.attach(model, "balanced", family=FAMILY)
    assert checkpoint._checkpoint_hook is not stock
    loss = checkpoint.checkpoint(model, *inputs().values(), use_reentrant=False).sum()
    handle.detach()
    loss.backward()  # detached before
    assert checkpoint._checkpoint_hook is stock
    assert "apply" not in vars(checkpoint.CheckpointFunction)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@some_forms
def test_attached_anew_before_the_backward(name: str):
    """The backward of the first handle's forward routes as that did; the second handle goes on."""
    reference, model = Toy(), Toy(form=FORMS[name])
    with tread.attach(reference, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        expected, _ = gradients(reference, handle)
    first = tread.attach(model, {"routes": ROUTES["inner"]}, family=FAMILY)
    first.set_step(3)
    arguments = inputs()
    output = model(**arguments)
    second = tread.attach(model, {"routes": ROUTES["all"]}, family=FAMILY)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    assert_same(collected(model, [arguments]), expected, exact=is_exact(name))
    model(**inputs())
    assert second.selections[0].shape == (2, TOKENS // 2)
    second.detach()


@some_forms
def test_a_schedule_that_has_moved_on(name: str):
    """By the time of the backward, the ratio is another."""
    schedule = {"warmup_steps": 8, "levels": 4, "total_steps": 100}
    compare(FORMS[name], exact=is_exact(name), config={"schedule": schedule}, **TWO)


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_forwards_in_one_function(reentrant: bool):
    """As guidance distillation has it: the second has tokens of its own, in both passes."""

    def both(model: Toy, arguments: dict[str, Tensor]) -> Tensor:
        def run(x: Tensor, c: Tensor, text: Tensor) -> Tensor:
            return model(x, c, text) - 0.5 * model(x, c.flip(0), text)

        return checkpoint(run, *arguments.values(), use_reentrant=reentrant)

    def plainly(model: Toy, arguments: dict[str, Tensor]) -> Tensor:
        x, c, text = arguments.values()
        return model(x, c, text) - 0.5 * model(x, c.flip(0), text)

    reference, model = Toy(), Toy()
    with tread.attach(reference, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        expected, _ = gradients(reference, handle, plainly, **TWO)
    with tread.attach(model, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        got, _ = gradients(model, handle, both, **TWO)
    assert_same(got, expected, exact=not reentrant)


def test_two_models_in_one_function():
    """A window of one is open around the other's forward."""
    first, second = Toy(), Toy()
    with (
        tread.attach(first, {"routes": ROUTES["inner"]}, family=FAMILY) as one,
        tread.attach(second, {"routes": ROUTES["all"]}, family=FAMILY, seed=7) as two,
    ):
        found = []
        for reentrant in (None, True, False):
            for model, handle in ((first, one), (second, two)):
                model.zero_grad()
                handle.set_step(0)
            arguments = inputs()

            def run(x: Tensor, c: Tensor, text: Tensor) -> Tensor:
                return second(first(x, c, text), c, text)

            output = (
                run(**arguments) if reentrant is None else checkpoint(run, *arguments.values(), use_reentrant=reentrant)
            )
            output.square().sum().backward()
            found.append(collected(first, [arguments]) | {f"2.{n}": p.grad for n, p in second.named_parameters()})
    assert_same(found[1], found[0], exact=False)
    assert_same(found[2], found[0], exact=True)


def test_backward_twice():
    """Each recomputation starts from where the function began."""
    model = Toy(form=FORMS["halves, non-reentrant"])
    with tread.attach(model, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        arguments = inputs()
        output = model(**arguments).square().sum()
        output.backward(retain_graph=True)
        once = {name: grad.clone() for name, grad in collected(model, [arguments]).items()}
        handle.set_step(4)
        output.backward()
        assert_same({name: grad / 2 for name, grad in collected(model, [arguments]).items()}, once, exact=True)


def test_an_error_inside_a_checkpointed_function():
    """It leaves nothing behind: the next forward is right."""
    model = Toy(form=FORMS["halves, non-reentrant"])
    with tread.attach(model, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        expected, _ = gradients(model, handle)
        for form in ("halves, non-reentrant", "halves, reentrant"):
            model.form = FORMS[form]
            bad = inputs()
            with pytest.raises(RuntimeError):
                model(bad["x"], bad["c"][:, :3], bad["text"])
            del bad
            with torch.no_grad():
                model(**inputs())
            assert handle.selections == [], "no gradients, no routing"
            assert_same(gradients(model, handle)[0], expected, exact=form.startswith("halves, non"))


class _Foreign(torch.autograd.Function):
    """Runs a module again in backward, as other libraries' checkpointing does."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.run, ctx.rest = run, rest
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x, *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x, *ctx.rest)
        torch.autograd.backward(output, gradients)
        return None, x.grad, *(None for _ in ctx.rest)


def _foreign_layers(blocks: Any, arguments: Arguments) -> Tensor:
    x, *rest = arguments
    rest = [one.detach() for one in rest]
    for block in blocks:
        x = _Foreign.apply(block, x, *rest)
    return x


@pytest.mark.parametrize("what", ["layers", "model"])
def test_what_reruns_modules_by_itself_is_refused(what: str):
    model = Toy(form=_foreign_layers if what == "layers" else plain)
    with tread.attach(model, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        call: Call = direct if what == "layers" else lambda model, one: _Foreign.apply(model, *one.values())
        with pytest.raises(tread.ConfigError, match=r"runs again in backward, by something other than torch"):
            gradients(model, handle, call)
        with handle.dense():
            gradients(model, handle, call)


COMPILED: dict[str, Callable[[Toy], None]] = {}


def _compiles(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(compile_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(model: Toy) -> None:
            for stack in (model.first, model.second):
                for i, block in enumerate(stack):
                    if (made := compile_one(block)) is not None:
                        stack[i] = made

        COMPILED[name] = run
        return compile_one

    return add


BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}


def _backend(block: Any) -> str:
    return BACKENDS[next(block.parameters()).device.type]


@_compiles("block.compile()")
def _in_place(block: Any) -> None:
    block.compile(backend=_backend(block), dynamic=False)


@_compiles("block.forward = torch.compile(block.forward)")
def _its_forward(block: Any) -> None:
    block.forward = torch.compile(block.forward, backend=_backend(block), dynamic=False)


@_compiles("torch.compile(block)")
def _replaced(block: Any) -> Any:
    return torch.compile(block, backend=_backend(block), dynamic=False)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("device", DEVICES)
@some_forms
def test_compiled_layers(name: str, way: str, device: str):
    """In any form. Compiled once for each of four lengths, with and without gradients, not once for each layer."""
    with torch._dynamo.config.patch(recompile_limit=12, fail_on_recompile_limit_hit=True):
        late = SOME.index(name) % 2 == 0
        compare(FORMS[name], wrap=COMPILED[way], late=late, exact=False, device=device, **TWO)
        compare(FORMS[name], wrap=COMPILED[way], late=late, exact=False, device=device, detached=True)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("selector", ["random", "l1"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["inside", "around", "around, reentrant"])
def test_a_model_compiled_whole(name: str, device: str, selector: str):
    """Checkpointed inside, and inside a checkpointed function, where it selects again for the step of its forward."""
    form = FORMS["a layer, non-reentrant"] if name == "inside" else plain
    compiled: dict[Toy, Any] = {}

    def call(model: Toy, arguments: dict[str, Tensor]) -> Tensor:
        run = compiled.setdefault(model, torch.compile(model, backend=_backend(model)))
        if name == "inside":
            return run(**arguments)
        return checkpoint(run, *arguments.values(), use_reentrant="reentrant" in name)

    compare(form, call, exact=False, config={"selector": selector}, device=device, **TWO)


def _together(blocks: Any, *given: Any) -> Tensor:
    return plain(blocks, given)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("selector", ["random", "l1"])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_compiled_segments(reentrant: bool | None, selector: str):
    """Two layers compiled together; inside a checkpointed function they run as they are, and are exact."""
    compiled: dict[Any, Any] = {}

    def form(blocks: Any, arguments: Arguments) -> Tensor:
        x, *rest = arguments
        for i in range(0, len(blocks), 2):
            part = list(blocks[i : i + 2])
            if part[0] not in compiled:
                compiled[part[0]] = torch.compile(functools.partial(_together, part), backend="aot_eager")
            run = compiled[part[0]]
            x = run(x, *rest) if reentrant is None else checkpoint(run, x, *rest, use_reentrant=reentrant)
        return x

    compare(form, exact=False, config={"selector": selector}, **TWO)


@st.composite
def nestings(draw: st.DrawFn, depth: int = 0) -> Form:
    """A random way to run layers: segments of some size, checkpointed or not, and inside them the same again."""
    if depth == 3 or draw(st.booleans()):
        return plain
    size, reentrant = draw(st.integers(1, 3)), draw(st.sampled_from([True, False, None]))
    inner = draw(nestings(depth=depth + 1))
    if reentrant is None:

        def form(blocks: Any, arguments: Arguments) -> Tensor:
            x, *rest = arguments
            for i in range(0, len(blocks), size):
                x = inner(blocks[i : i + size], (x, *rest))  # pyright: ignore[reportArgumentType]
            return x

        return form
    return segments(size, reentrant=reentrant, inner=inner)


@st.composite
def route_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Disjoint routes in ascending order."""
    borders = sorted(draw(st.sets(st.integers(0, DEPTH - 1), min_size=1, max_size=4)))
    starts, ends = borders[::2], [*borders[1::2], DEPTH - 1][: len(borders[::2])]
    return [route(a, b, draw(st.sampled_from([0.25, 0.5, 0.75]))) for a, b in zip(starts, ends, strict=True)]


EXAMPLES = 150
ANY: dict[str, Any] = {
    "form": nestings(),
    "around": st.sampled_from([None, *WHOLE]),
    "routes": route_lists(),
    "selector": st.sampled_from(["random", "l1"]),
    "shared": st.booleans(),
    "forwards": st.integers(1, 3),
    "compiled": st.sampled_from([*[None] * 21, *COMPILED]),
}


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(**ANY)
def test_random_nestings_equal_the_oracle(**drawn: Any):
    against_the_oracle(**drawn, device="cpu")


@pytest.mark.gpu
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(**ANY | {"compiled": st.none()})
def test_random_nestings_equal_the_oracle_on_a_gpu(**drawn: Any):
    against_the_oracle(**drawn, device="cuda")


def against_the_oracle(
    form: Form,
    around: str | None,
    routes: list[dict[str, Any]],
    selector: str,
    shared: bool,
    forwards: int,
    compiled: str | None,
    device: str,
) -> None:
    model = Toy(shared=shared, form=form).to(device)
    if compiled is not None:
        torch._dynamo.reset()
        COMPILED[compiled](model)
    call = direct if around is None else WHOLE[around]
    with tread.attach(model, {"routes": routes, "selector": selector}, family=FAMILY) as handle:
        got, selections = gradients(model, handle, call, forwards=forwards, moves=True)
    expected = oracle(Toy(shared=shared).to(device), routes, selections)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


def oracle(model: Toy, routes: list[dict[str, Any]], selections: list[list[Tensor]]) -> Gradients:
    """The gradients of `gradients` by hand."""
    device = model.table.device
    arguments = [inputs(seed=i, device=device) for i in range(len(selections))]
    loss = torch.zeros((), device=device)
    for i, (one, ids) in enumerate(zip(arguments, selections, strict=True)):
        kept = [torch.zeros(2, TOKENS, dtype=torch.bool, device=device).scatter(1, rows, True) for rows in ids]
        windows = [(r["start_layer_idx"], r["end_layer_idx"], k) for r, k in zip(routes, kept, strict=True)]
        output = by_hand(model, one, windows)
        weight = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
        loss = loss + (i + 1) * (output * weight).sum()
    loss.backward()
    return collected(model, arguments)
