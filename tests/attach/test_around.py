"""Routing stands around `forward`, whatever else is put on it or taken off it, and in whichever order."""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.hooks import ModelHook as DiffusersHook
from torch import Tensor, nn

import tread
from tests.attach.attached import FLUX, ROUTES
from tests.attach.selected import TOY_CONFIG
from tests.tiny.toy import FAMILY, Toy, inputs

pytestmark = pytest.mark.filterwarnings("ignore")


class _Counting(ModelHook):
    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


class _Diffusers(DiffusersHook):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


class _Whole(_Diffusers):
    """Calls what it replaces by the reference that it keeps."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.fn_ref.original_forward(*args, **kwargs)  # pyright: ignore[reportOptionalCall]


class _Accelerate:
    def put_on(self, module: nn.Module) -> Any:
        self.hook = _Counting()
        add_hook_to_module(module, self.hook)
        return self.hook

    def take_off(self, module: nn.Module) -> None:
        remove_hook_from_module(module)


class _HookRegistry:
    def __init__(self, hook: Callable[[], Any]) -> None:
        self.make = hook

    def put_on(self, module: nn.Module) -> Any:
        hook = self.make()
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "counting")
        return hook

    def take_off(self, module: nn.Module) -> None:
        HookRegistry.check_if_exists_or_initialize(module).remove_hook("counting")


class _Own:
    """A function that does not call what it replaces."""

    def put_on(self, module: Any) -> Any:
        counter = _Counting()
        stock = type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            counter.calls += 1
            return stock(module, *args, **kwargs)

        module.forward = forward
        return counter

    def take_off(self, module: Any) -> None:
        del module.forward


class _Elsewhere(_Own):
    """A method of another object, as methods that several models share are."""

    def put_on(self, module: Any) -> Any:
        counter = super().put_on(module)
        self.function = module.forward
        module.forward = self.forward
        return counter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


OTHERS = {
    "accelerate": _Accelerate,
    "diffusers": lambda: _HookRegistry(_Diffusers),
    "diffusers, new_forward": lambda: _HookRegistry(_Whole),
    "a function": _Own,
    "a method of another object": _Elsewhere,
}


def outputs(model: Toy, *, through: str) -> Tensor:
    return (model if through == "call" else model.forward)(**inputs())


ORDERS = [
    order
    for order in itertools.permutations(["attach", "put on", "take off", "detach"])
    if order.index("put on") < order.index("take off") and order.index("attach") < order.index("detach")
]


@pytest.mark.parametrize("through", ["call", "forward"])
@pytest.mark.parametrize("where", ["model", "layers"])
@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
@pytest.mark.parametrize("other", OTHERS)
def test_any_order(other: str, order: tuple[str, ...], where: str, through: str, routed: Tensor):
    model, dense = Toy(), Toy()(**inputs())
    modules: list[nn.Module] = [model] if where == "model" else [*model.first, *model.second]
    patches = [OTHERS[other]() for _ in modules]
    handle, counters = None, []
    for act in order:
        if act == "attach":
            handle = tread.attach(model, TOY_CONFIG, family=FAMILY)
        elif act == "put on":
            counters = [patch.put_on(module) for patch, module in zip(patches, modules, strict=True)]
        elif act == "take off":
            for patch, module in zip(patches, modules, strict=True):
                patch.take_off(module)
        elif handle is not None:
            handle.detach()
        attached = handle is not None and handle.attached
        before = [counter.calls for counter in counters]
        if handle is not None:
            handle.set_step(0)
        assert outputs(model, through=through).equal(routed if attached else dense), act
        on = "put on" in order[: order.index(act) + 1] and "take off" not in order[: order.index(act) + 1]
        assert [counter.calls for counter in counters] == [calls + on for calls in before]
        if other == "accelerate" or not on:  # copies of others' patches call the original
            twin = copy.deepcopy(model).train()
            assert outputs(twin, through=through).equal(dense), "a copy is a stock model"
        assert outputs(model.eval(), through=through).equal(dense)
        model.train()
    assert isinstance(inspect.getattr_static(Toy, "forward"), type(lambda: None)), "the class is as it was"


def test_other_modules_of_a_class_are_stock():
    model, other = Toy(), Toy()
    dense = other(**inputs())
    signature = inspect.signature(Toy.forward)
    with tread.attach(model, TOY_CONFIG, family=FAMILY) as handle:
        assert inspect.signature(Toy.forward) == signature
        assert inspect.signature(model.forward) == inspect.signature(other.forward)
        assert other(**inputs()).equal(dense)
        assert other.forward(**inputs()).equal(dense)
        assert other.forward.__func__ is Toy.forward
        assert handle.selections == []


class _Derived(Toy):
    """Calls what it inherits."""

    def forward(self, x: Tensor, c: Tensor, text: Tensor) -> Tensor:
        return 2 * super().forward(x, c, text)


def test_a_class_that_inherits_its_forward_does_so_again():
    class Heir(Toy):
        pass

    with tread.attach(Heir(), TOY_CONFIG, family=FAMILY):
        assert "forward" in vars(Heir)
    assert "forward" not in vars(Heir)


def test_a_class_that_was_given_another_forward_keeps_it():
    class Patched(Toy):
        pass

    with tread.attach(Patched(), TOY_CONFIG, family=FAMILY):
        Patched.forward = stock = Toy.forward
    assert vars(Patched)["forward"] is stock


def test_detaching_leaves_layers_that_another_model_routes_by_now(routed: Tensor):
    first, second = Toy(), Toy()
    first.first, first.second = second.first, second.second
    earlier = tread.attach(first, TOY_CONFIG, family=FAMILY)
    with tread.attach(second, TOY_CONFIG, family=FAMILY) as handle:
        earlier.detach()
        handle.set_step(0)
        assert second(**inputs()).equal(routed)


@pytest.mark.parametrize("first", ["base", "derived"])
def test_a_class_and_its_base_are_attached_at_once(first: str, routed: Tensor):
    made: list[tuple[Toy, int]] = [(Toy(), 1), (_Derived(), 2)]
    handles = []
    for model, _ in made if first == "base" else made[::-1]:
        handles.append(tread.attach(model, TOY_CONFIG, family=FAMILY))
        handles[-1].set_step(0)
    for model, factor in made:
        assert model(**inputs()).equal(factor * routed)
    for handle in handles:
        handle.detach()
    for model, factor in made:
        assert model(**inputs()).equal(factor * Toy()(**inputs()))


def test_super_goes_past_what_is_on_the_instance(routed: Tensor):
    """Both classes are attached and the model has a hook on its forward: `super().forward` is the base's function."""
    base, derived = Toy(), _Derived()
    _Accelerate().put_on(derived)
    with tread.attach(base, TOY_CONFIG, family=FAMILY), tread.attach(derived, TOY_CONFIG, family=FAMILY) as handle:
        handle.set_step(0)
        assert derived(**inputs()).equal(2 * routed)


