"""`choose_routes` in a loop of one's own: a stock FLUX of eight layers and 64 tokens, steps by a known law."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tread
from tests.autotune.tuned import Law, measurements, plans_by_hand
from tread.attach.attach import Attachment
from tread.autotune.choose import choose_routes
from tread.autotune.cost import routes_of
from tread.autotune.subject import LEVELS
from tread.errors import ConfigError
from tread.routing.plan import RoutePlan

pytestmark = pytest.mark.filterwarnings("ignore")
OUT = Path("autotune/loop")
SIDE, TEXT = 8, 4
PLAN = {"preset": "paper", "schedule": {"warmup_steps": 10, "total_steps": 100}}


@dataclass
class OwnTraining:
    """A loop as people write it."""

    model: FluxTransformer2DModel
    handle: Attachment

    def predict(self, batch: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """Prediction and target, (B, S, C) each; noise depends on the batch alone."""
        noise = torch.randn(batch.shape, generator=torch.Generator().manual_seed(len(batch)))
        text = torch.ones(len(batch), TEXT, 16)
        rows = torch.arange(SIDE).repeat_interleave(SIDE)
        found = self.model(
            hidden_states=(1 - t) * batch + t * noise,
            encoder_hidden_states=text,
            pooled_projections=text.mean(1),
            timestep=torch.full((len(batch),), t),
            img_ids=torch.stack([torch.zeros(SIDE**2), rows, torch.arange(SIDE).repeat(SIDE)], 1),
            txt_ids=torch.zeros(TEXT, 3),
            return_dict=False,
        )[0]
        return found, noise - batch

    def step(self, batch: Tensor) -> None:
        """Forward and backward."""
        found, target = self.predict(batch, 0.5)
        (found - target).square().mean().backward()

    def token_losses(self, batch: Tensor, u: float) -> Tensor:
        """The squared error of each token, (B, S)."""
        found, target = self.predict(batch, u)
        return (found - target).square().mean(2)

    def choose(self, **options: Any) -> RoutePlan:
        """Few windows, so that a test is quick."""
        given: dict[str, Any] = {"edges": 4, "ratios": (0.25, 0.5), "batches": batches()}
        given |= {"step": self.step, "token_losses": self.token_losses}
        return choose_routes(self.handle, **given | options)


def batches() -> list[Tensor]:
    """Two batches (B, S, C)."""
    return [torch.randn(4, SIDE**2, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]


@pytest.fixture
def own() -> OwnTraining:
    """A model whose every weight matters."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=3, num_single_layers=5, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6), guidance_embeds=False,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return OwnTraining(model, tread.attach(model, PLAN))


def test_the_choice_is_the_best_of_all_plans(law: Law, own: OwnTraining, capsys: pytest.CaptureFixture[str]) -> None:
    """Every plan of the measured windows by hand."""
    plan = own.choose(target_speedup=1.12)
    facts = measurements(OUT)
    gap = min(gap for speedup, gap, _ in plans_by_hand(facts, law) if speedup >= 1.12)
    assert min(one["gap"] for one in facts["result"]["finalists"]) == pytest.approx(gap, rel=1e-9)
    assert plan.resolve(8).routes == routes_of(facts["result"]["chosen"])
    assert plan.schedule == own.handle.plan.schedule
    shown = capsys.readouterr().out
    assert "FluxTransformer2DModel of 8 layers" in shown
    assert f"train with: tread.attach(model, '{OUT / 'tread_config.json'}')" in shown
    assert (OUT / "report.html").is_file()


@pytest.mark.parametrize("routed_loss", ["all", "kept"])
def test_gaps_are_those_of_a_model_with_these_routes(law: Law, own: OwnTraining, routed_loss: str) -> None:
    """Another handle on the same model, each forward and mean by hand."""
    own.choose(routed_loss=routed_loss)
    losses = measurements(OUT)["losses"]
    own.model.eval()
    for name in list(losses)[:3]:
        handle = tread.attach(own.model, {"routes": [route.to_config() for route in routes_of(name)]})
        for u, (dense, routed) in zip(LEVELS, losses[name], strict=True):
            expected: dict[str, list[float]] = {"dense": [], "routed": []}
            for index, batch in enumerate(batches()):
                with torch.no_grad(), handle.routed(step=index):
                    one = own.token_losses(batch, u)
                kept = handle.kept
                assert kept is not None
                with torch.no_grad(), handle.dense():
                    other = own.token_losses(batch, u)
                for kind, some in (("routed", one), ("dense", other)):
                    expected[kind].append(float(some.mean() if routed_loss == "all" else some[kept].mean()))
            assert dense == pytest.approx(sum(expected["dense"]) / 2, rel=1e-5)
            assert routed == pytest.approx(sum(expected["routed"]) / 2, rel=1e-5)


def test_the_loop_is_left_as_it_was(law: Law, own: OwnTraining) -> None:
    """Weights, gradients, mode and routes."""
    before, plan = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}, own.handle.plan
    own.model.train()
    found = own.choose()
    assert own.handle.plan == plan
    assert own.model.training
    assert all(parameter.grad is None for parameter in own.model.parameters())
    for name, tensor in own.model.state_dict().items():
        assert tensor.equal(before[name]), name
    own.handle.reroute(found)
    own.handle.set_step(99)
    own.step(batches()[0])
    assert own.handle.kept is not None


