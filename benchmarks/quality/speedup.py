"""Speed-up to quality: how much sooner routed training reaches a distance that dense training reaches.

- Between two looks at a run its distance follows a power law of the seconds: a straight line on two log scales.
- Only distances that both arms reach count; nothing is extrapolated.
- A Frechet distance falls as samples are added, so a pair whose looks drew unequal numbers is compared on the first
  few of each. The kernel distance is unbiased and needs no such care.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from benchmarks.common.record import Facts
from pages.tables import markdown_table

from .results import Results, distance_name, kernel_name

Points = Sequence[tuple[float, float]]
"""Seconds of training and the distance then, in the order of time."""
DISTANCES = 60
"""Distances that a curve of the speed-up is drawn at."""
NOTHING = "No pair was run."


def seconds_to(goal: float, points: Points) -> float:
    """When a falling curve first reaches `goal`, between its points by a power law.

    >>> seconds_to(5, [(1, 10), (4, 2.5)])
    2.0
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= goal >= y1:
            share = log(y0 / goal) / log(y0 / y1) if y0 > y1 else 0.0
            return round(exp(log(x0) + (log(x1) - log(x0)) * share), 6)
    raise ValueError(f"the curve does not reach {goal}")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A dense and a routed run of one seed and one length, by one measure of distance."""

    measure: str
    """The distance in words."""
    figure: str
    """The name of the distance in the results."""
    seed: int
    seconds: float
    """Length of both runs."""
    machines: int
    """GPUs that the runs were made on: the seconds of two are not quite comparable."""
    dense: Points
    routed: Points

    @property
    def reached(self) -> tuple[float, float]:
        """The largest and the smallest distance that both curves reach; the first is smaller if they share none."""
        curves = self.dense, self.routed
        return min(points[0][1] for points in curves), max(min(y for _, y in points) for points in curves)

    def at(self, distance: float) -> float:
        """How much sooner routed training reaches a distance."""
        return seconds_to(distance, self.dense) / seconds_to(distance, self.routed)

    def at_looks(self) -> dict[int, float]:
        """The speed-up to what dense training had at each look that routed training can be asked about, by seconds."""
        most, least = self.reached
        return {round(seconds): self.at(y) for seconds, y in self.dense if least <= y <= most}

    def curve(self) -> list[tuple[float, float]]:
        """Dense training's seconds and the speed-up to what it had then, over all distances both reach."""
        most, least = self.reached
        if most <= least:
            return []
        distances = [most * (least / most) ** (step / DISTANCES) for step in range(DISTANCES)]
        return [(seconds_to(y, self.dense), self.at(y)) for y in [*distances, least]]


def pairs(results: Results) -> list[Pair]:
    """Every dense and routed run of equal seed and length, by each measure that both have at all their looks."""
    frechet = distance_name(results)
    kernel = kernel_name(frechet)
    measures = {
        "Frechet, to training images": (frechet, f"{frechet} few"),
        "Frechet, to test images": (f"{frechet} test",),
        "kernel, to training images": (kernel,),
        "kernel, to test images": (f"{kernel} test",),
    }
    dense = sorted(results.done_of("dense"), key=lambda entry: (entry["seconds"], entry["seed"]))
    runs = [(one, results.done("routed", one["seed"], one["seconds"])) for one in dense]
    found = []
    for measure, names in measures.items():
        for one, other in runs:
            if other is None:
                continue
            name = next((name for name in names if _comparable(name, frechet, one, other)), None)
            if name is None:
                continue
            ours, theirs = (_points(entry, name) for entry in (one, other))
            found.append(
                Pair(
                    measure=measure,
                    figure=name,
                    seed=one["seed"],
                    seconds=one["seconds"],
                    machines=len({entry.get("gpu") for entry in (one, other)}),  # the oldest results have no `gpu`
                    dense=ours,
                    routed=theirs,
                )
            )
    return found


def _comparable(name: str, frechet: str, *entries: Facts) -> bool:
    """Whether all looks at the runs have the figure, and, for a Frechet distance, of equally many samples."""
    looks = [look["samples"]["unguided"] for entry in entries for look in entry["snapshots"]]
    if not all(name in look for look in looks):
        return False
    return not name.startswith(frechet) or name.endswith(" few") or len({look["count"] for look in looks}) == 1


def _points(entry: Facts, name: str) -> Points:
    return sorted((look["seconds"], look["samples"]["unguided"][name]) for look in entry["snapshots"])


def speedup_table(results: Results) -> str:
    """The speed-up of every seed to what dense training had at each look; the range over seeds below each measure."""
    every = pairs(results)
    if not every:
        return NOTHING
    looks = sorted({seconds for pair in every for seconds in pair.at_looks()})
    rows = []
    for measure, length in dict.fromkeys((pair.measure, pair.seconds) for pair in every):
        group = [pair for pair in every if (pair.measure, pair.seconds) == (measure, length)]
        for pair in group:
            most, least = pair.reached
            digits = 1 if most > 1 else 4
            speedups, few = pair.at_looks(), ", first few" if pair.figure.endswith(" few") else ""
            cells = [f"{speedups[seconds]:.2f}" if seconds in speedups else "" for seconds in looks]
            span = f"{most:.{digits}f} to {least:.{digits}f}"
            runs = f"{length:g} s" if pair.machines == 1 else f"{length:g} s, two GPUs"
            rows.append((f"{measure}{few}", str(pair.seed), runs, span, *cells))
        ranges = [
            sorted(found[seconds] for pair in group if seconds in (found := pair.at_looks())) for seconds in looks
        ]
        cells_all = [f"**{found[0]:.2f} to {found[-1]:.2f}**" if len(found) > 1 else "" for found in ranges]
        if any(cells_all):
            rows.append((measure, "all", f"{length:g} s", "", *cells_all))
    head = ("distance", "seed", "runs of", "both reach", *(f"dense at {seconds} s" for seconds in looks))
    return markdown_table(head, rows)