def test_what_was_on_the_instance_is_there_again(routed: Tensor):
    """A second library puts its patch on the first one's and takes it off: nothing of ours stays between."""
    model, first, second = Toy(), _Accelerate(), _HookRegistry(_Diffusers)
    first.put_on(model)
    before = model.__dict__["forward"]
    with tread.attach(model, TOY_CONFIG, family=FAMILY) as handle:
        second.put_on(model)
        handle.set_step(0)
        assert model(**inputs()).equal(routed)
        second.take_off(model)
        assert model.__dict__["forward"] is before
        first.take_off(model)
        assert "forward" not in model.__dict__
    assert model(**inputs()).equal(Toy()(**inputs()))


def test_the_signature_of_a_forward_that_is_no_method_stays():
    """HF's Trainer reads which columns of the data a model takes."""
    model: Any = Toy()
    model.forward = functools.partial(Toy.forward, model)
    expected = inspect.signature(model.forward)
    with tread.attach(model, TOY_CONFIG, family=FAMILY):
        assert inspect.signature(model.forward) == expected


def test_a_forward_that_was_saved_and_put_back():
    model: Any = Toy()
    with tread.attach(model, TOY_CONFIG, family=FAMILY):
        saved, model.forward = model.forward, None
        model.forward = saved
        assert "forward" not in vars(model)
        model.forward = Toy().forward
        assert vars(model)["forward"].__self__ is not model


def test_forward_with_cfg(routed: Tensor):
    """A method of the model that calls `self.forward`, as the DiT's of others does."""

    class Guided(Toy):
        def forward_with_cfg(self, x: Tensor, c: Tensor, text: Tensor) -> Tensor:
            return self.forward(x, c, text)

    model = Guided()
    with tread.attach(model, TOY_CONFIG, family=FAMILY) as handle:
        handle.set_step(0)
        assert model.forward_with_cfg(**inputs()).equal(routed)
        with torch.no_grad(), handle.routed(0.5, step=0):
            assert model.eval().forward_with_cfg(**inputs()).equal(routed)


@pytest.mark.usefixtures("accelerates_state")
@pytest.mark.parametrize("first", ["attach", "prepare"])
def test_accelerates_mixed_precision(first: str):
    """`prepare` wraps the model's forward, and `unwrap_model` takes that off."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, arguments = FLUX.model(), FLUX.inputs(2)
    handle = tread.attach(model, ROUTES) if first == "attach" else None
    prepared = accelerator.prepare(model)
    handle = handle or tread.attach(prepared, ROUTES)
    handle.set_step(0)
    rough = FLUX.call(prepared, arguments)
    assert rough.dtype == torch.float32
    assert handle.selections[0].shape == (2, 8)
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert plain is model
    handle.set_step(0)
    exact = FLUX.call(plain, arguments)
    assert handle.selections[0].shape == (2, 8)
    assert 0 < float((exact - rough).norm() / exact.norm()) < 0.05
    handle.detach()
    assert FLUX.call(plain, arguments).equal(FLUX.call(FLUX.model(), arguments))


def test_a_layer_that_was_replaced_is_refused():
    model = Toy()
    with tread.attach(model, TOY_CONFIG, family=FAMILY):
        model.first[1] = copy.deepcopy(model.first[1])
        with pytest.raises(tread.ConfigError, match=r"layer 1 is another module \(Block\) than when the model was att"):
            model(**inputs())
