"""The contract every family keeps, run over every case at tiny size."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tread
from tests.attach.oracle import oracle
from tests.attach.selected import inner, route
from tests.tiny.case import Case, one_sample
from tests.tiny.outside import OUTSIDE
from tests.tiny.stock import CASES
from tread import ConfigError

TOLERANCE: Any = {"rtol": 1e-5, "atol": 1e-5}

pytestmark = pytest.mark.filterwarnings("ignore::tread.routing.risks.RiskWarning")
every_case = pytest.mark.parametrize("case", CASES + OUTSIDE, ids=lambda case: case.name)


def windows_of(depth: int) -> list[list[dict]]:
    """First to last; an inner one that crosses stacks; two that touch, one counted from the end; the last layer."""
    middle = depth // 2
    several = [route(0, middle - 1, 0.25), route(middle - depth, -1, 0.6)] if middle else [route(0, -1, 0.6)]
    return [[route(0, -1)], inner(depth), several, [route(-1, -1)]]


def gradients(output: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weight = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    return dict(zip(names, torch.autograd.grad((output * weight).sum(), parameters, allow_unused=True), strict=True))


def assert_same(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], **tolerance: Any) -> None:
    for name, value in expected.items():
        other = got[name]
        assert (value is None) == (other is None), f"{name} has a gradient on one side only"
        if value is not None and other is not None:
            scale = value.abs().max().clamp(min=1)
            close = torch.allclose(other / scale, value / scale, **(tolerance or TOLERANCE))
            assert close, f"gradient of {name} differs by {((other - value) / scale).abs().max():.2e}"


def leaves(value: Any) -> list[Tensor]:
    """The tensors of numbers in an argument, which may be a list of them."""
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 else []


def kept_mask(selection: Tensor, tokens: int) -> Tensor:
    kept = torch.zeros(selection.shape[0], tokens, dtype=torch.bool, device=selection.device)
    return kept.scatter(1, selection, True)


@every_case
def test_all_forced_and_ratio_zero_equal_dense(case: Case):
    model, arguments = case.model(), case.inputs(case.batch)
    dense = case.call(model, arguments)
    expected = gradients(dense, model)
    target = case.tokens - case.references
    with tread.attach(model, {"routes": [route(0, -1)]}) as handle:
        with handle.force_keep(torch.ones(case.batch, target, dtype=torch.bool)):
            forced = case.call(model, arguments)
        assert handle.selections[0].shape == (case.batch, case.tokens), "the machinery ran"
        torch.testing.assert_close(forced, dense, **TOLERANCE)
        assert_same(gradients(forced, model), expected)
        with handle.permuted():  # what belongs to a token follows it
            torch.testing.assert_close(case.call(model, arguments), dense, **TOLERANCE)
        assert not handle.selections[0].diff(dim=1).gt(0).all(), "the order is another"
    with tread.attach(model, {"routes": [route(0, -1, 0.0)]}) as handle:
        torch.testing.assert_close(case.call(model, arguments), dense, **TOLERANCE)
        assert handle.selections[0].shape[1] == case.tokens


@every_case
@pytest.mark.parametrize("which", range(4), ids=["first to last", "inner", "several", "last"])
def test_output_and_gradients_equal_the_oracle(case: Case, which: int):
    model, arguments = case.model(), case.inputs(case.batch)
    routes = windows_of(case.depth)[which]
    dense = case.call(model, arguments)
    with tread.attach(model, {"routes": routes, "reference_tokens": "route"}) as handle:
        routed = case.call(model, arguments)
        selections, plan = handle.selections, handle.plan
        got = gradients(routed, model)
    assert not torch.allclose(routed, dense, atol=1e-4), "routing must make a difference"
    windows = [
        (r.start_layer_idx, r.end_layer_idx, kept_mask(selection, case.tokens))
        for r, selection in zip(plan.routes, selections, strict=True)
    ]
    with oracle(case, model, windows):
        expected = case.call(model, arguments)
        torch.testing.assert_close(routed, expected, **TOLERANCE)
        assert_same(got, gradients(expected, model))


@every_case
def test_a_batch_equals_its_samples(case: Case):
    if case.batch == 1:
        pytest.skip("the stock class takes one sample at a time")
    model, arguments = case.model(), case.inputs(case.batch)
    with tread.attach(model, {"routes": [route(0, -1)]}) as handle:
        whole = case.call(model, arguments)
        selection = handle.selections[0]
        assert not selection[0].equal(selection[1]), "each sample has its own tokens"
        for i in range(case.batch):
            with handle.routed(selections=[selection[i : i + 1]]):
                alone = case.call(model, one_sample(arguments, case.batch, i))
            torch.testing.assert_close(alone[0], whole[i], **TOLERANCE)


@every_case
def test_checkpointing_and_two_forwards_change_nothing(case: Case):
    if "checkpoint" in case.defects:
        pytest.xfail(case.defects["checkpoint"])
    model, arguments = case.model(), case.inputs(case.batch)
    depth = case.depth
    with tread.attach(model, {"routes": [route(min(1, depth - 1), -1)]}) as handle:
        handle.set_step(0)
        first, second = (gradients(case.call(model, arguments), model) for _ in range(2))
        if not getattr(model, "_supports_gradient_checkpointing", False):
            pytest.skip("the stock class has no gradient checkpointing")
        model.enable_gradient_checkpointing()
        handle.set_step(0)
        outputs = [case.call(model, arguments) for _ in range(2)]
        assert_same(gradients(outputs[0], model), first, rtol=1e-6, atol=1e-6)
        assert_same(gradients(outputs[1], model), second, rtol=1e-6, atol=1e-6)
        model.disable_gradient_checkpointing()


@every_case
def test_every_parameter_and_every_token_keeps_its_gradient(case: Case):
    model, arguments = case.model(), case.inputs(case.batch)
    named = sorted(arguments, key=lambda name: name != "hidden_states")
    stream = next(leaf for name in named for leaf in leaves(arguments[name]))
    stream.requires_grad_()
    dense = case.call(model, arguments)
    has = {key for key, value in gradients(dense, model).items() if value is not None}
    (every,) = torch.autograd.grad(case.call(model, arguments).square().sum(), stream)  # none where it is padding
    with tread.attach(model, {"routes": [route(0, -1)]}):
        routed = case.call(model, arguments)
        assert {key for key, value in gradients(routed, model).items() if value is not None} == has
        (token,) = torch.autograd.grad(case.call(model, arguments).square().sum(), stream)
    assert every.count_nonzero() > 0.5 * every.numel()
    assert (token[every != 0] != 0).float().mean() > 0.99


@every_case
def test_eval_and_no_grad_run_dense(case: Case):
    model, arguments = case.model(), case.inputs(case.batch)
    dense = case.call(model, arguments)
    calm = case.call(model.eval(), arguments)  # in eval some models return another layout
    with torch.no_grad():  # without gradients torch may choose another attention kernel
        quiet = case.call(model.train(), arguments)
    with tread.attach(model.train(), {"routes": [route(0, -1)]}) as handle:
        with torch.no_grad():
            assert case.call(model, arguments).equal(quiet)
            with handle.routed(selection_ratio=0.75):
                assert not torch.allclose(case.call(model.eval(), arguments), calm, atol=1e-4)
                droppable = case.tokens - case.references - case.pinned
                assert handle.selections[0].shape[1] == case.tokens - int(droppable * 0.75)
        assert case.call(model.eval(), arguments).equal(calm)
        with handle.dense():
            assert case.call(model.train(), arguments).equal(dense)


@every_case
def test_forced_and_reference_tokens_survive(case: Case):
    model, arguments = case.model(), case.inputs(case.batch)
    target = case.tokens - case.references
    mask = torch.zeros(case.batch, target, dtype=torch.bool)
    mask[0, : target // 3] = True
    mask[-1, -2:] = True
    # a window that opens in the last stack, where other tokens may be joined to the image's
    with tread.attach(model, {"routes": [route(-1, -1, 0.7)]}) as handle, handle.force_keep(mask):
        case.call(model, arguments)
        kept = kept_mask(handle.selections[0], case.tokens)
    if case.references_at == "first":
        kept = kept.roll(target, dims=1)
    assert kept[:, :target][mask].all()
    assert kept[:, target:].all()
    assert kept[:, : case.pinned].all()
    assert not kept.all()


@pytest.mark.parametrize("case", [case for case in CASES + OUTSIDE if case.refused], ids=lambda case: case.name)
def test_forwards_that_cannot_be_routed_are_refused(case: Case):
    assert case.refused is not None
    model = case.model()
    with tread.attach(model, {"routes": [route(0, -1)]}) as handle:
        arguments = case.refused(model, case.batch)
        with pytest.raises(ConfigError, match="cannot be routed in this forward: "):
            case.call(model, arguments)
        with torch.no_grad(), handle.dense():
            assert case.call(model, arguments).isfinite().all()


def save_and_load(model: Any, folder: Path) -> dict[str, Tensor]:
    """The weights, saved and loaded in the model's own way, else in torch's."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).state_dict()
    torch.save(model.state_dict(), folder / "weights.pt")
    return torch.load(folder / "weights.pt", weights_only=True)


