"""Optimizers that tune their own rate: Prodigy estimates it, schedule-free AdamW needs no decay.

- Both are their authors' libraries (`prodigyopt`, `schedulefree`), of the extra `optim`.
- `group_state` names the state that they keep in their parameter group beside its settings; checkpoints save it.
- Schedule-free trains at y and is evaluated at the average x. The library's switch recomputes y from x, which rounds:
  evaluating would change the training. `averaged` swaps storage instead and restores y bit for bit.
"""

import importlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from tread.errors import needs


def prodigy(params: Sequence[nn.Parameter], **settings: Any) -> Optimizer:
    """Prodigy (Mishchenko and Defazio 2023, arXiv 2306.06101), which multiplies the rate it estimates by `lr`.

    With Adam's bias correction, and with an estimate that a warm-up does not distort.
    """
    with redirect_stdout(io.StringIO()):  # it prints that weight decay is decoupled
        return _prodigy()(params, use_bias_correction=True, safeguard_warmup=True, **settings)


def schedule_free(params: Sequence[nn.Parameter], **settings: Any) -> Optimizer:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682); `betas[0]` interpolates between average and step."""
    optimizer = _schedule_free()(params, **settings)
    optimizer.train()
    return optimizer


@cache
def _prodigy() -> Any:
    with needs("optimizer prodigy needs prodigyopt", "optim"):
        library: Any = importlib.import_module("prodigyopt")

    class Prodigy(library.Prodigy):
        group_state: ClassVar = ("d", "d_max", "d_numerator", "k")

    return Prodigy


@cache
def _schedule_free() -> Any:
    with needs("optimizer adamw-schedule-free needs schedulefree", "optim"):
        library: Any = importlib.import_module("schedulefree")

    class ScheduleFree(library.AdamWScheduleFree):
        group_state: ClassVar = ("k", "weight_sum", "lr_max")

        @contextmanager
        def averaged(self) -> Iterator[None]:
            """Inside, the parameters hold the average x; afterwards y again, from the same storage."""
            trained = self._swap_in_averages()
            try:
                yield
            finally:
                for parameter, y in trained:
                    parameter.data = y

        @torch.no_grad()
        def _swap_in_averages(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
            trained = []
            for group in self.param_groups:
                weight = 1 - 1 / group["betas"][0]  # y = (1 - beta) z + beta x, solved for x
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:  # without a step both are the initial weights
                        trained.append((parameter, parameter.data))
                        parameter.data = torch.lerp(parameter.data, self.state[parameter]["z"], weight)
            return trained

    return ScheduleFree
