"""Models that live outside diffusers: found by name and structure, and what the contract does not ask of them."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tread
from tests.attach.attached import Attach
from tests.attach.oracle import oracle
from tests.attach.selected import route
from tests.tiny.case import Case
from tests.tiny.outside import OUTSIDE, wan
from tests.tiny.outside.dit import DiT, SiT
from tests.tiny.outside.flux import Flux, TrainersFlux
from tests.tiny.outside.wan import WanModel, of_two_sizes
from tread.attach.families import ELSEWHERE
from tread.attach.families.dit_sit import DIT_SIT, DIT_SIT_REPA
from tread.attach.families.flux_bfl import FLUX_BFL, FLUX_BFL_CONTROLLED
from tread.attach.families.wan_model import WAN_MODEL
from tread.attach.registry import family_for, family_of
from tread.models.dit import DiT as OurDiT

pytestmark = pytest.mark.filterwarnings("ignore")
BY_NAME = {case.name: case for case in OUTSIDE}
WAN, LIGHTNING, REPA = (BY_NAME[f"outside-{name}"] for name in ("wan", "lightningdit", "sit-repa"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def named(name: str, *bases: type, **members: Any) -> type:
    return type(name, bases or (nn.Module,), members)


def test_the_structure_decides_between_families_of_one_name():
    found = {Flux: FLUX_BFL, TrainersFlux: FLUX_BFL_CONTROLLED, SiT: DIT_SIT_REPA, DiT: DIT_SIT, WanModel: WAN_MODEL}
    for cls, family in found.items():
        assert family_of(cls()) is family
        assert family_of(named("Mine", cls)()) is family, "a subclass"
    assert family_of(named("SiT", DiT)()) is DIT_SIT, "without REPA's projectors"
    assert family_of(named("DiT", SiT)()) is DIT_SIT_REPA, "with them"


def test_every_class_name_has_a_case():
    built = {cls.__name__ for case in OUTSIDE for cls in type(case.build()).__mro__}
    assert {name for family in ELSEWHERE for name in family.models} <= built


class OtherBlock(nn.Module):
    def forward(self, x: torch.Tensor, context: torch.Tensor, t_mod: torch.Tensor, freqs: torch.Tensor):
        return x


def test_a_class_of_the_same_name_and_another_structure_is_not_taken():
    """Another repository's WanModel, a DiT of something else, and a model that keeps nothing but the name."""
    other = WanModel()
    other.blocks = nn.ModuleList([OtherBlock()])
    how = "docs/own-model.md says how to declare one with tread.Family."
    for model, message in (
        (
            other,
            "there is no family for WanModel: it is not the WanModel that tread knows. Side(name='e'): no layer in "
            f"'blocks' takes 'e'. They take: x, context, t_mod, freqs. {how}",
        ),
        (
            named("DiT")(),
            "there is no family for DiT: it is not the DiT that tread knows. DiT has no 'x_embedder', which a model of "
            f"this family has. {how}",
        ),
        (
            named("Mine", named("Flux"))(),
            "there is no family for Mine: it is not the Flux that tread knows. Mine has no 'img_in', which a model of "
            f"this family has. {how}",
        ),
    ):
        with pytest.raises(tread.ConfigError, match=f"^{re.escape(message)}$"):
            family_of(model)


def test_our_own_dit_says_that_it_routes_itself():
    message = "tread's own DiT routes itself: call model.route(config) instead of tread.attach."
    for cls in (OurDiT, named("Mine", OurDiT)):
        model = cls(input_size=4, patch=1, in_channels=1, depth=4, width=16, heads=2, num_classes=2)
        with pytest.raises(tread.ConfigError, match=f"^{re.escape(message)}$"):
            family_of(model)


def test_the_rotary_function_is_that_of_the_models_own_module(attach: Attach):
    # a copy of an attached model that was not detached leaves it taught
    stock = inspect.unwrap(wan.rope_apply)
    assert family_for(WAN.model()).rotary[0].function == f"{wan.__name__}.rope_apply"
    handle = attach(WAN.model(), {"routes": [route(0, -1)]})
    assert wan.rope_apply is not stock
    q, grid, freqs = torch.randn(2, 21, 2, 12), torch.tensor([[3, 2, 3]] * 2), WAN.model().freqs
    assert wan.rope_apply(q, grid, freqs).equal(stock(q, grid, freqs))
    handle.detach()
    assert wan.rope_apply is stock


