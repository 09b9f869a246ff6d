"""`build`, and what every objective must do to serve trainer and sampler."""

import pytest
import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.objectives import EDM, OBJECTIVES, Flow, build
from tread.sampling.solvers import SOLVERS


def test_build_makes_the_named_objective() -> None:
    assert build("edm", {"p_mean": -0.4}) == EDM(p_mean=-0.4)
    assert build("flow", {"time": "logit-normal", "shift": 2}) == Flow(time="logit-normal", shift=2)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ddpm", {}, "objective.name is 'ddpm'. Choose one of: edm, flow."),
        (
            "flow",
            {"p_mean": 0.0},
            "objective 'flow': unknown key 'p_mean'. Did you mean 'logit_mean'? Known keys: time, logit_mean, "
            "logit_std, shift.",
        ),
        ("edm", {"rho": None}, "objective.rho is None; it must be a finite number above 0."),
    ],
)
def test_build_refuses_what_it_does_not_know(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(name, settings)
    assert str(error.value) == message


@pytest.mark.parametrize("name", OBJECTIVES)
def test_contract(name: str) -> None:
    objective = build(name, {})
    assert objective.default_solver in SOLVERS
    levels = objective.levels(7)
    assert len(levels) == 8
    assert levels[-1] == 0.0
    assert sorted(levels, reverse=True) == levels
    level = objective.level(torch.tensor([2.0**-24, 0.5, 1 - 2.0**-24]))  # the extremes of noise.uniform
    assert level.isfinite().all()
    assert (level.diff() > 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_sample_is_worth_the_same_alone_and_in_a_batch(name: str) -> None:
    objective = build(name, {})
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 4, 2, 3, 5, dtype=torch.float64, generator=generator)
    u, labels = torch.rand(4, dtype=torch.float64, generator=generator), torch.arange(4)

    def net(x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        return torch.tanh(x) * (time / 1000 + labels).view(-1, 1, 1, 1)

    together = objective.loss(net, x, labels, noise=noise, u=u)
    assert together.shape == (4,)
    for i in range(4):
        one = slice(i, i + 1)
        alone = objective.loss(net, x[one], labels[one], noise=noise[one], u=u[one])
        torch.testing.assert_close(alone, together[one], rtol=1e-12, atol=0)
