"""Every optimizer: exact resume through a checkpoint file, agreement with its definition, rounding without bias."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.training.optimizers.adamw_bf16 import AdamWBF16, round_to_bf16
from tread.training.optimizers.make import OPTIMIZERS, make_optimizer
from tread.training.parts import load_optimizer, optimizer_tensors
from tread.training.settings import OptimizerConfig

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
FACTORS = {"prodigy": 1e5}
"""Prodigy multiplies an estimate, which is a millionth in its first steps."""


def settings(
    name: Any = "adamw",
    learning_rate: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> OptimizerConfig:
    return OptimizerConfig(
        name=name,
        learning_rate=learning_rate,
        schedule="constant",
        warmup_steps=0,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        clip=None,
    )


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix that is large enough for 8-bit states, and two that are not."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 80), (8, 16), (16,))
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(dtype) for p in parameters()]


def run(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: range, rate: float = 1e-2) -> None:
    for step in steps:
        for weight, gradient in zip(weights, gradients(step, weights[0].dtype), strict=True):
            weight.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate / (1 + step)  # as the loop does
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_resumed_run_is_the_run(name: str, dtype: torch.dtype, tmp_path: Path):
    rate = 1e-2 * FACTORS.get(name, 1)
    whole = parameters(dtype)
    run(make_optimizer(whole, settings(name=name)), whole, range(6), rate)

    first = parameters(dtype)
    optimizer = make_optimizer(first, settings(name=name))
    run(optimizer, first, range(3), rate)
    save_file(optimizer_tensors(optimizer), tmp_path / "optimizer.safetensors")
    second = [nn.Parameter(weight.detach().clone()) for weight in first]
    resumed = make_optimizer(second, settings(name=name))
    load_optimizer(resumed, load_file(tmp_path / "optimizer.safetensors"), tmp_path)
    run(resumed, second, range(3, 6), rate)

    for expected, found in zip(whole, second, strict=True):
        assert torch.equal(expected, found)
    fresh = [nn.Parameter(weight.detach().clone()) for weight in first]
    run(make_optimizer(fresh, settings(name=name)), fresh, range(3, 6), rate)
    assert not torch.equal(fresh[0], whole[0]), "the state matters, so losing it would have been seen"


@every_optimizer
def test_it_minimises(name: str):
    """40 steps from 3 down to 0; Muon takes all equal elements for one direction, and Prodigy finds its rate first."""
    rate, steps = (1.0, 200) if name == "prodigy" else (0.1, 40)
    reached = {"adafactor": 2.9, "muon": 2.95, "adamw-schedule-free": 1.5}.get(name, 1.0)
    weight = nn.Parameter(torch.full((64, 80), 3.0))
    optimizer = make_optimizer([weight], settings(name=name, learning_rate=rate, weight_decay=0.0))
    for _ in range(steps):
        weight.grad = weight.detach().clone()  # of weight**2 / 2
        optimizer.step()
    assert weight.abs().mean() < reached


@pytest.mark.parametrize("name", ["adamw-8bit", "lion-8bit"])
def test_8bit_moments_take_a_byte_each(name: str):
    weights = parameters()
    optimizer = make_optimizer(weights, settings(name=name))
    run(optimizer, weights, range(1))
    moments = 2 if name.startswith("adamw") else 1
    held = sum(tensor.nbytes for key, tensor in optimizer_tensors(optimizer).items() if key.startswith("0."))
    count = weights[0].numel()
    assert moments * count <= held < moments * count * 1.05


@pytest.mark.parametrize("name", ["adamw-8bit", "adamw-bf16"])
def test_they_follow_adamw(name: str):
    expected, found = parameters(), parameters()
    run(make_optimizer(expected, settings()), expected, range(6))
    run(make_optimizer(found, settings(name=name)), found, range(6))
    start = parameters()
    for a, b, s in zip(expected, found, start, strict=True):
        moved = (a - s).norm()
        # float32 weights get plain AdamW; 8-bit moments are within a few hundredths of it
        assert (a - b).norm() < (1e-5 if name == "adamw-bf16" else 0.1) * moved
        assert moved > 0


def test_8bit_lion_follows_lion():
    expected, found = parameters(), parameters()
    run(make_optimizer(expected, settings(name="lion")), expected, range(6))
    run(make_optimizer(found, settings(name="lion-8bit")), found, range(6))
    torch.testing.assert_close(found[2], expected[2])  # too small to be quantized: the same formula
    assert (found[0] - expected[0]).norm() < 0.35 * (expected[0] - parameters()[0]).norm()


def test_lion_by_hand():
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = make_optimizer([weight], settings(name="lion", learning_rate=0.1, betas=(0.5, 0.9)))
    weight.grad = torch.tensor([0.3, -0.4, 0.0])
    optimizer.step()
    decayed = torch.tensor([1.0, -2.0, 3.0]) * (1 - 0.1 * 0.1)
    torch.testing.assert_close(weight.detach(), decayed - 0.1 * torch.tensor([1.0, -1.0, 0.0]))
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], 0.1 * torch.tensor([0.3, -0.4, 0.0]))


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit", "adamw-bf16", "muon"])
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_eps_by_hand(name: str, eps: float):
    """After one step both bias-corrected moments are those of the gradient: its value and its square."""
    weight, gradient = nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), torch.tensor([0.3, -0.4, 0.1])
    optimizer = make_optimizer([weight], settings(name=name, learning_rate=0.1, eps=eps))
    weight.grad = gradient.clone()
    optimizer.step()
    decayed = torch.tensor([1.0, -2.0, 3.0]) * (1 - 0.1 * 0.1)
    torch.testing.assert_close(weight.detach(), decayed - 0.1 * gradient / (gradient.abs() + eps))


def test_every_eps_that_is_tested_is_torchs_default():
    assert OptimizerConfig().eps == torch.optim.AdamW(parameters()).defaults["eps"]
    optimizer = make_optimizer(parameters(), settings(eps=1e-3))
    assert {group["eps"] for group in optimizer.param_groups} == {1e-3}


def test_rounding_keeps_the_mean_and_lands_on_neighbours():
    x = torch.tensor([1.0 + 2**-9, -(1.0 + 2**-9), 1.0, 0.0, float("inf")])[:, None].expand(5, 1 << 16).contiguous()
    chance = torch.arange(1 << 16, dtype=torch.int32).expand(5, -1)
    rounded = round_to_bf16(x, chance).double()
    # 1 + 2**-9 lies a quarter of the way between bfloat16's 1 and 1 + 2**-7
    torch.testing.assert_close(rounded[:2].mean(dim=1), x[:2, 0].double(), rtol=0, atol=0)
    assert set(rounded[0].tolist()) == {1.0, 1.0 + 2**-7}
    assert (rounded[2:] == x[2:].double()).all()


def test_small_steps_survive_in_bf16():
    """A thousand steps of 1e-4 on weights of 1: nearest rounding would leave every one of them at 1."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = AdamWBF16([weight], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(0.9, abs=0.002)
    square = optimizer.state[weight]["exp_avg_sq"]
    assert square.dtype == torch.bfloat16
    assert square.float().mean().item() == pytest.approx(1 - 0.999**1000, rel=0.02)


