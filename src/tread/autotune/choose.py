"""`choose_routes`: `tread autotune` for a custom training loop."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tread.attach.attach import Attachment
from tread.autotune.goal import Goal, Options
from tread.autotune.jobs.own import OwnLoop, OwnTuning, Step, TokenLosses, renamed
from tread.autotune.rules import RATIOS
from tread.autotune.run import tune
from tread.autotune.tuning import CONFIG_FILE
from tread.errors import ConfigError
from tread.routing.plan import RoutePlan


def choose_routes(
    handle: Attachment,
    *,
    step: Step,
    token_losses: TokenLosses,
    batches: Sequence[Any],
    target_speedup: float | None = None,
    max_loss_gap: float | None = None,
    routed_loss: Literal["kept", "all"] = "all",
    out: str | Path = "autotune/loop",
    budget_minutes: float = 30.0,
    ratios: Sequence[float] = RATIOS,
    edges: int = 8,
    windows: int = 2,
) -> RoutePlan:
    """The routes for an attached model in its loop, chosen by measurements; `handle.reroute` takes them.

    - `step(batch)` is a training step without the optimizer: forward and backward.
    - `token_losses(batch, u)` is the loss of each token, (B, S), at the u-quantile of your training times (0: the least
      noise, 1: the most), with the same noise whenever it is called. `routed_loss` says which of them your training
      counts where tokens are dropped: those of kept ones, or all.
    - `batches` are some batches of training data, each as `step` takes it; one is enough, two are better.

    Goals, rules, files and limitations are those of `tread autotune` (docs/autotune.md). Without a goal the plan is the
    knee of the Pareto front. The handle's plan and step and the model's mode are restored afterwards.
    """
    if not batches:
        raise ConfigError("batches is empty; give some batches of training data, each as `step` takes it.")
    if target_speedup is not None and max_loss_gap is not None:
        raise ConfigError("give target_speedup or max_loss_gap, not both.")
    handle.check_attached()
    before, held = handle.plan, handle.hold()
    modes = [(module, module.training) for module in handle.model.modules()]
    loop = OwnLoop(handle=handle, take_step=step, token_losses=token_losses, routed_loss=routed_loss)
    with _arguments_named():
        options = Options(
            config=None,
            settings=(),
            goal=Goal(speedup=target_speedup, gap=max_loss_gap),
            budget_minutes=budget_minutes,
            ratios=ratios,
            edges=edges,
            windows=windows,
        )
        device = next(loop.model.parameters()).device
        handle.reroute(replace(before, schedule=None))  # steps are measured at the full ratio
        try:
            folder = tune(options, OwnTuning(loop, batches, before), Path(out), device)
        finally:
            handle.reroute(before)
            handle.put_back(held)
            for module, training in modes:
                module.training = training
    return RoutePlan.from_config(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))


@contextmanager
def _arguments_named() -> Iterator[None]:
    """Errors in the words of a caller: `--target-speedup` is `target_speedup`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(renamed(str(error))) from error
