"""The moving average against float64 arithmetic, its warm-up, and what a short run gets out of it."""

import copy

import pytest
import torch
from torch import nn

from tread.training.optimizers.ema import EMA


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def wander(model: nn.Module, step: int) -> None:
    """Change every parameter and buffer."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor += torch.randn(tensor.shape, generator=generator)
            else:
                tensor += 1


def test_against_float64() -> None:
    model = small_model()
    ema = EMA(model, decay=0.8, warmup=10)
    expected = {name: tensor.double().clone() for name, tensor in model.named_parameters()}
    for step in range(60):
        wander(model, step)
        ema.update(step)
        decay = min(0.8, (1 + step) / (10 + step))
        for name, tensor in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * tensor.detach().double()
    for name, tensor in ema.averages.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=1e-5)


def test_warm_up_values() -> None:
    ema = EMA(small_model(), decay=0.9999, warmup=10)
    assert [ema.decay_at(step) for step in (0, 1, 8, 90, 10**6)] == [1 / 10, 2 / 11, 9 / 18, 91 / 100, 0.9999]
    assert EMA(small_model(), decay=0.9, warmup=1).decay_at(0) == 0.9


def test_only_what_trains_is_averaged() -> None:
    model = small_model()
    model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    assert list(EMA(model, decay=0.9, warmup=1).averages) == ["1.weight", "1.bias"]


def test_the_average_is_apart_from_the_model() -> None:
    model = small_model()
    ema = EMA(model, decay=0.9999, warmup=10)
    before = copy.deepcopy(ema.averages)
    wander(model, 0)
    for name, tensor in ema.averages.items():
        assert torch.equal(tensor, before[name])
        assert not tensor.requires_grad


def test_applied_swaps_and_swaps_back() -> None:
    """After an error too; the parameters stay the same objects, which optimizers hold."""
    model = small_model()
    ema = EMA(model, decay=0.9999, warmup=10)
    averages = copy.deepcopy(ema.averages)
    wander(model, 0)
    parameters = dict(model.named_parameters())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name]
            assert torch.equal(parameter, averages[name])
        raise RuntimeError("inside")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert torch.equal(ema.averages[name], averages[name])


@pytest.mark.parametrize(("warmup", "left"), [(10, 1e-9), (1, 0.98)])
def test_short_runs_are_not_ruined(warmup: int, left: float) -> None:
    """Share of the random start in the average after 200 steps: none with the warm-up, nearly all at a fixed 0.9999."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    ema = EMA(model, decay=0.9999, warmup=warmup)
    nn.init.zeros_(model.weight)
    for step in range(200):
        ema.update(step)
    share = float(ema.averages["weight"])
    assert share < left if warmup == 10 else share > left
