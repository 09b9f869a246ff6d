"""How long the runs of a seed take, guessed for one H200: what is begun must fit, and `--plan` says so beforehand."""

import argparse
from collections.abc import Collection, Mapping, Sequence

from .arms import BY_NAME, Arm

START_SECONDS = 25.0
"""Imports, images and features."""
BASE_SECONDS = 60.0
"""The base beside its training: compiling, losses, a picture of samples, its weights to disk."""
WARM_SECONDS = {"dense": 15.0, "routed": 40.0}
"""Compiling from the cache, timing and capturing graphs, once for an arm; a routed one has five lengths of tokens."""
COMPILE_SECONDS = {"dense": 25.0, "routed": 90.0}
"""Besides, where no rehearsal has filled the compiler's cache."""
VALIDATE_SECONDS = 5.0
"""Four losses on the test images."""
SAMPLES_SECONDS = 110.0
"""Two thousand samples unguided and with guidance, 40 steps each; eager layers take twice as long."""


def run_name(arm: str, rate: float) -> str:
    """The name of a run."""
    return f"{arm}-{rate:g}"


def run_seconds(arm: Arm, given: argparse.Namespace, *, first: bool) -> float:
    """How long a run takes; the first of an arm is that which makes it ready."""
    kind = "routed" if arm.ratio else "dense"
    ready = WARM_SECONDS[kind] + (0 if given.compiled else COMPILE_SECONDS[kind])
    return given.seconds + VALIDATE_SECONDS + (SAMPLES_SECONDS if given.samples else 0) + (ready if first else 0)


def missing_rates(arm: str, rates: Sequence[float], runs: Collection[str]) -> list[float]:
    """The rates of an arm that were not run yet."""
    return [rate for rate in rates if run_name(arm, rate) not in runs]


def plan(given: argparse.Namespace, rates_of: Mapping[str, Sequence[float]], runs: Collection[str]) -> str:
    """A table of what is to be done, and how long it takes."""
    has_base = given.base is not None or "base" in runs
    seconds = {"start": START_SECONDS, "base": 0.0 if has_base else given.base_seconds + BASE_SECONDS}
    for arm, rates in rates_of.items():
        missing = missing_rates(arm, rates, runs)
        for rate in rates:
            left = run_seconds(BY_NAME[arm], given, first=rate == missing[0]) if rate in missing else 0.0
            seconds[run_name(arm, rate)] = left
    total = sum(seconds.values())
    lines = [f"{name:<20} {f'{value:6.0f} s' if value else '    done'}" for name, value in seconds.items()]
    return "\n".join([*lines, f"{'in all':<20} {total:6.0f} s, {total / 60:.1f} min"])
