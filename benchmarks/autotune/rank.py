"""Do cheap scores rank arms as long runs do? Rank correlations over the arms of `benchmarks.quality`, or the paper's.

- An arm's truth is its Frechet distance, the mean over its seeds; lower is better. Ours is that of the first few
  samples, which every result has, after equal wall-clock; the paper's is FID after equal steps.
- Scores: the speed-up (measured, or of FLOPs); the loss gap (of `gaps`); and the order of the tuner's rules,
  arms that break one behind all others, then by speed-up.
- The chance is that of a correlation as high or higher among all orders of the arms. With n arms it is never below
  1 / n!, so that few arms prove nothing whatever their correlation.
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from tread.autotune.rules import Rules
from tread.routing.route import Route

from .arm import Arm
from .paper import FIGURE as PAPERS_FIGURE
from .paper import paper_arms

FIGURE = "FD-EffLite0 few"
PAPER = "paper"
"""The word that stands for the paper's arms where files of results are expected."""
TOKENS = 256
ENOUGH = 6
"""Arms from which on a correlation is worth a word."""
EXACT = 8
"""Arms of which all orders are gone through; of more, `DRAWN` are drawn."""
DRAWN = 20_000


def long_runs(given: Sequence[str], seconds: float) -> tuple[str, list[Arm]]:
    """The paper's arms, for the word `paper`, else those in files of results; before them their distance, in words."""
    if list(given) == [PAPER]:
        return PAPERS_FIGURE, paper_arms()
    return f"{FIGURE} after {seconds:g} s", read_arms([Path(path) for path in given], seconds)


def read_arms(paths: Sequence[Path], seconds: float) -> list[Arm]:
    """The arms of one model that were run for so long, whole runs alone."""
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        for run in document["runs"].values():
            plain = not any(run["arm"].get(name) for name in ("importance", "learning_rate", "cooldown", "annealed"))
            if run["status"] == "done" and run["seconds"] == seconds and plain and run["arm"]["size"] == "S":
                found.setdefault(run["arm"]["name"], []).append((run, document["machine"]["scale"]["sizes"]["S"]))
    return [_arm(name, runs) for name, runs in found.items()]


def _arm(name: str, runs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Arm:
    arm, size = runs[0][0]["arm"], runs[0][1]
    windows = [(arm["ratio"], *arm["layers"]), *arm.get("more", ())] if arm["ratio"] else []
    ends = [next(one for one in run["snapshots"] if one["at"] == "end") for run, _ in runs]
    return Arm(
        name=name,
        routes=tuple(
            Route(selection_ratio=one, start_layer_idx=start, end_layer_idx=end) for one, start, end in windows
        ),
        depth=size["depth"],
        distance=mean(one["samples"]["unguided"][FIGURE] for one in ends),
        speed=mean(run["steps_per_second"] for run, _ in runs),
        seeds=len({run["seed"] for run, _ in runs}),
    )


def scores(arms: Sequence[Arm], gaps: dict[str, float]) -> dict[str, dict[str, float]]:
    """Scores by name, each a number per arm of which more is better; a score that lacks an arm is left out."""
    dense = next((arm.speed for arm in arms if not arm.routes), None)
    speeds = {arm.name: arm.speed / (dense or 1.0) for arm in arms}
    allowed = {arm.name: not arm.routes or not _rules(arm).broken(arm.routes) for arm in arms}
    most = max(speeds.values(), default=0.0)
    found = {
        "speed-up": speeds,
        "rules, then speed-up": {name: speed + most * allowed[name] for name, speed in speeds.items()},
    }
    if all(arm.name in gaps for arm in arms):
        found["loss gap"] = {arm.name: -gaps[arm.name] for arm in arms}
        largest = max(gaps.values(), default=0.0)
        found["rules, then loss gap"] = {
            arm.name: -gaps[arm.name] - 2 * largest * (not allowed[arm.name]) for arm in arms
        }
    return found


def _rules(arm: Arm) -> Rules:
    return Rules(depth=arm.depth, tokens=TOKENS, adapts=False)


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the opposite one; ties count for neither."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    signs = [(_sign(one[i] - one[j]), _sign(other[i] - other[j])) for i, j in pairs]
    untied = math.prod(sum(1 for pair in signs if pair[side]) for side in (0, 1))
    return sum(a * b for a, b in signs) / math.sqrt(untied) if untied else 0.0


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rho: the correlation of ranks, equal values sharing the mean of theirs."""
    a, b = ranks(one), ranks(other)
    middle = (len(a) - 1) / 2
    spread = math.sqrt(math.prod(sum((rank - middle) ** 2 for rank in some) for some in (a, b)))
    return sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / spread if spread else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 0; equal ones share the mean."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def chance(one: Sequence[float], other: Sequence[float]) -> float:
    """How often an order drawn at random correlates as much as this one, or more."""
    a, b = np.asarray(one), np.asarray(other)
    if len(one) <= EXACT:
        orders = np.array(list(itertools.permutations(b)))  # (orders, arms)
    else:
        orders = np.random.default_rng(0).permuted(np.tile(b, (DRAWN, 1)), axis=1)  # (orders, arms)

    def agreement(values: np.ndarray) -> np.ndarray:
        """Twice the pairs in the same order as in `one`, less those in the opposite one; ties count for neither."""
        return (_signs(a) * _signs(values)).sum((-2, -1))

    return float((agreement(orders) >= agreement(b)).mean())


def _signs(values: np.ndarray) -> np.ndarray:
    """The sign of every difference, (..., arms) -> (..., arms, arms)."""
    return np.sign(values[..., :, None] - values[..., None, :])


def correlate(arms: Sequence[Arm], gaps: dict[str, float]) -> dict[str, Any]:
    """The arms, their scores, and the rank correlation of each score with the distances."""
    better = [-arm.distance for arm in arms]
    found = {}
    for name, values in scores(arms, gaps).items():
        given = [values[arm.name] for arm in arms]
        found[name] = {
            "kendall": kendall(given, better),
            "spearman": spearman(given, better),
            "chance": chance(given, better),
            "values": values,
        }
    return {
        "arms": {
            arm.name: {"distance": arm.distance, "speed": arm.speed, "seeds": arm.seeds,
                       "breaks": _rules(arm).broken(arm.routes) if arm.routes else []}
            for arm in arms
        },
        "scores": found,
        "verdict": verdict(len(arms)),
    }  # fmt: skip


def verdict(count: int) -> str:
    """What so many arms can show."""
    if count >= ENOUGH:
        return f"{count} arms were run at length; the chance says how often a random order does as well."
    chances = f"with {count} arms even a perfect order comes about by chance once in {math.factorial(count)}"
    return f"{count} arms were run at length: {chances}, so this proves nothing; run at least {ENOUGH}."
