"""The solvers on Gaussian data, where the exact end of every path is known."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.tiny.gaussian import three_classes
from tread.errors import ConfigError
from tread.objectives import EDM, Flow
from tread.objectives.objective import Field
from tread.sampling.solvers import Churn, Solver, churn_of, edm_heun, euler, heun

DATA = three_classes()
LABELS = torch.tensor([0, 1, 2, 0, 1])


def some_noise(count: int) -> Tensor:
    return torch.randn(count, 3, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def edm_error(solver: Solver, steps: int) -> float:
    edm = EDM(sigma_min=1e-5)  # the last step's own error, of the order of sigma_min squared, out of the way
    x = edm.sigma_max * some_noise(5)
    exact = DATA.edm_solution(x, edm.sigma_max, LABELS)
    return (solver(DATA.edm_field, x, LABELS, edm.levels(steps)) - exact).abs().max().item()


def flow_error(solver: Solver, steps: int) -> float:
    noise = some_noise(5)
    exact = DATA.flow_solution(noise, LABELS)
    return (solver(DATA.flow_field, noise, LABELS, Flow().levels(steps)) - exact).abs().max().item()


@pytest.mark.parametrize("error", [edm_error, flow_error])
@pytest.mark.parametrize(("solver", "order"), [(euler, 1), (heun, 2)])
def test_order_of_convergence(error: Callable[[Solver, int], float], solver: Solver, order: int) -> None:
    errors = [error(solver, steps) for steps in (100, 200, 400)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.12)
    assert errors[-1] < (0.05 if order == 1 else 1e-3)


@pytest.mark.parametrize(("solver", "evaluations"), [(euler, 6), (heun, 11)])
def test_levels_asked_for(solver: Solver, evaluations: int) -> None:
    asked: list[float] = []

    def field(x: Tensor, level: float, labels: Tensor) -> Tensor:
        asked.append(level)
        return x

    levels = Flow().levels(6)
    solver(field, some_noise(2), LABELS[:2], levels)
    assert len(asked) == evaluations
    assert min(asked) == levels[-2]  # never level 0


def affine_covariance(field: Field, levels: list[float], churn: Churn) -> Tensor:
    """The exact covariance of what edm_heun returns under an affine field: it is an affine map of its starting
    noise and of each step's fresh noise, so probing it with unit vectors gives its matrix."""
    steps, d = len(levels) - 1, 3
    sources = torch.eye((1 + steps) * d, dtype=torch.float64)  # one row a probe, one column a source
    sources = torch.cat([torch.zeros(1, len(sources)), sources]).unflatten(1, (1 + steps, d))  # row 0: the offset
    start = levels[0] * sources[:, 0, :, None, None]
    labels = torch.zeros(len(start), dtype=torch.long)
    out = edm_heun(
        field, start, labels, levels, churn=churn, draw=lambda step: sources[:, 1 + step, :, None, None]
    ).flatten(1)
    matrix = out[1:] - out[:1]  # ((1 + steps) * d, d)
    return matrix.T @ matrix


def covariance_error(churn: Churn, steps: int) -> float:
    return (affine_covariance(DATA.edm_field, EDM().levels(steps), churn) - DATA.cov).abs().max().item()


def test_churn_keeps_the_marginal() -> None:
    churn = Churn(s_churn=40, s_tmin=0.01, s_tmax=50)
    coarse, fine = covariance_error(churn, 256), covariance_error(churn, 512)
    assert fine < 1.5e-3
    assert coarse / fine > 3.5  # what is left is Heun's own error, of second order
    assert covariance_error(replace(churn, s_noise=1.01), 512) > 0.02  # one percent of noise too much shows


