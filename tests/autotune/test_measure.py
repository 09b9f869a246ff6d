"""How steps are timed: warm-up, blocks of several steps, and the median over blocks."""

from collections.abc import Iterator

import pytest
import torch

from tread.autotune.measure import BLOCKS, LONGEST_BLOCK, steady
from tread.training.trial import WARM_UPS


class Steps:
    """Steps, and the clock that they advance by their seconds."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.now, self.count, self._seconds = 0.0, 0, seconds

    def __call__(self) -> None:
        self.now += next(self._seconds)
        self.count += 1

    def timed(self) -> float:
        return steady(torch.device("cpu"), lambda: self.now)(self)


@pytest.mark.parametrize(("seconds", "block"), [(0.1, 3), (2.0, 1), (0.001, LONGEST_BLOCK), (0.0, LONGEST_BLOCK)])
def test_the_median_over_blocks_after_warm_up(seconds: float, block: int) -> None:
    """The first steps compile, and one block of those that count was disturbed."""
    warm_ups = WARM_UPS.get("cpu", 1)
    steps = Steps(iter([60.0] * warm_ups + [seconds] * (1 + block) + [9.0] * block + [seconds] * block))
    assert steps.timed() == pytest.approx(seconds)
    assert steps.count == warm_ups + 1 + BLOCKS * block
