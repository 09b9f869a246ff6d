"""Prodigy, schedule-free AdamW and Muon against recursions written from their papers, and the loop's use of them."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.tiny.runs import assert_same_state, final_state, make_session, metrics, train
from tread.errors import ConfigError
from tread.training import checkpoint, parts
from tread.training.optimizers import self_tuned
from tread.training.optimizers.make import averaged_weights, keeps_average, make_optimizer
from tread.training.optimizers.muon import embedding_tables
from tread.training.session import Session
from tread.training.settings import OptimizerConfig

START = np.array([3.0, -1.0, 0.5, 2.0])
CURVATURE = np.array([1.0, 4.0, 0.1, 2.0])
BETAS, EPS = (0.9, 0.99), 1e-8


def config(name: Any, rate: float, decay: float = 0.1) -> OptimizerConfig:
    return OptimizerConfig(
        name=name, learning_rate=rate, betas=BETAS, eps=EPS, weight_decay=decay, warmup_steps=0, clip=None
    )


def descend(name: Any, rates: list[float]) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A weight after one step of each rate on a quadratic, in float64."""
    weight = nn.Parameter(torch.tensor(START))
    optimizer = make_optimizer([weight], config(name, rates[-1]))
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor(CURVATURE) * weight.detach()
        optimizer.step()
    return weight, optimizer


# Mishchenko and Defazio 2023, Algorithm 4, with Adam's bias correction and decoupled weight decay
def prodigy(rates: list[float], decay: float = 0.1, d0: float = 1e-6) -> tuple[np.ndarray, float]:
    x, d, r = START.copy(), d0, 0.0
    m, v, s = np.zeros(4), np.zeros(4), np.zeros(4)
    root = math.sqrt(BETAS[1])
    for k, rate in enumerate(rates, 1):
        g = CURVATURE * x
        step = d * rate * math.sqrt(1 - BETAS[1] ** k) / (1 - BETAS[0] ** k)
        m = BETAS[0] * m + (1 - BETAS[0]) * d * g
        v = BETAS[1] * v + (1 - BETAS[1]) * d**2 * g**2
        r = root * r + d * step * (g @ (START - x))
        s = root * s + d * d * g  # without the rate: a warm-up would shrink it
        d = max(d, r / np.abs(s).sum())
        x = x - decay * step * x - step * m / (np.sqrt(v) + d * EPS)
    return x, d


def test_prodigy_follows_its_paper():
    rates = [min(1.0, (step + 1) / 20) for step in range(200)]
    weight, optimizer = descend("prodigy", rates)
    expected, d = prodigy(rates)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-9)
    assert optimizer.param_groups[0]["d"] == pytest.approx(d, rel=1e-9)
    assert d > 1e-2, "it has left its first estimate far behind"


def test_the_rate_that_prodigy_found_is_shown(tmp_path: Path):
    folder = train(tmp_path, "optimizer.name=prodigy", "optimizer.learning_rate=2", "optimizer.warmup_steps=0",
                   "train.steps=12", "log.every=1")  # fmt: skip
    shown = [line["learning_rate"] for line in metrics(folder)]
    assert shown[-1] == 2 * final_state(folder)["optimizer"]["group.d"].item()
    assert shown[0] < shown[-1] < 1


