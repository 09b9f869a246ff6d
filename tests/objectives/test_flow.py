"""Rectified flow against closed forms. Expectations are Gauss-Hermite sums, exact for the quadratics here."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.objectives.flow import Flow

GRID = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000


@pytest.mark.parametrize("t", [0.03, 0.4, 0.5, 0.97])
def test_loss_of_the_optimal_velocity_is_its_posterior_variance(t: float) -> None:
    cov = torch.tensor([[0.5, 0.3], [0.3, 0.4]], dtype=torch.float64)
    mean = torch.tensor([1.0, -2.0], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    spread = (1 - t) ** 2 * cov + t**2 * eye  # the covariance of x_t
    gain = (t * eye - (1 - t) * cov) @ torch.linalg.inv(spread)
    points, weights = np.polynomial.hermite_e.hermegauss(3)
    nodes = torch.cartesian_prod(*[torch.from_numpy(points)] * 4)
    products = torch.cartesian_prod(*[torch.from_numpy(weights / weights.sum())] * 4).prod(-1)
    x = (mean + nodes[:, :2] @ torch.linalg.cholesky(cov).T)[..., None, None]

    def net(state: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        torch.testing.assert_close(time, torch.full_like(time, 1000 * t))
        return (-mean + (state.flatten(1) - (1 - t) * mean) @ gain.T)[..., None, None]

    u = torch.full((len(x),), t, dtype=torch.float64)
    loss = Flow().loss(net, x, torch.zeros(len(x)), noise=nodes[:, 2:, None, None], u=u)
    # Var(noise - x | x_t) = cov + 1 - gain spread gain^T, which simplifies to this
    variance = (cov @ torch.linalg.inv(spread)).trace() / 2
    torch.testing.assert_close((products * loss).sum(), variance, rtol=1e-10, atol=0)


def test_loss_is_zero_for_the_true_velocity_and_is_taken_per_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 3, 2, 4, 6, dtype=torch.float64, generator=generator)
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    offset = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).view(3, 1, 1, 1)

    def net(state: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        t = time.view(3, 1, 1, 1) / 1000
        torch.testing.assert_close(state, x + t * (noise - x))  # t = 1 is noise
        return noise - x + offset

    torch.testing.assert_close(
        Flow().loss(net, x, torch.zeros(3), noise=noise, u=u), offset.flatten() ** 2, atol=1e-14, rtol=0
    )


def test_field_is_the_network_at_a_thousand_times_the_level() -> None:
    x = torch.ones(2, 1, 2, 2, dtype=torch.float64)
    slope = Flow().field(lambda x, time, labels: x * time.view(-1, 1, 1, 1) + labels.view(-1, 1, 1, 1))
    assert torch.equal(slope(x, 0.25, torch.tensor([0, 5]))[:, 0, 0, 0], torch.tensor([250.0, 255.0]).double())


def test_uniform_time_is_u_itself() -> None:
    assert torch.equal(Flow().level(GRID), GRID)


def test_logit_normal_time_has_the_asked_moments() -> None:
    t = Flow(time="logit-normal", logit_mean=-0.5, logit_std=1.5).level(GRID)
    assert t.logit().mean().item() == pytest.approx(-0.5, abs=1e-9)
    assert t.logit().std().item() == pytest.approx(1.5, rel=1e-3)
    assert t.median().item() == pytest.approx(1 / (1 + math.exp(0.5)), rel=1e-4)


def test_shift_multiplies_the_odds_of_training_times_and_sampling_levels() -> None:
    for flow, plain in [(Flow(shift=3.0), Flow()), (Flow(shift=3.0, time="logit-normal"), Flow(time="logit-normal"))]:
        torch.testing.assert_close(flow.level(GRID).logit(), plain.level(GRID).logit() + math.log(3.0))
    shifted, plain_levels = Flow(shift=3.0).levels(8), Flow().levels(8)
    assert (shifted[0], shifted[-1]) == (1.0, 0.0)
    for high, low in zip(shifted[1:-1], plain_levels[1:-1], strict=True):
        assert high / (1 - high) == pytest.approx(3 * low / (1 - low), rel=1e-12)


def test_levels_fall_evenly_from_noise_to_data() -> None:
    assert Flow().levels(4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert Flow(shift=5.0).levels(1) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="steps is -2; sampling needs at least 1 step"):
        Flow().levels(-2)


def test_maths_is_float32_at_least_whatever_the_network_returns() -> None:
    for given, expected in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        x = torch.linspace(-1, 1, 16).reshape(2, 1, 2, 4).to(given)
        for noise in (x.flip(0), x.flip(0).double()):
            loss = Flow(time="logit-normal").loss(
                lambda x, time, labels: x.bfloat16(), x, torch.zeros(2), noise=noise, u=torch.tensor([0.2, 0.7])
            )
            assert loss.dtype == expected
        slope = Flow().field(lambda x, time, labels: x.bfloat16())(x, 0.5, torch.zeros(2))
        assert slope.dtype == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": "cosine"}, "objective.time is 'cosine'. Choose one of: uniform, logit-normal."),
        ({"shift": 0}, "objective.shift is 0; it must be a finite number above 0."),
        (
            {"time": "logit-normal", "logit_std": -1.0},
            "objective.logit_std is -1.0; it must be a finite number above 0.",
        ),
        (
            {"logit_std": 0.5},
            "objective.logit_mean is 0.0 and objective.logit_std is 0.5, but objective.time is 'uniform', "
            "which uses neither; set objective.time to 'logit-normal'.",
        ),
        (
            {"logit_mean": 0.5},
            "objective.logit_mean is 0.5 and objective.logit_std is 1.0, but objective.time is 'uniform', "
            "which uses neither; set objective.time to 'logit-normal'.",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Flow(**settings)
    assert str(error.value) == message
