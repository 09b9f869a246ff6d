"""Whatever recomputes: routed gradients are those of the same model without checkpointing."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tread
from tests.attach.forms import FORMS, WHOLE, WRAPPED, Call
from tests.attach.recomputing import (
    DEVICES,
    ROUTES,
    TWO,
    assert_same,
    collected,
    compare,
    direct,
    gradients,
    is_exact,
    some_forms,
)
from tests.programs import run
from tests.tiny.toy import FAMILY, TOKENS, Arguments, Form, Toy, inputs, plain

pytestmark = pytest.mark.filterwarnings("ignore")

CAPTURED = "checkpoint_sequential, reentrant"  # its closures capture tensors, whose gradients reentrant calls lose


def forwards(routes: str) -> list[dict[str, Any]]:
    """Two forwards before the backward; with the first of the routes one as well."""
    return [TWO, {}] if routes == "inner" else [TWO]


def combinations(routes: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return itertools.product(("random", "l1"), forwards(routes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("name", FORMS)
def test_forms_that_a_model_uses(name: str, routes: str, device: str):
    reference = detached_rest if name == CAPTURED else plain
    for selector, options in combinations(routes):
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
    for selector, options in combinations(routes):
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
    for options in forwards(routes):
        compare(wrap=WRAPPED[name], late=late, routes=routes, exact=is_exact(name), device=device, **options)


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
from tests.tiny.toy import FAMILY, Toy, inputs
from torch.utils import checkpoint
import tread
stock = checkpoint._checkpoint_hook
model = Toy()
for _ in range(2):
    tread.attach(model, "balanced", family=FAMILY).detach()
    assert checkpoint._checkpoint_hook is stock
    handle = tread.attach(model, "balanced", family=FAMILY)
    assert checkpoint._checkpoint_hook is not stock
    loss = checkpoint.checkpoint(model, *inputs().values(), use_reentrant=False).sum()
    handle.detach()
    loss.backward()  # detached before
    assert checkpoint._checkpoint_hook is stock
    assert "apply" not in vars(checkpoint.CheckpointFunction)
"""
    run("-c", program)


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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("form", [plain, FORMS["halves, non-reentrant"]], ids=["plain", "halves"])
def test_backward_leaves_the_handle_as_it_was(form: Form, reentrant: bool):
    """Its step, its last forward, and whether the next one may be a CUDA graph."""
    model = Toy(form=form)
    with tread.attach(model, {"routes": ROUTES["inner"]}, family=FAMILY) as handle:
        handle.set_step(3)
        output = checkpoint(model, *inputs().values(), use_reentrant=reentrant)
        assert handle.repeatable
        handle.set_step(9)
        state = handle.state
        assert state.logs == []
        output.sum().backward()
        assert handle.state is state
        assert handle.repeatable
        assert handle.state_dict() == {"step": 9, "micro_step": 0}


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