# Defazio et al. 2024, Algorithm 1
def schedule_free(rates: list[float], decay: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    x, z = START.copy(), START.copy()
    v, total, largest = np.zeros(4), 0.0, 0.0
    for k, rate in enumerate(rates, 1):
        y = (1 - BETAS[0]) * z + BETAS[0] * x
        g = CURVATURE * y
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2
        z = z - rate * g / (np.sqrt(v / (1 - BETAS[1] ** k)) + EPS) - rate * decay * y
        largest = max(largest, rate)
        total += largest**2
        c = largest**2 / total
        x = (1 - c) * x + c * z
    return x, (1 - BETAS[0]) * z + BETAS[0] * x


def test_schedule_free_follows_its_paper():
    rates = [0.05 * min(1.0, (step + 1) / 5) for step in range(30)]
    weight, optimizer = descend("adamw-schedule-free", rates)
    x, y = schedule_free(rates)
    trained = weight.detach().clone()
    np.testing.assert_allclose(trained.numpy(), y, rtol=1e-9)
    with averaged_weights(optimizer):
        np.testing.assert_allclose(weight.detach().numpy(), x, rtol=1e-9)
    assert torch.equal(weight, trained), "back bit for bit"
    assert np.abs(x - y).max() > 1e-3


def newton_schulz(matrix: Tensor) -> Tensor:
    """Jordan 2024: five quintic steps towards the nearest orthogonal matrix, in float64."""
    x = matrix.double() / matrix.double().norm()
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def test_muon_orthogonalises_matrices_and_gives_the_rest_to_adamw():
    generator = torch.Generator().manual_seed(0)
    table = nn.Embedding(6, 4)
    assert isinstance(table.weight, nn.Parameter)
    drawn = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 20), (20, 8), (5,))]
    weights = [*drawn, table.weight]
    starts = [weight.detach().clone() for weight in weights]
    optimizer = make_optimizer(weights, config("muon", 0.01), embedding_tables(nn.Sequential(table)))
    momenta, gradients, before = [torch.zeros_like(weight) for weight in weights], [], starts
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        momenta = [0.95 * momentum + gradient for momentum, gradient in zip(momenta, gradients, strict=True)]
        before = [weight.detach().clone() for weight in weights]
        optimizer.step()
    for i in (0, 1):
        matrix = gradients[i] + 0.95 * momenta[i]
        wide = newton_schulz(matrix if i == 0 else matrix.T)
        direction = wide if i == 0 else wide.T
        expected = before[i] * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(20) * direction
        moved = (expected - before[i]).norm()
        assert (weights[i] - expected).norm() < 0.03 * moved  # torch iterates in bfloat16

    others = [nn.Parameter(start.clone()) for start in starts[2:]]
    adamw = torch.optim.AdamW(others, lr=0.01, betas=BETAS, eps=EPS, weight_decay=0.1)
    generator.manual_seed(0)
    [torch.randn(shape, generator=generator) for shape in ((8, 20), (20, 8), (5,))]
    for _ in range(2):
        again = [torch.randn(weight.shape, generator=generator) for weight in weights]
        for other, gradient in zip(others, again[2:], strict=True):
            other.grad = gradient
        adamw.step()
    for other, weight in zip(others, weights[2:], strict=True):
        assert torch.equal(other, weight)


@pytest.mark.parametrize("shapes", [((4, 6),), ((5,),)], ids=["matrices alone", "no matrix"])
def test_muon_of_one_sort_of_parameters(shapes: tuple[tuple[int, ...], ...]):
    weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = make_optimizer(weights, config("muon", 0.01))
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert not torch.equal(weights[0], torch.ones_like(weights[0]))


def schedule_free_session(folder: Path, *, ema: bool) -> Session:
    task, session = make_session(folder, "optimizer.name=adamw-schedule-free", "optimizer.warmup_steps=0")
    if not ema:
        session = Session(task, replace(session.config, ema=None), session.accelerator)
    batches = task.batches(0)
    for step in range(4):
        session.step(step, batches)
    return session


def averages(session: Session) -> dict[str, Tensor]:
    """x of every trained weight, from y and z by the definition of y."""
    beta = session.config.optimizer.betas[0]
    names = {id(parameter): name for name, parameter in session.task.model.named_parameters()}
    found = {}
    for parameter in session.trained:
        z = session.optimizer.state[parameter]["z"]
        found[names[id(parameter)]] = (parameter.detach() - (1 - beta) * z) / beta
    return found