@every_case
def test_detach_leaves_no_trace(case: Case, tmp_path: Path):
    model, arguments = case.model(), case.inputs(case.batch)
    before, names = case.call(model, arguments), list(model.state_dict())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(m.__dict__)) for m in model.modules()]
    handle = tread.attach(model, {"routes": [route(0, -1)]})
    case.call(model, arguments)
    assert list(model.state_dict()) == names
    saved = save_and_load(model, tmp_path)
    assert all(value.equal(saved[name]) for name, value in model.state_dict().items())
    tread.attach(model, {"routes": [route(0, -1)]}).detach()  # a second attach replaces the first
    handle.detach()
    after = [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(m.__dict__)) for m in model.modules()]
    assert after == hooks
    assert case.call(model, arguments).equal(before)


@every_case
def test_bf16_autocast(case: Case):
    if "autocast" in case.defects:
        pytest.xfail(case.defects["autocast"])
    model, arguments = case.model(), case.inputs(case.batch)
    with tread.attach(model, {"routes": [route(0, -1)]}) as handle:
        handle.set_step(0)
        exact = case.call(model, arguments)
        handle.set_step(0)
        with torch.autocast("cpu", torch.bfloat16):
            rough = case.call(model, arguments)
        rough.float().sum().backward()
    assert torch.nn.functional.cosine_similarity(rough.float().flatten(), exact.flatten(), dim=0) > 0.99


@every_case
def test_copies_are_stock_models(case: Case):
    """A copy of a routed model trains dense, output and gradients; the model itself routes as before it was copied."""
    model, arguments = case.model(), case.inputs(case.batch)
    dense = case.call(model, arguments)
    expected = gradients(dense, model)
    with tread.attach(model, {"routes": [route(0, -1)]}) as handle:
        handle.set_step(0)
        routed = case.call(model, arguments)
        assert not torch.allclose(routed, dense, atol=1e-4), "routing must make a difference"
        twin = copy.deepcopy(model)
        copied = case.call(twin, arguments)
        assert copied.equal(dense), "no handle could reach it"
        assert_same(gradients(copied, twin), expected, rtol=1e-6, atol=1e-6)
        handle.set_step(0)
        again = case.call(model, arguments)
        assert again.equal(routed)
        assert_same(gradients(again, model), gradients(routed, model), rtol=1e-6, atol=1e-6)
    assert case.call(twin, arguments).equal(dense)