def test_the_step_and_the_mode_of_every_module_are_restored(law: Law, own: OwnTraining) -> None:
    """A loop in the middle of its training: its next selections are those that it would have drawn."""
    own.model.train()
    own.model.proj_out.eval()
    own.handle.set_step(50)
    own.step(batches()[0])
    state, modes = own.handle.state_dict(), [module.training for module in own.model.modules()]
    assert state == {"step": 50, "micro_step": 1}
    own.choose()
    assert own.handle.state_dict() == state
    assert [module.training for module in own.model.modules()] == modes
    own.step(batches()[0])  # the schedule still knows its step
    assert own.handle.state_dict() == {"step": 50, "micro_step": 2}


def test_what_is_said_names_arguments(
    law: Law, own: OwnTraining, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no command, and no --start-steps."""
    monkeypatch.setattr(sys, "argv", ["loop.py"])  # the page has the program's own arguments
    own.choose(ratios=(0.25, 0.5, 0.6), token_losses=lambda batch, u: 1 / own.token_losses(batch, u))
    shown = capsys.readouterr().out
    assert "note: ratios 0.6 left out" in shown
    assert "have a lower loss routed than dense" in shown
    assert "train it further before its routes are chosen" in shown
    with pytest.raises(ConfigError, match=r"changes no prediction .*: train it further before"):
        own.choose(out="flat", token_losses=lambda batch, u: torch.ones(4, SIDE**2))
    with pytest.raises(ConfigError, match=r"^budget_minutes 1e-06 ended .* give the same call again"):
        own.choose(out="short", budget_minutes=1e-6)
    shown = capsys.readouterr().out + (OUT / "report.html").read_text()
    assert "--" not in re.sub(r"<style.*?</style>|<svg.*?</svg>|var\(--|<!--|-->", "", shown, flags=re.DOTALL)


def test_an_adapter_has_its_own_ceiling(law: Law, own: OwnTraining) -> None:
    own.model.requires_grad_(False)
    own.model.proj_out.requires_grad_(True)
    own.choose(ratios=(0.25, 0.5, 0.6))
    assert {route.selection_ratio for name in measurements(OUT)["losses"] for route in routes_of(name)} == {0.25, 0.5}


def test_the_same_call_goes_on(law: Law, own: OwnTraining) -> None:
    """Nothing is measured twice, and another model's figures are not mixed in."""
    found = own.choose()
    calls = law.calls, law.asked
    assert own.choose() == found
    assert (law.calls, law.asked) == calls
    with pytest.raises(ConfigError, match=r"has measurements of something else \(batches: 2 -> 1\)"):
        own.choose(batches=batches()[:1])
    own.model.proj_out.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"has measurements of something else .* name another out, or"):
        own.choose()
    own.model.proj_out.requires_grad_(True)
    with torch.no_grad():
        own.model.proj_out.weight.mul_(1.01)
    with pytest.raises(ConfigError, match=r"has measurements of something else \(norm: "):
        own.choose()


def trains(own: OwnTraining) -> dict[str, Any]:
    optimizer = torch.optim.SGD(own.model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        own.step(batch)
        optimizer.step()

    return {"step": step}


def detached(own: OwnTraining) -> dict[str, Any]:
    own.handle.detach()
    return {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (trains, "leave the optimizer out"),
        (detached, "attach the model again"),
        (lambda own: {"batches": []}, "batches is empty"),
        (lambda own: {"target_speedup": 1.2, "max_loss_gap": 0.1}, "not both"),
        (lambda own: {"target_speedup": 9.0}, r"no plan within the rules reaches .* Ask for target_speedup 1\.\d+;"),
        (lambda own: {"target_speedup": 0.9}, "^target_speedup is 0.9; it must be above 1"),
        (lambda own: {"max_loss_gap": 0.0}, "^max_loss_gap is 0.0; it must be above 0"),
        (lambda own: {"ratios": [0.75]}, "^ratios has none of at most 0.5"),
        (lambda own: {"budget_minutes": 0.0}, "^budget_minutes is 0.0"),
        (lambda own: {"token_losses": lambda batch, u: own.token_losses(batch, u).mean(1)}, r"\(samples, tokens\)"),
        (
            lambda own: {"routed_loss": "kept", "token_losses": lambda batch, u: own.token_losses(batch, u)[:, :9]},
            r"\(4, 9\) and the model routes \(4, 64\)",
        ),
    ],
)
def test_refuses(law: Law, own: OwnTraining, options: Callable[[OwnTraining], dict[str, Any]], words: str) -> None:
    plan, given = own.handle.plan, options(own)
    with pytest.raises(ConfigError, match=words):
        own.choose(**given)
    assert own.handle.plan == plan


def test_compiled_layers_stay_compiled(law: Law, own: OwnTraining) -> None:
    """What the user has compiled is not taken off: a length that was not measured is compiled when it comes."""
    count = CompileCounterWithBackend("eager")
    own.handle.compile(backend=count)
    own.choose()
    measured = count.frame_count
    own.handle.reroute(RoutePlan.from_config({"routes": [route.to_config() for route in routes_of("2..4@0.125")]}))
    own.step(batches()[0])
    assert count.frame_count > measured > 0
