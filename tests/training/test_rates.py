"""The learning rate of every step: by hand, beside diffusers' schedules, and in a run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny.runs import metrics, train
from tread.pretrain.config import compose
from tread.training.optimizers.rates import learning_rate
from tread.training.settings import OptimizerConfig


def test_the_rate_of_every_step(tmp_path: Path) -> None:
    def rates(**changes: Any) -> list[float]:
        defaults = compose([]).optimizer
        config = OptimizerConfig(**{**vars(defaults), "learning_rate": 2.0, "warmup_steps": 0, **changes})
        return [learning_rate(config, step, 4) for step in range(4)]

    assert rates() == [2.0] * 4
    assert rates(warmup_steps=4) == [0.5, 1.0, 1.5, 2.0]
    half = math.sqrt(0.5)
    assert rates(schedule="linear") == [2.0, 1.5, 1.0, 0.5]
    assert rates(schedule="cosine") == pytest.approx([2.0, 1 + half, 1.0, 1 - half])
    assert rates(schedule="linear", end_rate=1.0) == [2.0, 1.75, 1.5, 1.25]
    assert rates(schedule="cosine", end_rate=1.0) == pytest.approx([2.0, 1.5 + half / 2, 1.5, 1.5 - half / 2])
    assert rates(schedule="polynomial") == rates(schedule="linear")
    assert rates(schedule="polynomial", power=2.0, end_rate=1.0) == [2.0, 1 + 9 / 16, 1.25, 1 + 1 / 16]
    assert rates(schedule="cosine_with_restarts", cycles=2) == pytest.approx([2.0, 1.0, 2.0, 1.0])
    assert rates(schedule="cosine_with_restarts") == rates(schedule="cosine")
    assert rates(schedule="cosine", warmup_steps=2) == pytest.approx([1.0, 2.0, 2.0, 1.0])
    assert rates(schedule="linear", warmup_steps=4, end_rate=0.5) == [0.5, 1.0, 1.5, 2.0]
    assert rates(schedule="linear", warmup_steps=8) == [0.25, 0.5, 0.75, 1.0]

    folder = train(tmp_path / "run", "train.steps=4", "optimizer.learning_rate=0.01", "optimizer.warmup_steps=2")
    assert [line["learning_rate"] for line in metrics(folder)] == pytest.approx([0.005, 0.01, 0.01, 0.01])


@pytest.mark.parametrize(
    ("schedule", "changes", "given"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {"cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"power": 0.8, "end_rate": 0.25}, {"power": 0.8, "lr_end": 0.25}),
    ],
)
def test_rates_after_the_warm_up_are_those_of_diffusers(
    schedule: Any, changes: dict[str, Any], given: dict[str, Any]
) -> None:
    optimization = pytest.importorskip("diffusers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    make = optimization.TYPE_TO_SCHEDULER_FUNCTION[optimization.SchedulerType(schedule)]
    stock = make(optimizer, num_warmup_steps=8, num_training_steps=32, **given)
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=8, schedule=schedule, **changes)
    for step in range(32):
        if step >= 8:  # before, diffusers' rate is one step behind, from 0
            assert learning_rate(config, step, 32) == pytest.approx(stock.get_last_lr()[0]), step
        optimizer.step()
        stock.step()
