"""What is predicted and at which times: against the stock samplers and torch's distributions."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from tests.finetune.trained import changed
from tests.tiny.pipelines import PipelineFolder
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.model.source import Source
from tread.finetune.target import Adjustments, EpsilonTarget, FlowTarget, Target, VelocityTarget
from tread.objectives.density import Density

diffusers = pytest.importorskip("diffusers")

TIMES = torch.tensor([0, 1, 2, 500, 998, 999])


def drawn(seed: int, channels: int = 2) -> Tensor:
    return torch.randn(len(TIMES), channels, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def epsilon() -> EpsilonTarget:
    config = dict(diffusers.DPMSolverMultistepScheduler().config) | {"_class_name": "DPMSolverMultistepScheduler"}
    return EpsilonTarget.from_scheduler(config, shift=None, distance="l2")


@pytest.mark.parametrize("target", [FlowTarget(), FlowTarget(shift=3.0), FlowTarget(dynamic=(0.5, 1.15, 256, 4096))])
def test_quantile_is_the_inverse_of_times(target: FlowTarget) -> None:
    u = torch.tensor([0.01, 0.3, 0.5, 0.875, 0.99], dtype=torch.float64)
    times = target.times(u, 1024)
    assert_close([target.cdf(time, 1024) for time in times.tolist()], u.tolist(), rtol=0, atol=1e-9)
    assert (target.cdf(0.0, 1024), target.cdf(1.0, 1024)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("scheduler", "tokens"),
    [
        (lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), 1024),
        (lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 256),
        (lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9), 3000),
        (lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"), 3000),
        (lambda: diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0), 1024),
    ],
)
def test_times_are_shifted_as_the_stock_sampler_shifts(scheduler, tokens: int) -> None:
    """The median of the unshifted times is 1/2, so the median of the shifted ones is the sampler's level at 1/2."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    stock = scheduler()
    target = FlowTarget.from_scheduler(stock.config, shift=None, distance="l2")
    dynamic = {}
    if stock.config.get("use_dynamic_shifting"):
        config = stock.config
        sizes = (config["base_image_seq_len"], config["max_image_seq_len"], config["base_shift"], config["max_shift"])
        dynamic = {"mu": calculate_shift(tokens, *sizes)}
    stock.set_timesteps(sigmas=np.array([0.5]), **dynamic)
    assert_close(target.times(torch.tensor([0.5]), tokens), stock.sigmas[:1], rtol=1e-5, atol=0)
    assert FlowTarget.from_scheduler(stock.config, shift=2.0, distance="l2") == FlowTarget(shift=2.0)


@pytest.mark.parametrize("name", ["flux2", "hidream", "qwen_layered"])
def test_families_with_a_mu_of_their_own_heed_the_type_of_shift(
    name: str, pipeline_folder: PipelineFolder, tmp_path: Path
) -> None:
    def shift(number: int, **values: Any) -> float:
        config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True, "shift": 7.0} | values
        place = changed(pipeline_folder(name), tmp_path / str(number), "scheduler/scheduler_config.json", **config)
        target = open_family(name, Source(str(place))).target(shift=None, distance="l2")
        assert isinstance(target, FlowTarget)
        return target.shift_of(1024)

    assert shift(0) == pytest.approx(math.exp(shift(1, time_shift_type="linear")))
    assert shift(2, use_dynamic_shifting=False) == 7.0


def test_a_scheduler_that_names_no_shift_has_diffusers_own() -> None:
    for given in ({"use_dynamic_shifting": True}, {"use_dynamic_shifting": False}):
        stock = diffusers.FlowMatchEulerDiscreteScheduler(**given).config
        expected = FlowTarget.from_scheduler(stock, shift=None, distance="l2")
        assert FlowTarget.from_scheduler(given, shift=None, distance="l2") == expected