def test_videos_of_two_sizes_are_refused(attach: Attach):
    model = WAN.model()
    attach(model, {"routes": [route(0, -1)]})
    with pytest.raises(tread.ConfigError, match=r"different sizes, \[\(1, 4, 4\), \(3, 4, 6\)\]"):
        model(**of_two_sizes(model, 2))


def test_a_layer_that_rotates_by_another_function_says_so(attach: Attach):
    """Sequence parallelism replaces the forward of each attention, which then looks up another function."""
    model = WAN.model()
    attach(model, {"routes": [route(0, -1)]})
    model.blocks[1].self_attn.forward = lambda x, lens, grid, freqs: x * freqs.split(2)
    with pytest.raises(AttributeError, match=r"used 'split' of an argument that its family declares with Side\(full"):
        WAN.call(model, WAN.inputs(2))


def test_projectors_see_every_token(attach: Attach):
    """REPA's are inside the window here; dropped tokens are as they were when it opened."""
    model, arguments = REPA.model(), REPA.inputs(2)
    handle = attach(model, {"routes": [route(1, -1)]})
    _, (projected,) = model(**arguments)
    kept = handle.kept
    handle.detach()
    assert kept is not None
    assert projected.shape == (2, REPA.tokens, 5)
    with oracle(REPA, model, [(1, 3, kept)]):
        _, (expected,) = model(**arguments)
    torch.testing.assert_close(projected, expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(projected[~kept].sum(), model.x_embedder.proj.weight)
    assert gradient.isfinite().all()
    assert gradient.count_nonzero() > 0


def test_forward_with_cfg_is_routed_like_the_model(attach: Attach):
    """It calls `self.forward`, not the model."""
    case = BY_NAME["outside-dit"]
    model, arguments = case.model().eval(), case.inputs(2)
    dense = model.forward_with_cfg(**arguments, cfg_scale=2.0)
    handle = attach(model, {"routes": [route(0, -1)]})
    with torch.no_grad():
        torch.testing.assert_close(model.forward_with_cfg(**arguments, cfg_scale=2.0), dense)
    with handle.routed(0.75):
        routed = model.forward_with_cfg(**arguments, cfg_scale=2.0)
    assert handle.selections[0].shape == (2, 9)
    both = {**arguments, "x": arguments["x"][:1].repeat(2, 1, 1, 1)}
    with handle.routed(selections=handle.selections):
        cond, uncond = case.call(model, both).chunk(2)
    torch.testing.assert_close(routed[:1], uncond + 2 * (cond - uncond))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_rope_of_full_sequences_is_found_again_by_checkpointing(reentrant: bool, attach: Attach):
    model, arguments = LIGHTNING.model(), LIGHTNING.inputs(2)
    handle = attach(model, {"routes": [route(1, -2)]})
    gradients = []
    for model.use_checkpoint, model.reentrant in ((False, False), (True, reentrant)):
        handle.set_step(0)
        model.zero_grad()
        model(**arguments).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("what", ["layers", pytest.param("model", marks=pytest.mark.contract)])
@pytest.mark.parametrize("case", [WAN, LIGHTNING, BY_NAME["outside-flux"]], ids=lambda case: case.name)
def test_compiled(case: Case, what: str, attach: Attach):
    """The same numbers, and nothing compiled again when the step changes."""
    expected, model = [], case.model()
    with tread.attach(model, {"routes": [route(1, -2)]}) as handle:
        for step in range(3):
            handle.set_step(step)
            expected.append(case.call(model, case.inputs(2)).detach())
    count = CompileCounterWithBackend("aot_eager")
    handle = attach(model, {"routes": [route(1, -2)]})
    for module in [model] if what == "model" else [layer for _, layer in case.layers(model)]:
        module.compile(backend=count, dynamic=False)
    graphs = []
    for step in range(3):
        handle.set_step(step)
        output = case.call(model, case.inputs(2))
        output.sum().backward()
        torch.testing.assert_close(output.detach(), expected[step], rtol=1e-5, atol=1e-5)
        graphs.append(count.frame_count)
    assert graphs[0] > 0
    assert graphs[0] == graphs[2], "compiled again when the step changed"
