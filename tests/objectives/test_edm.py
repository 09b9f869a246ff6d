"""EDM against closed forms. Expectations over Gaussians are Gauss-Hermite sums, exact for the quadratics here."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.objectives.edm import EDM

SIGMAS = [0.01, 0.2, 1.0, 7.0, 60.0]


def normal_nodes(dimensions: int) -> tuple[Tensor, Tensor]:
    """Nodes (M, dimensions) and weights (M,) that integrate quadratics under a standard normal exactly."""
    points, weights = np.polynomial.hermite_e.hermegauss(3)
    nodes = torch.cartesian_prod(*[torch.from_numpy(points)] * dimensions)
    products = torch.cartesian_prod(*[torch.from_numpy(weights / weights.sum())] * dimensions).prod(-1)
    return nodes, products


def u_of(edm: EDM, sigma: float, count: int) -> Tensor:
    """The u that a level of sigma comes from."""
    z = torch.tensor((math.log(sigma) - edm.p_mean) / edm.p_std, dtype=torch.float64)
    return torch.special.ndtr(z).expand(count)


def wavy_net(x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
    """Any network: not linear, and sensitive to all it is given."""
    return torch.sin(3 * x) + (time / 500 + labels)[:, None, None, None] * x.roll(1, -1)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_network_inputs_and_targets_have_unit_variance(sigma: float) -> None:
    edm = EDM(sigma_data=0.7)
    nodes, weights = normal_nodes(2)
    x, noise = (nodes.T * torch.tensor([[0.7], [1.0]], dtype=torch.float64)).reshape(2, -1, 1, 1, 1)
    seen: list[Tensor] = []

    def net(x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x)  # so that the loss is the square of the target

    loss = edm.loss(net, x, torch.zeros(len(x)), noise=noise, u=u_of(edm, sigma, len(x)))
    assert (weights * seen[0].flatten() ** 2).sum().item() == pytest.approx(1, abs=1e-12)
    assert (weights * loss).sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_loss_of_the_optimal_denoiser_is_the_weighted_posterior_variance(sigma: float) -> None:
    edm = EDM()
    cov = torch.tensor([[0.5, 0.3], [0.3, 0.4]], dtype=torch.float64)
    mean = torch.tensor([1.0, -2.0], dtype=torch.float64)
    gain = cov @ torch.linalg.inv(cov + sigma**2 * torch.eye(2, dtype=torch.float64))
    total = sigma**2 + edm.sigma_data**2
    nodes, weights = normal_nodes(4)
    x = (mean + nodes[:, :2] @ torch.linalg.cholesky(cov).T)[..., None, None]

    def net(scaled: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        torch.testing.assert_close(time, torch.full_like(time, 1000 * math.log(sigma) / 4))
        state = scaled.flatten(1) * math.sqrt(total)
        best = mean + (state - mean) @ gain.T
        raw = (best - edm.sigma_data**2 / total * state) * math.sqrt(total) / (sigma * edm.sigma_data)
        return raw[..., None, None]

    loss = edm.loss(net, x, torch.zeros(len(x)), noise=nodes[:, 2:, None, None], u=u_of(edm, sigma, len(x)))
    variance = (cov - gain @ cov).trace() / 2
    weight = total / (sigma * edm.sigma_data) ** 2
    torch.testing.assert_close((weights * loss).sum(), weight * variance, rtol=1e-9, atol=0)


def test_loss_is_the_weighted_error_of_the_denoiser() -> None:
    edm = EDM(p_mean=-0.4, p_std=1.7, sigma_data=0.8)
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 5, 3, 4, 6, dtype=torch.float64, generator=generator)
    u = torch.tensor([0.01, 0.3, 0.5, 0.9, 0.999], dtype=torch.float64)
    labels = torch.arange(5)
    normal = NormalDist(-0.4, 1.7)
    sigma = torch.tensor([math.exp(normal.inv_cdf(p)) for p in u.tolist()], dtype=torch.float64)
    denoised = edm.denoise(wavy_net, x + sigma.view(-1, 1, 1, 1) * noise, sigma, labels)
    weight = (sigma**2 + 0.8**2) / (sigma * 0.8) ** 2
    expected = weight * (denoised - x).square().mean((1, 2, 3))
    torch.testing.assert_close(edm.loss(wavy_net, x, labels, noise=noise, u=u), expected, rtol=1e-9, atol=0)


def test_field_is_the_slope_towards_the_denoised_state() -> None:
    edm = EDM()
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(2, 3, 2, 2)
    labels = torch.tensor([0, 1])
    denoised = edm.denoise(wavy_net, x, torch.full((2,), 0.3, dtype=torch.float64), labels)
    torch.testing.assert_close(edm.field(wavy_net)(x, 0.3, labels), (x - denoised) / 0.3)


def test_levels_in_training_are_log_normal() -> None:
    edm = EDM()
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    level = edm.level(u)
    assert level.median().item() == pytest.approx(math.exp(-1.2), rel=1e-4)
    assert level.log().mean().item() == pytest.approx(-1.2, abs=1e-9)
    assert level.log().std().item() == pytest.approx(1.2, rel=1e-3)
    assert edm.level(torch.tensor([0.8413447])).item() == pytest.approx(1.0, rel=1e-5)  # one p_std above p_mean


def test_levels_in_sampling_follow_equation_5() -> None:
    edm = EDM()
    levels = edm.levels(18)
    assert len(levels) == 19
    assert (levels[0], levels[-1]) == (80.0, 0.0)
    assert levels[-2] == pytest.approx(0.002, rel=1e-12)
    roots = np.linspace(80 ** (1 / 7), 0.002 ** (1 / 7), 18)
    np.testing.assert_allclose(levels[:-1], roots**7, rtol=1e-12)
    assert edm.levels(1) == [80.0, 0.0]
    assert EDM(rho=1, sigma_min=1, sigma_max=3).levels(3) == [3.0, 2.0, 1.0, 0.0]


def test_maths_is_float32_at_least_whatever_the_network_returns() -> None:
    edm = EDM()

    def half_net(x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        assert time.dtype == x.dtype
        return wavy_net(x, time, labels).bfloat16()

    labels, u = torch.arange(2), torch.tensor([0.2, 0.7])
    for given, expected in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        x = torch.linspace(-1, 1, 16).reshape(2, 1, 2, 4).to(given)
        for noise in (x.flip(0), x.flip(0).double()):
            assert edm.loss(half_net, x, labels, noise=noise, u=u).dtype == expected
        assert edm.denoise(half_net, x, torch.ones(2), labels).dtype == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p_std": 0.0}, "objective.p_std is 0.0; it must be a finite number above 0."),
        ({"p_mean": math.nan}, "objective.p_mean is nan; it must be a finite number."),
        ({"sigma_data": "0.5"}, "objective.sigma_data is '0.5'; it must be a finite number above 0."),
        ({"rho": True}, "objective.rho is True; it must be a finite number above 0."),
        ({"sigma_max": math.inf}, "objective.sigma_max is inf; it must be a finite number above 0."),
        (
            {"sigma_min": 80.0},
            "objective.sigma_min is 80.0 and objective.sigma_max is 80.0; sigma_min must be the smaller one.",
        ),
        (
            {"sigma_min": 90},
            "objective.sigma_min is 90 and objective.sigma_max is 80.0; sigma_min must be the smaller one.",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EDM(**settings)
    assert str(error.value) == message


def test_sampling_needs_a_step() -> None:
    with pytest.raises(ConfigError, match="steps is 0; sampling needs at least 1 step"):
        EDM().levels(0)
