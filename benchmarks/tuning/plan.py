"""How long the runs take, estimated for one H200: what is begun must fit, and `--plan` says so beforehand."""

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .arms import Arm
from .results import Results

BASE = "base.pt"
"""The base's weights, in the work folder."""
CHOSEN = "chosen"
"""The tuner's folder there, and the arm with its window."""
START_SECONDS = 25.0
"""Imports, images and features."""
BASE_SECONDS = 60.0
"""The base beside its training: compiling, losses, a picture of samples, its weights to disk."""
WARM_SECONDS = {"dense": 15.0, "routed": 40.0}
"""Compiling from the cache, timing and capturing graphs, once for an arm; a routed one has five lengths of tokens."""
COMPILE_SECONDS = {"dense": 25.0, "routed": 90.0}
"""Besides, if no rehearsal has filled the compiler's cache."""
CAPTURE_SECONDS = 8.0
"""Capturing graphs for another seed."""
VALIDATE_SECONDS = 5.0
"""Four losses on the test images."""
SAMPLES_SECONDS = 22.0
"""Two thousand samples in 25 steps, and their features; guidance doubles it."""


class Tuned(NamedTuple):
    """One run of an arm."""

    seed: int
    rate: float


def run_name(arm: Arm, rate: float) -> str:
    """The name of a run."""
    return f"{arm.name}-{rate:g}"


def run_seconds(arm: Arm, given: argparse.Namespace, *, first: bool) -> float:
    """Seconds that a run takes; the first of an arm includes compiling."""
    kind = "routed" if arm.ratio else "dense"
    ready = WARM_SECONDS[kind] + (0 if given.compiled else COMPILE_SECONDS[kind]) if first else CAPTURE_SECONDS
    samples = sum(SAMPLES_SECONDS * (1 if scale == 1 else 2) for scale in given.guidance)
    return given.seconds + VALIDATE_SECONDS + samples + ready


def missing_runs(arm: Arm, runs: Sequence[Tuned], results: Mapping[int, Results]) -> list[Tuned]:
    """The runs of an arm that are not done yet."""
    return [run for run in runs if run_name(arm, run.rate) not in results[run.seed].runs]


def plan(
    given: argparse.Namespace, wanted: Mapping[Arm, Sequence[Tuned]], missing: Mapping[Arm, Sequence[Tuned]]
) -> str:
    """A table of what is to be done, and how long it takes."""
    has_base = (given.work / BASE).is_file()
    seconds = {"start": START_SECONDS, "base": 0.0 if has_base else given.base_seconds + BASE_SECONDS}
    for arm, runs in wanted.items():
        for run in runs:
            left = run_seconds(arm, given, first=run == missing[arm][0]) if run in missing[arm] else 0.0
            seconds[f"s{run.seed} {run_name(arm, run.rate)}"] = left
    total = sum(seconds.values())
    lines = [f"{name:<24} {f'{value:6.0f} s' if value else '    done'}" for name, value in seconds.items()]
    lines.append(f"{'in all':<24} {total:6.0f} s, {total / 60:.1f} min")
    if given.budget_seconds < total:
        left = f"{given.budget_seconds:6.0f} s: what does not fit is not begun; raise --budget-seconds"
        lines.append(f"{'budget':<24} {left}")
    return "\n".join(lines)