def test_rounding_is_drawn_anew_for_every_step_weight_and_element():
    """The weights that a step rounded up: half of them, and no two patterns alike."""
    weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AdamWBF16(weights, lr=2.0**-9, betas=(0.9, 0.999), weight_decay=0.0)  # 1 - 2**-9 is half way
    patterns: list[Tensor] = []
    for _ in range(2):
        for weight in weights:
            weight.data.fill_(1)
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        patterns += [part for weight in weights for part in (weight == 1).float().flatten().chunk(2)]
    for i, pattern in enumerate(patterns):
        assert pattern.mean().item() == pytest.approx(0.5, abs=0.05)
        for other in patterns[:i]:
            assert (pattern == other).float().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["adamw-8bit", "lion-8bit"])
def test_8bit_steps_are_counted_exactly_after_a_resume_in_bf16(name: str):
    """Bfloat16, which the library gives the state of such a weight, holds whole numbers up to 256."""
    weights = parameters(torch.bfloat16)
    optimizer = make_optimizer(weights, settings(name=name))
    run(optimizer, weights, range(1))
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["step"] = torch.tensor(301.0)
    optimizer.load_state_dict(state)
    assert {values["step"] for values in optimizer.state.values()} == {301}


def test_an_unknown_name_says_what_is_known():
    with pytest.raises(ConfigError, match=r"optimizer.name is 'adamw8bit'. Did you mean 'adamw-8bit'\?.*adafactor"):
        make_optimizer(parameters(), settings(name="adamw8bit"))
