"""Densities of times against their analytic CDFs, and draws of the hash against them (fixed seeds)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.objectives.density import HIGHEST_MODE, Density
from tread.routing import noise

DENSITIES: dict[str, tuple[Density, Callable[[Tensor], Tensor]]] = {
    "uniform": (Density(), lambda t: t),
    "beta": (Density(name="beta"), lambda t: 3 * t**2 - 2 * t**3),
    "beta-noisy": (Density(name="beta", beta_alpha=3.5, beta_beta=1.0), lambda t: t**3.5),
    "beta-ends": (Density(name="beta", beta_alpha=0.5, beta_beta=0.5), lambda t: 2 / math.pi * torch.asin(t.sqrt())),
}
"""With the closed form of the CDF."""
MODES = (-1.0, -0.5, 0.0, 1.29, HIGHEST_MODE)
U = torch.linspace(0.001, 0.999, 997, dtype=torch.float64)


def logit_normal_cdf(t: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    return 0.5 * (1 + torch.erf((torch.log(t / (1 - t)) - mean) / (std * math.sqrt(2))))


@pytest.mark.parametrize("name", DENSITIES)
def test_quantiles_and_cdfs_are_those_of_the_textbook(name: str) -> None:
    density, known = DENSITIES[name]
    torch.testing.assert_close(known(density.quantile(U)), U, rtol=0, atol=1e-8)
    rounded = density.quantile(U.float())
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(known(rounded.double()), U, rtol=0, atol=1e-5)
    at = torch.tensor([0.0, 0.01, 0.3, 0.5, 0.77, 0.999, 1.0], dtype=torch.float64)
    assert [density.cdf(t) for t in at.tolist()] == pytest.approx(known(at).tolist(), abs=1e-8)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.6), (-1.0, 1.5)])
def test_logit_normal(mean: float, std: float) -> None:
    density = Density(name="logit-normal", logit_mean=mean, logit_std=std)
    times = density.quantile(U)
    torch.testing.assert_close(logit_normal_cdf(times, mean, std), U, rtol=0, atol=1e-9)
    assert [density.cdf(t) for t in times.tolist()] == pytest.approx(U.tolist(), abs=1e-9)
    assert (density.cdf(0.0), density.cdf(1.0)) == (0, 1)


@pytest.mark.parametrize("scale", MODES)
def test_mode_is_the_paper_s(scale: float) -> None:
    """Esser et al. Eq. 20 falls from 1 to 0; P(f(U) <= t) is 1 - U where f(U) = t."""
    density = Density(name="mode", mode_scale=scale)
    paper = 1 - U - scale * (torch.cos(math.pi / 2 * U).square() - 1 + U)
    torch.testing.assert_close(density.quantile(1 - U), paper)
    assert (density.quantile(U).diff() > 0).all()
    assert [density.cdf(t) for t in paper[::50].tolist()] == pytest.approx((1 - U[::50]).tolist(), abs=1e-9)


@pytest.mark.parametrize(
    "density",
    [
        *(density for density, _ in DENSITIES.values()),
        Density(name="logit-normal"),
        Density(name="mode"),
    ],
    ids=str,
)
def test_hashed_times_follow_the_density(density: Density) -> None:
    """The largest distance of two CDFs (Kolmogorov) of 20,000 draws is below 1.95 / sqrt(n) 999 times in 1,000."""
    count = 20_000
    times = density.quantile(noise.uniform(7, torch.arange(count))).double().sort().values
    below = torch.tensor([density.cdf(t) for t in times[::100].tolist()])
    assert (below - torch.arange(count)[::100] / count).abs().max() < 1.95 / math.sqrt(count)
    assert times[0] >= 0
    assert times[-1] <= 1


def test_times_are_finite_at_the_last_quantiles() -> None:
    u = torch.tensor([2.0**-24, 1 - 2.0**-24])
    for density, _ in DENSITIES.values():
        times = density.quantile(u)
        assert (times >= 0).all()
        assert (times <= 1).all()
    # the first and last cells of a narrow density's table hold nothing in float32
    first, middle, last = Density(name="beta", beta_alpha=30, beta_beta=30).quantile(torch.tensor([0.0, 0.5, 1.0]))
    assert 0 <= first < 0.25
    assert middle == pytest.approx(0.5, abs=1e-4)
    assert 0.75 < last <= 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "uniform", "mode_scale": 1.0}, "mode_scale is 1.0, but time_density is 'uniform'"),
        ({"name": "mode", "mode_scale": 2.0}, "mode_scale is 2.0; allowed is -1 <= value <= 1.7519"),
        ({"name": "mode", "mode_scale": -1.5}, "mode_scale is -1.5; allowed is -1 <= value <= 1.7519"),
        ({"name": "beta", "beta_beta": 0.1}, "beta_beta is 0.1; it must be at least 0.5"),
        ({"name": "logit-normal", "logit_std": 0.0}, "logit_std is 0.0; it must be above 0"),
        ({"name": "logit-normal", "logit_mean": math.nan}, "logit_mean is nan; it must be a number"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Density(**given)