def velocity() -> VelocityTarget:
    config = {"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}
    return VelocityTarget.from_scheduler(config | {"rescale_betas_zero_snr": True}, shift=None, distance="l2")


@pytest.mark.parametrize("name", ["uniform", "mode", "beta"])
def test_another_density_is_shifted_and_inverted_too(name: Any) -> None:
    density = Density(name=name)
    target = FlowTarget(shift=3.0).adjusted(Adjustments(density=density))
    u = torch.tensor([0.02, 0.3, 0.5, 0.9], dtype=torch.float64)
    t = density.quantile(u)
    assert_close(target.times(u, 64), 3 * t / (1 + 2 * t))
    assert_close([target.cdf(time, 64) for time in target.times(u, 64).tolist()], u.tolist(), rtol=0, atol=1e-8)


def test_discrete_times_follow_a_density_too() -> None:
    target = epsilon().adjusted(Adjustments(density=Density(name="mode")))
    u = (torch.arange(4000) + 0.5) / 4000
    assert torch.equal(target.times(u, 64), (Density(name="mode").quantile(u) * 1000).long())


def test_the_shift_grows_with_the_root_of_the_tokens() -> None:
    """Esser et al. Eq. 23: at four times the tokens, a state is as noisy as at twice the shift."""
    target = FlowTarget(shift=3.0).adjusted(Adjustments(tokens=1024))
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert_close(target.times(u, 1024), FlowTarget(shift=3.0).times(u, 1024))
    assert_close(target.times(u, 4096), FlowTarget(shift=6.0).times(u, 1024))
    assert_close(target.times(u, 256), FlowTarget(shift=1.5).times(u, 1024))


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [("sigma_sqrt", [100.0, 4.0, 1.2345679]), ("cosmap", [0.7763648, 4 / math.pi, 0.7763648])],
)
def test_weights_of_flow_times(weighting: Any, weights: list[float]) -> None:
    """1 / t^2, and 2 / (pi (1 - 2t + 2t^2)), at 0.1, 0.5 and 0.9."""
    x, noise = torch.zeros(3, 1, 1, 2), torch.ones(3, 1, 1, 2)
    time, prediction = torch.tensor([0.1, 0.5, 0.9]), torch.full((3, 1, 1, 2), 3.0)
    target = FlowTarget().adjusted(Adjustments(weighting=weighting))
    expected = 4 * torch.tensor(weights)
    assert_close(target.error(prediction, x, noise, time)[:, 0, 0, 1], expected)
    assert_close(target.unweighted().error(prediction, x, noise, time)[:, 0, 0, 1], torch.full((3,), 4.0))
    assert target.weight(torch.zeros(1)).isfinite().all()


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("make", [epsilon, velocity])
def test_min_snr(make: Callable[[], Any], gamma: float) -> None:
    """Hang et al.: min(SNR, gamma) weighs the error of x, which is that of the noise times SNR, of v times SNR + 1."""
    target = make()
    kept = target.kept if isinstance(target, VelocityTarget) else (1 - target.betas).cumprod(0)
    x, noise = drawn(1).float(), drawn(2).float()
    weighted = target.adjusted(Adjustments(snr_gamma=gamma))
    found = weighted.error(drawn(3).float(), x, noise, TIMES) / target.error(drawn(3).float(), x, noise, TIMES)
    for i, t in enumerate(TIMES.tolist()):
        snr = float(kept[t] / (1 - kept[t]))
        by_hand = min(snr, gamma) / (snr + 1) if isinstance(target, VelocityTarget) else min(1, gamma / snr)
        assert_close(found[i], torch.full_like(found[i], by_hand), rtol=1e-4, atol=1e-7)
    assert torch.equal(weighted.unweighted().error(x, x, noise, TIMES), target.error(x, x, noise, TIMES))


