"""Paired runs of the finalists and of dense training at equal wall-clock, by the job's own trainer.

- All of them start from the same weights and see the same samples, noise and times at the same steps. Each runs as many
  steps as fit into its share of the time, by steps that were timed beside dense ones right before. That number is saved
  before the run begins, so that a run that was stopped goes on, whatever a step takes then; the seconds that the run
  itself logged are recorded beside the expected ones.
- Short runs do not rank plans: a ratio that won after 30 seconds lost after 430. They do show plans that fall apart:
  after 30 seconds the two windows that failed had a dense validation loss 2.3 and 3.6 % above that of dense training,
  and no other one more than 0.9 % (docs/results.md). So a run can reject a finalist, and never promotes one.
- A finished run is not repeated, and one that was stopped goes on from its checkpoint.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread.autotune.cost import Routes, key_of
from tread.autotune.jobs.job import TrainedJob
from tread.autotune.store import Store
from tread.config.layers import changes
from tread.errors import ConfigError, TrainingDiverged
from tread.page.curves import Clock
from tread.page.read import read_run
from tread.routing.schedule import Schedule
from tread.training.metrics import read_metrics

FALLS_APART = 0.02
"""A finalist is rejected if its validation loss over dense training's, minus 1, exceeds this."""
FOLDER = "verify"
DENSE = key_of(())


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run; without routes it is dense."""

    routes: Routes
    tread_config: Mapping[str, Any] | None
    speedup: float
    """Dense over routed seconds of a step, timed beside each other."""


def unplanned(store: Store, names: Sequence[str], share: float) -> list[str]:
    """The runs whose number of steps is not decided yet; all of them, if dense training had another share of the time.

    `share` are the seconds of one run.
    """
    dense = store.get("verified", DENSE) or {}
    if dense.get("share") != share:
        return list(names)
    planned = {name: store.get("verified", name) or {} for name in names}
    return [name for name, run in planned.items() if (run.get("share"), run.get("dense")) != (share, dense["dense"])]


def verify(
    job: TrainedJob, store: Store, arms: Sequence[Arm], share: float, dense_seconds: float, folder: Path
) -> dict[str, dict[str, Any]]:
    """Steps, seconds, validation loss, and loss over dense training's, minus 1, of each arm; the first is dense.

    `share` are the seconds of each run, `dense_seconds` those of a dense step, for runs that are not planned yet. A
    finalist that diverges has no validation loss.
    """
    for name in unplanned(store, [DENSE], share):
        plan = {"share": share, "dense": dense_seconds, "validation": job.validation()}
        store.add("verified", name, plan | _steps(share, dense_seconds, 1.0, lambda _: None))
    dense = store.get("verified", DENSE)
    for arm in arms:
        name = key_of(arm.routes)
        if unplanned(store, [name], share):
            steps = _steps(share, dense["dense"], arm.speedup, lambda steps, arm=arm: _schedule(job, arm, steps))
            store.add("verified", name, {"share": share, "dense": dense["dense"]} | steps)
        if "val_loss" not in store.get("verified", name):
            store.add("verified", name, store.get("verified", name) | _trained(job, arm, store, folder))
    results = {key_of(arm.routes): store.get("verified", key_of(arm.routes)) for arm in arms}
    reference = results[DENSE]["val_loss"]
    return {
        name: one | {"against_dense": None if one["val_loss"] is None else one["val_loss"] / reference - 1}
        for name, one in results.items()
    }


def _steps(
    share: float, dense: float, speedup: float, schedule_of: Callable[[int], Schedule | None]
) -> dict[str, float]:
    """The most steps that fit into the share, at least one, and the seconds that they are expected to take."""

    def seconds(steps: int) -> float:
        return run_seconds(steps, schedule_of(steps), dense=dense, speedup=speedup)

    counts = range(1, int(share * max(1.0, speedup) / dense) + 2)
    fitting = max(1, bisect_right(counts, share * (1 + 1e-9), key=seconds))
    return {"steps": fitting, "expected_seconds": seconds(fitting)}


def run_seconds(steps: int, schedule: Schedule | None, *, dense: float, speedup: float) -> float:
    """The time of a run whose dense steps take `dense` seconds: what a step saves goes with the ratio at it.

    >>> run_seconds(100, Schedule(cooldown_fraction=0.5, total_steps=100), dense=1.0, speedup=2.0)
    75.0
    """
    routed = steps if schedule is None else sum(schedule.scale(step) for step in range(steps))
    return dense * (steps - routed * (1 - 1 / speedup))


def _schedule(job: TrainedJob, arm: Arm, steps: int) -> Schedule | None:
    return None if arm.tread_config is None else job.schedule(arm.tread_config, steps)


def _trained(job: TrainedJob, arm: Arm, store: Store, folder: Path) -> dict[str, float | None]:
    """Train an arm; its seconds, by its own log, and its validation loss."""
    name = key_of(arm.routes)
    steps = store.get("verified", name)["steps"]
    run_folder = folder / FOLDER / f"{name.replace(' ', '_')}-{steps}"
    try:
        job.train(arm.tread_config, steps, run_folder)
    except TrainingDiverged as error:
        if not arm.routes:
            raise
        print(f"{name} falls apart: {error}")
        return {"seconds": None, "val_loss": None}
    losses = [line["val_loss"] for line in read_metrics(run_folder) if "val_loss" in line]
    return {"seconds": Clock(read_run(run_folder)).seconds[-1], "val_loss": losses[-1]}


def check_validation(job: TrainedJob, store: Store) -> None:
    """Refuse to compare runs with those that were validated on other samples."""
    before = (store.get("verified", DENSE) or {}).get("validation")
    if before is not None and (different := changes(before, job.validation())):
        raise ConfigError(
            f"{store.path} has verifying runs that were validated otherwise ({'; '.join(different)}), and their losses "
            "cannot be compared: keep that setting, or name another --out."
        )


def standing(names: Sequence[str], verified: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The finalists that were not rejected, in their order."""
    return [name for name in names if name not in verified or _stands(verified[name]["against_dense"])]


def _stands(against_dense: float | None) -> bool:
    return against_dense is not None and against_dense <= FALLS_APART
