"""Paired runs of the finalists and of dense training at equal wall-clock, by the job's own trainer.

- All of them start from the same weights and see the same samples, noise and times at the same steps. Each has as many
  steps as fit into its share of the time, by the time of a step that was measured.
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
"""Validation loss over that of dense training, less 1, from which on a finalist is rejected."""
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
    """Steps, validation loss and loss over that of dense training, less 1, of each arm by name; the first is dense."""
    share = 60 * minutes / len(arms)
    for arm in arms:
        steps = max(1, round(share / arm.seconds))
        name = key_of(arm.routes)
        if (store.get("verified", name) or {}).get("steps") == steps:
            continue
        place = folder / FOLDER / f"{name.replace(' ', '_')}-{steps}"
        job.train(arm.tread_config, steps, place)
        found = [line["val_loss"] for line in read_metrics(place) if "val_loss" in line]
        store.add("verified", name, {"steps": steps, "seconds": steps * arm.seconds, "val_loss": found[-1]})
    found = {key_of(arm.routes): store.get("verified", key_of(arm.routes)) for arm in arms}
    dense = found[key_of(())]["val_loss"]
    return {name: one | {"against_dense": one["val_loss"] / dense - 1} for name, one in found.items()}


def standing(names: Sequence[str], verified: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Those of the finalists that did not fall apart, in their order."""
    return [name for name in names if name not in verified or verified[name]["against_dense"] <= FALLS_APART]
