"""Paired runs of the finalists and of dense training at equal wall-clock, by the job's own trainer.

- All of them start from the same weights and see the same samples, noise and times at the same steps. Each runs as many
  steps as fit into its share of the time, by its measured step time.
- Short runs do not rank plans: a ratio that won after 30 seconds lost after 430. They do show plans that fall apart:
  after 30 seconds the two windows that failed had a dense validation loss 2.3 and 3.6 % above that of dense training,
  and no other one more than 0.9 % (docs/results.md). So a run can reject a finalist, and never promotes one.
- A finished run is not repeated, and one that was stopped goes on from its checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread.autotune.cost import Routes, key_of
from tread.autotune.jobs.job import TrainedJob
from tread.autotune.store import Store
from tread.training.metrics import read_metrics

FALLS_APART = 0.02
"""A finalist is rejected if its validation loss over dense training's, minus 1, exceeds this."""
FOLDER = "verify"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run; without routes it is dense."""

    routes: Routes
    tread_config: Mapping[str, Any] | None
    seconds: float
    """Time of a step."""


def verify(
    job: TrainedJob, store: Store, arms: Sequence[Arm], minutes: float, folder: Path
) -> dict[str, dict[str, float]]:
    """Steps, validation loss, and loss over dense training's, minus 1, of each arm by name; one arm is dense."""
    share = 60 * minutes / len(arms)
    for arm in arms:
        steps = max(1, round(share / arm.seconds))
        name = key_of(arm.routes)
        if (store.get("verified", name) or {}).get("steps") == steps:
            continue
        run_folder = folder / FOLDER / f"{name.replace(' ', '_')}-{steps}"
        job.train(arm.tread_config, steps, run_folder)
        losses = [line["val_loss"] for line in read_metrics(run_folder) if "val_loss" in line]
        store.add("verified", name, {"steps": steps, "seconds": steps * arm.seconds, "val_loss": losses[-1]})
    results = {key_of(arm.routes): store.get("verified", key_of(arm.routes)) for arm in arms}
    dense = results[key_of(())]["val_loss"]
    return {name: one | {"against_dense": one["val_loss"] / dense - 1} for name, one in results.items()}


def standing(names: Sequence[str], verified: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The finalists that were not rejected, in their order."""
    return [name for name in names if name not in verified or verified[name]["against_dense"] <= FALLS_APART]
