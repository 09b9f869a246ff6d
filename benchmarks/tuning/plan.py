"""How long the runs of a seed take: what is begun must fit, and `--plan` says so beforehand.

Guesses are of one H200, until a run of the seed was made: later ones take as long beside their training as that did.
"""

import argparse
from collections.abc import Sequence

from benchmarks.record import Facts

from .arms import BY_NAME, Arm

START_SECONDS = 25.0
"""Imports, images and features."""
BASE_SECONDS = 60.0
"""The base beside its training: compiling, losses, a grid of samples, its weights to disk."""
WARM_SECONDS = {"dense": 15.0, "routed": 30.0}
"""Compiling from the cache, timing, capturing graphs and validating; a routed arm has five lengths of the stream."""
COMPILE_SECONDS = {"dense": 25.0, "routed": 90.0}
"""Besides, for the first run of an arm where no rehearsal has filled the compiler's cache."""
SAMPLES_SECONDS = 90.0
"""Two thousand samples unguided and with guidance, 40 steps each; layers run eager then."""

Jobs = Sequence[tuple[Arm, float]]
"""Arms with their rates, in the order of their runs."""


def run_name(arm: Arm, rate: float) -> str:
    """The name of a run."""
    return f"{arm.name}-{rate:g}"


def beside_training(arm: Arm, runs: dict[str, Facts], *, samples: bool, compiled: bool) -> float:
    """Seconds that a run of an arm takes beside its training."""
    kind = "routed" if arm.ratio else "dense"
    measured = [run for run in runs.values() if run.get("arm") == arm.name and "wall_seconds" in run]
    if measured:
        found = max(run["wall_seconds"] - run["seconds"] for run in measured)
        return found + (SAMPLES_SECONDS if samples and not any(run["samples"] for run in measured) else 0)
    found = WARM_SECONDS[kind] + (SAMPLES_SECONDS if samples else 0)
    return found if compiled else found + COMPILE_SECONDS[kind]


def plan(given: argparse.Namespace, jobs: Jobs, runs: dict[str, Facts], *, compiled: bool) -> str:
    """A table of what is to be done, and how long it takes."""
    seconds: dict[str, float] = {"start": START_SECONDS}
    seconds["base"] = 0.0 if "base" in runs else given.base_seconds + BASE_SECONDS
    begun = {run["arm"] for run in runs.values() if "arm" in run}
    for arm, rate in jobs:
        name = run_name(arm, rate)
        seconds[name] = 0.0
        if name not in runs:
            known = compiled or arm.name in begun
            seconds[name] = given.seconds + beside_training(arm, runs, samples=given.samples, compiled=known)
        begun.add(arm.name)
    total = sum(seconds.values())
    lines = [f"{name:<20} {f'{value:6.0f} s' if value else '    done'}" for name, value in seconds.items()]
    return "\n".join([*lines, f"{'in all':<20} {total:6.0f} s, {total / 60:.1f} min"])


def jobs_of(arms: Sequence[str], rates_of: dict[str, list[float]]) -> list[tuple[Arm, float]]:
    """Every arm at its first rate, then every arm at its second: a session cut short has compared all arms."""
    most = max((len(rates) for rates in rates_of.values()), default=0)
    return [
        (BY_NAME[name], rates_of[name][turn]) for turn in range(most) for name in arms if turn < len(rates_of[name])
    ]
