"""What the metrics of the runs say: the spike, the quality, the time.

- A spike is the excess of a routed run's training loss over the dense run's at the same steps. Both saw the same
  samples, noise and times there, so a mean over few steps is enough.
- Time is that of training steps: the median over laps of one ratio, without the lap in which that ratio came first
  (kernels are chosen, layers compiled), times the steps at that ratio. Set-up, validation and checkpoints are left out.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tread.training.metrics import read_metrics

NOTE = "run.json"
"""In the results of a run that is done."""
WINDOW = 20
"""Steps that losses are averaged over."""
WITHIN = 0.02
"""An excess below this is no spike any more."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its note and its metrics; step i is at index i - 1."""

    name: str
    facts: dict[str, Any]
    loss: Numbers
    kept: Numbers
    """The share of tokens that the routed layers kept at each step."""
    validation: dict[int, float]
    """Dense validation loss by step."""
    laps: list[tuple[int, float]]
    """The last step of each lap, and the seconds of one of its steps."""

    @property
    def kind(self) -> str:
        """`lora` or `full`."""
        return self.facts["kind"]

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.validation[max(self.validation)]


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The excess over the dense loss, 0.1 for 10 %."""

    height: float
    """Over the first steps."""
    peak: float
    """The largest over any WINDOW steps."""
    peak_step: int
    """The last of these."""
    lasting: float
    """Over the last WINDOW steps at the full ratio: what stays when the spike is over."""
    settled: int | None
    """Steps until the excess, after its peak, was WITHIN of the lasting one; 0 where it always was."""
    length: int | None
    """Steps until it was WITHIN of none; 0 where it always was, None where it never was again."""


def read_runs(results: Path) -> dict[str, Run]:
    """All runs that are done, by name."""
    return {note.parent.name: read_run(note.parent) for note in sorted(results.glob(f"*/{NOTE}"))}


def read_run(folder: Path) -> Run:
    """The run whose note and metrics lie in a folder."""
    facts = json.loads((folder / NOTE).read_text())
    lines = read_metrics(folder)
    steps = sorted((line for line in lines if "loss" in line), key=lambda line: line["step"])
    return Run(
        name=folder.name,
        facts=facts,
        loss=np.array([line["loss"] for line in steps]),
        kept=np.array([line["tokens_kept"] for line in steps]),
        validation={line["step"]: line["val_loss"] for line in lines if "val_loss" in line},
        laps=[
            (line["step"], facts["train_batch_size"] / line["images_per_second"])
            for line in lines
            if "images_per_second" in line
        ],
    )


def smoothed(values: Numbers, window: int = WINDOW) -> Numbers:
    """The means over `window` steps, (N,) -> (N - window + 1,), or of all where there are fewer."""
    window = min(window, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid")


def excess(run: Run, dense: Run) -> Numbers:
    """How far the training loss is above the dense run's, for every WINDOW steps; 0.1 for 10 %."""
    return smoothed(run.loss) / smoothed(dense.loss) - 1


def spike_of(run: Run, dense: Run) -> Spike:
    """The spike of a routed run."""
    found = excess(run, dense)
    top = int(found.argmax())
    routed = np.flatnonzero(run.kept == run.kept.min())[-WINDOW:]
    lasting = float(run.loss[routed].mean() / dense.loss[routed].mean() - 1)
    return Spike(
        height=float(found[0]),
        peak=float(found[top]),
        peak_step=top + min(WINDOW, len(run.loss)),
        lasting=lasting,
        settled=_steps_until(found, lasting + WITHIN),
        length=_steps_until(found, WITHIN),
    )


def _steps_until(found: Numbers, limit: float) -> int | None:
    """How many steps pass before the first window, at the peak or after it, that is not above the limit."""
    top = int(found.argmax())
    if found[top] <= limit:
        return 0
    below = np.flatnonzero(found[top:] <= limit)
    return top + int(below[0]) if len(below) else None


def step_seconds(runs: Iterable[Run]) -> dict[float, float]:
    """Seconds of a step by the share of tokens kept, over all runs given."""
    times: defaultdict[float, list[float]] = defaultdict(list)
    for run in runs:
        seen: set[float] = set()
        first = 0
        for last, seconds in run.laps:
            shares = set(run.kept[first:last].tolist())
            if len(shares) == 1 and shares <= seen:
                times[min(shares)].append(seconds)
            seen |= shares
            first = last
    return {share: float(np.median(found)) for share, found in sorted(times.items())}


def run_seconds(run: Run, per_step: Mapping[float, float]) -> Numbers:
    """Seconds of training after each step, (steps,); a share that was never timed lies between those that were."""
    if not per_step:
        return np.full(len(run.kept), np.nan)
    return np.interp(run.kept, list(per_step), list(per_step.values())).cumsum()


def validation_at(run: Run, step: float) -> float:
    """The validation loss at a step, between those where it was taken."""
    return float(np.interp(step, list(run.validation), list(run.validation.values())))