def test_validation_and_results_see_the_average_and_training_goes_on_untouched(tmp_path: Path):
    session = schedule_free_session(tmp_path, ema=False)
    expected, before = averages(session), parts.trained(session.task.model)
    before = {name: tensor.clone() for name, tensor in before.items()}
    with session.averaged():
        inside = {name: tensor.clone() for name, tensor in parts.trained(session.task.model).items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(inside[name], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(inside[name], before[name]) for name in before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts.trained(session.task.model).items())

    session.save(tmp_path / "saved", 4)
    path = checkpoint.checkpoint_path(tmp_path / "saved", 4)
    for part, wanted in (("model", before), ("ema", inside)):
        saved = parts.load_part(path, part)
        assert all(torch.equal(saved[name], tensor) for name, tensor in wanted.items()), part


def test_the_moving_average_is_one_of_averages(tmp_path: Path):
    task, session = make_session(tmp_path, "optimizer.name=adamw-schedule-free", "optimizer.warmup_steps=0")
    ema, batches = session.ema, task.batches(0)
    assert ema is not None
    name = next(iter(ema.averages))
    expected = ema.averages[name].clone()
    for step in range(3):
        session.step(step, batches)
        expected += (averages(session)[name] - expected) * (1 - ema.decay_at(step))
    torch.testing.assert_close(ema.averages[name], expected, rtol=1e-5, atol=1e-6)


def test_evaluating_does_not_change_what_is_trained(tmp_path: Path):
    given = ["optimizer.name=adamw-schedule-free", "train.steps=4"]
    seldom = train(tmp_path / "seldom", *given)
    often = train(tmp_path / "often", *given, "validation.every=1", "checkpoint.every=1")
    assert_same_state(final_state(seldom), final_state(often))


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path):
    weights = [nn.Parameter(torch.ones(4))]
    weights[0].grad = torch.ones(4)
    plain, adaptive = make_optimizer(weights, config("adamw", 0.1)), make_optimizer(weights, config("prodigy", 1.0))
    plain.step()
    adaptive.step()
    for optimizer, other in ((plain, adaptive), (adaptive, plain)):
        with pytest.raises(checkpoint.CheckpointError, match="does not belong to this run"):
            parts.load_optimizer(optimizer, parts.optimizer_tensors(other), tmp_path)


@pytest.mark.parametrize(("name", "package"), [("prodigy", "prodigyopt"), ("adamw-schedule-free", "schedulefree")])
def test_a_missing_library_is_named_with_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    for made in (self_tuned._prodigy, self_tuned._schedule_free):
        made.cache_clear()
    with pytest.raises(ImportError, match=rf"{name} needs {package}: pip install 'tread-diffusion\[optim\]'"):
        make_optimizer([nn.Parameter(torch.ones(2))], config(name, 1.0))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "prodigy", "learning_rate": 1e-4}, "set optimizer.learning_rate to 1"),
        ({"name": "adamw-schedule-free", "schedule": "cosine"}, "set optimizer.schedule to 'constant'"),
        ({"name": "adamw-schedule-free", "betas": (0.0, 0.9)}, r"optimizer.betas\[0\] is 0"),
        ({"end_rate": 1e-5}, "optimizer.schedule is 'constant', which does not fall"),
        ({"schedule": "linear", "end_rate": 1.0}, "above optimizer.learning_rate"),
        ({"schedule": "cosine", "power": 2.0}, "only 'polynomial' reads it"),
        ({"cycles": 2}, "only 'cosine_with_restarts' reads it"),
        ({"schedule": "polynomial", "power": 0.0}, "optimizer.power is 0.0; it must be above 0"),
    ],
)
def test_rates_that_do_not_go_together(given: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        OptimizerConfig(**given)


def test_only_one_optimizer_averages():
    weights = [nn.Parameter(torch.ones(4))]
    assert [keeps_average(make_optimizer(weights, config(name, 1.0))) for name in ("adamw", "adamw-schedule-free")] == [
        False,
        True,
    ]