def test_churn_forgets_the_starting_noise() -> None:
    """So the marginal above is kept by fresh noise, not by its absence."""
    edm = EDM()
    start = edm.sigma_max * torch.stack([some_noise(1)[0], -some_noise(1)[0]])
    zeros = torch.zeros_like(start)

    def apart(churn: Churn) -> float:
        ends = edm_heun(DATA.edm_field, start, LABELS[[0, 0]], edm.levels(128), churn=churn, draw=lambda step: zeros)
        return (ends[0] - ends[1]).norm().item()

    assert apart(Churn(s_churn=100)) < 0.01 * apart(Churn(s_churn=0))


def test_no_churn_is_heun() -> None:
    edm = EDM()
    x, levels = edm.sigma_max * some_noise(5), edm.levels(20)
    churn = Churn(s_churn=50, s_tmin=100)

    def draw(step: int) -> Tensor:
        raise AssertionError("no level is in the churn's range")

    churned = edm_heun(DATA.edm_field, x, LABELS, levels, churn=churn, draw=draw)
    assert torch.equal(churned, heun(DATA.edm_field, x, LABELS, levels))


def test_churn_raises_levels_as_algorithm_2_says() -> None:
    churn = Churn(s_churn=4, s_tmin=0.5, s_tmax=8)
    assert churn.raised(2.0, 40) == pytest.approx(2.2)
    assert churn.raised(2.0, 5) == pytest.approx(2 * math.sqrt(2))  # 4 / 5 is above the cap
    assert [churn.raised(level, 40) > level for level in (0.4, 0.5, 8.0, 8.1)] == [False, True, True, False]
    assert [Churn(s_churn=4).raised(level, 40) > level for level in (1e-9, 1e9)] == [True, True], "without bounds, all"


def test_heun_with_churn_is_algorithm_2() -> None:
    """Karras et al. 2022, line by line."""
    edm, noises = EDM(), some_noise(40).chunk(8)
    x = edm.sigma_max * some_noise(5)
    sigmas, steps = edm.levels(8), 8

    def slope(x: Tensor, sigma: float) -> Tensor:
        return (x - torch.tanh(x) / (1 + sigma)) / sigma

    after = x
    for i in range(steps):
        gamma = min(3 / steps, math.sqrt(2) - 1) if 0.05 <= sigmas[i] <= 50 else 0.0
        raised = sigmas[i] + gamma * sigmas[i]
        start = after + math.sqrt(raised**2 - sigmas[i] ** 2) * 1.003 * noises[i]
        d = slope(start, raised)
        after = start + (sigmas[i + 1] - raised) * d
        if sigmas[i + 1] != 0:
            after = start + (sigmas[i + 1] - raised) * (d + slope(after, sigmas[i + 1])) / 2
    churn = Churn(s_churn=3, s_tmin=0.05, s_tmax=50, s_noise=1.003)
    ours = edm_heun(
        lambda x, level, labels: slope(x, level), x, LABELS, sigmas, churn=churn, draw=lambda step: noises[step]
    )
    torch.testing.assert_close(ours, after)


def test_churn_of_settings() -> None:
    assert churn_of(0, (0.5, 8), 1.01) is None
    assert churn_of(4, (0.5, 8), 1.01) == Churn(s_churn=4, s_tmin=0.5, s_tmax=8, s_noise=1.01)
    assert churn_of(4, None, 1.0) == Churn(s_churn=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"s_churn": -1}, "churn.s_churn is -1; it must be a finite number of at least 0."),
        ({"s_churn": 1, "s_tmax": "many"}, "churn.s_tmax is 'many'; it must be a finite number."),
        (
            {"s_churn": 1, "s_tmin": 2, "s_tmax": 1},
            "churn.s_tmin is 2 and churn.s_tmax is 1; s_tmin must be the smaller one.",
        ),
        (
            {"s_churn": 1, "s_tmin": 2, "s_tmax": 2},
            "churn.s_tmin is 2 and churn.s_tmax is 2; s_tmin must be the smaller one.",
        ),
    ],
)
def test_impossible_churn_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Churn(**settings)
    assert str(error.value) == message