def test_min_snr_leaves_the_bound_of_the_variance() -> None:
    x, noise = drawn(1).float(), drawn(2).float()
    variance = drawn(4).float()
    weighted = epsilon().adjusted(Adjustments(snr_gamma=0.5))
    exact = torch.cat([noise, variance], dim=1)  # without an error of the noise the bound is left
    assert_close(weighted.error(exact, x, noise, TIMES), epsilon().error(exact, x, noise, TIMES))


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        (FlowTarget(), {"snr_gamma": 5.0}, "snr_gamma is 5.0, but the model is a flow model"),
        (FlowTarget(dynamic=(0.5, 1.15, 256, 4096)), {"tokens": 64}, "flow_shift_tokens is 64, but .* already shifts"),
        (epsilon(), {"weighting": "cosmap"}, "loss_weighting is 'cosmap', but the model is no flow model"),
        (velocity(), {"tokens": 64}, "flow_shift_tokens is 64, but the model is no flow model"),
    ],
)
def test_settings_of_other_models_are_refused(target: Target, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        target.adjusted(Adjustments(**given))


def test_huber_grows_slower_far_away() -> None:
    x, noise = torch.zeros(1, 1, 1, 2), torch.tensor([[[[0.5, 4.0]]]])
    error = FlowTarget(distance="huber").error(torch.zeros_like(x), x, noise, torch.tensor([0.5]))
    assert_close(error.flatten(), torch.tensor([0.125, 3.5]))


def test_epsilon_times_are_drawn_evenly() -> None:
    u = (torch.arange(4000) + 0.5) / 4000
    assert torch.equal(epsilon().times(u, 64).bincount(), torch.full((1000,), 4))
    assert epsilon().times(torch.tensor([1.0]), 64).item() == 999  # what float32 may round to


def test_epsilon_states_are_the_stock_scheduler_s() -> None:
    stock = diffusers.DDPMScheduler()
    x, noise = drawn(1).float(), drawn(2).float()
    assert_close(epsilon().mix(x, noise, TIMES), stock.add_noise(x, noise, TIMES), rtol=0, atol=1e-5)


def test_epsilon_error_is_the_hybrid_loss() -> None:
    """Posterior and model as distributions over the state before, in float64, from the textbook formulas."""
    x, noise, off, variance = drawn(1), drawn(2), 0.1 * drawn(3), drawn(4).tanh()
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    kept = (1 - betas).cumprod(0)
    expected = []
    for i, t in enumerate(TIMES.tolist()):
        before = kept[t - 1] if t else torch.tensor(1.0, dtype=torch.float64)
        state = kept[t].sqrt() * x[i] + (1 - kept[t]).sqrt() * noise[i]
        guess = (state - (1 - kept[t]).sqrt() * (noise[i] + off[i])) / kept[t].sqrt()

        def mean(data: Tensor) -> Tensor:
            a, b = betas[t] * before.sqrt(), (1 - betas[t]).sqrt() * (1 - before)  # noqa: B023
            return (a * data + b * state) / (1 - kept[t])  # noqa: B023

        least = max(t, 1)
        low = betas[least] * (1 - kept[least - 1]) / (1 - kept[least])
        share = (variance[i] + 1) / 2
        model = Normal(mean(guess), torch.exp(0.5 * (share * betas[t].log() + (1 - share) * low.log())))
        nats = kl_divergence(Normal(mean(x[i]), low.sqrt()), model) if t else -model.log_prob(x[i])
        expected.append(off[i].square() + nats / math.log(2))
    prediction = torch.cat([noise + off, variance], dim=1).float()
    found = epsilon().error(prediction, x.float(), noise.float(), TIMES)
    assert_close(found.double(), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_the_bound_moves_the_variance_alone() -> None:
    x, noise = drawn(1).float(), drawn(2).float()
    both = torch.cat([drawn(3), drawn(4)], dim=1).float().requires_grad_()
    alone = both.detach()[:, :2].clone().requires_grad_()
    epsilon().error(both, x, noise, TIMES).sum().backward()
    epsilon().error(alone, x, noise, TIMES).sum().backward()
    assert both.grad is not None
    assert alone.grad is not None
    assert torch.equal(both.grad[:, :2], alone.grad)
    assert (both.grad[:, 2:].abs() > 0).all()
