"""Curves of training runs: losses, rate, gradients, speed, tokens kept, figures of evaluations."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tread.page.figure import Curves, Line, Points
from tread.page.read import Run, is_number

MOST = 240
"""Most points of a line; more steps are averaged in bins of equal length."""
STEPS = "steps"
KNOWN = {"step", "loss", "val_loss", "learning_rate", "grad_norm", "images_per_second", "memory_gib", "tokens_kept"}
HIGHER = ("precision", "recall", "IS")
"""Metrics of evaluations for which higher is better; for all others lower is."""
UNCHARTED = (" std",)
"""Suffixes of metrics that are standard deviations of others, and get no chart."""


def curves(runs: Sequence[Run]) -> dict[str, list[Curves]]:
    """Every figure that the runs have numbers for, by section."""
    return {
        "Loss": _drawn([_training_loss(runs), _validation_loss(runs), _validation_loss_by_time(runs)]),
        "Optimisation": _drawn(
            [
                _plain(runs, "learning_rate", "learning rate", zero=True),
                _binned(runs, "grad_norm", "gradient norm", "Before clipping."),
            ]
        ),
        "Speed and memory": _drawn(
            [
                _plain(runs, "images_per_second", "samples per second", note=SPEED, zero=True),
                _plain(runs, "tokens_kept", "share of tokens kept", note=KEPT, zero=True, percent=True),
            ]
        ),
        "Evaluation": _drawn(_figures(runs)),
    }


SPEED = "Training alone, without validation, pictures and saving."
KEPT = "The effective ratio: tokens kept by the routed layers of each step; 100% is a dense step."


def _training_loss(runs: Sequence[Run]) -> Curves | None:
    routed = [run for run in runs if is_routed(run)]
    note = "Of single steps, as they were trained."
    if routed:
        said = "Routed steps" if len(routed) == len(runs) else f"Routed steps ({', '.join(run.name for run in routed)})"
        note = f"{said} lack tokens, and their loss shows it: compare runs by the validation loss."
    figure = _binned(runs, "loss", "training loss", note)
    return replace(figure, spans=routed_spans(runs[0])) if figure is not None and len(runs) == 1 else figure


def routed_spans(run: Run) -> list[tuple[float, float]]:
    """First and last step of each run of consecutive routed steps; empty if every step is routed."""
    spans: list[tuple[float, float]] = []
    open_ = False
    kept = run.values("tokens_kept")
    for step, share in kept:
        if share < 1:
            spans = [*spans[:-1], (spans[-1][0], step)] if open_ else [*spans, (step, step)]
        open_ = share < 1
    return [] if all(share < 1 for _, share in kept) else spans


def _validation_loss(runs: Sequence[Run]) -> Curves | None:
    note = "All tokens in all layers (dense), averaged weights where there are any, fixed noise."
    return _plain(runs, "val_loss", "validation loss, dense", note=note, dotted=True)


def _validation_loss_by_time(runs: Sequence[Run]) -> Curves | None:
    """Validation loss over training time, which shows what faster steps gain."""
    lines = []
    for index, run in enumerate(runs):
        clock = Clock(run)
        timed = [(seconds, loss) for step, loss in run.values("val_loss") if (seconds := clock.at(step)) is not None]
        lines.append(Line(name=run.name, run=index, points=timed, dotted=len(timed) <= 60))
    unit, name = _unit(max((x for line in lines for x, _ in line.points), default=0.0))
    scaled = [replace(line, points=[(x / unit, y) for x, y in line.points]) for line in lines]
    title = "validation loss, dense, by training time"
    return _figure("val_loss_by_time", title, scaled, name, "At equal time: what a run gains by faster steps.")


def _unit(seconds: float) -> tuple[float, str]:
    return next(
        (size, name)
        for size, name in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
        if seconds >= 2 * size or size == 1
    )


class Clock:
    """Cumulative training time by step, integrated from the logged speeds."""

    def __init__(self, run: Run) -> None:
        self.steps, self.seconds = [0.0], [0.0]
        first = min((line["step"] for line in run.lines), default=1) - 1
        self.steps[0] = float(max(first, 0))  # a run that is validated before its first step has a line of step 0
        batch = run.batch
        for step, speed in run.values("images_per_second") if batch else []:
            if speed > 0 and step > self.steps[-1] and batch:
                self.seconds.append(self.seconds[-1] + (step - self.steps[-1]) * batch / speed)
                self.steps.append(step)

    def at(self, step: float) -> float | None:
        """Seconds of training after `step` steps, interpolated; None outside the logged steps."""
        if not self.steps[0] <= step <= self.steps[-1] or len(self.steps) == 1:
            return None
        above = bisect_left(self.steps, step)
        if above == 0:
            return self.seconds[0]
        share = (step - self.steps[above - 1]) / (self.steps[above] - self.steps[above - 1])
        return self.seconds[above - 1] + share * (self.seconds[above] - self.seconds[above - 1])


def is_routed(run: Run) -> bool:
    """Whether any step of a run dropped tokens."""
    return any(kept < 1 for _, kept in run.values("tokens_kept"))


def _figures(runs: Sequence[Run]) -> list[Curves | None]:
    """One figure for each logged metric outside KNOWN, such as FID."""
    names = {
        name: None
        for run in runs
        for line in run.lines
        for name, value in line.items()
        if name not in KNOWN and not name.endswith(UNCHARTED) and is_number(value)
    }
    return [_plain(runs, name, name, note=better(name), dotted=True) for name in names]


def better(name: str) -> str:
    """Whether higher or lower is better for a metric, in words."""
    return "Higher is better." if name.startswith(HIGHER) else "Lower is better."


def _plain(
    runs: Sequence[Run], metric: str, title: str, *, note: str = "", dotted: bool = False, **look: bool
) -> Curves | None:
    """One line per run, without binning; a run of equal values is reduced to its ends."""
    lines = []
    for index, run in enumerate(runs):
        points = _corners(run.values(metric))
        if len(points) > 4 * MOST:
            points = [(x, y) for x, y, _, _ in binned(points, 4 * MOST)]
        lines.append(Line(name=run.name, run=index, points=points, dotted=dotted and len(points) <= 60))
    return _figure(metric, title, lines, STEPS, note, **look)


def _corners(points: Points) -> Points:
    """Points without those whose neighbours have the same value."""
    if len(points) < 3:
        return points
    inner = [
        here for (before, here), (_, after) in pairwise(list(pairwise(points))) if not before[1] == here[1] == after[1]
    ]
    return [points[0], *inner, points[-1]]


def _binned(runs: Sequence[Run], metric: str, title: str, note: str) -> Curves | None:
    """One line per run: the mean of each bin of steps, in a band from the bin's lowest to its highest value."""
    lines, longest = [], 1
    for index, run in enumerate(runs):
        points = run.values(metric)
        bins = binned(points, MOST // 2 if len(points) > MOST else MOST)
        longest = max(longest, math.ceil(len(points) / max(1, len(bins))))
        band = [(x, low, high) for x, _, low, high in bins] if len(points) > MOST else []
        lines.append(Line(name=run.name, run=index, points=[(x, y) for x, y, _, _ in bins], band=band))
    if longest > 1:
        note = f"{note} Means of up to {longest} steps; the band is the lowest to the highest of them."
    return _figure(metric, title, lines, STEPS, note)


def binned(points: Points, most: int) -> list[tuple[float, float, float, float]]:
    """(x, mean, lowest, highest) of at most `most` bins of consecutive points; x is the mean of the bin's x.

    >>> binned([(1, 2.0), (2, 4.0), (3, 6.0)], 2)
    [(1.5, 3.0, 2.0, 4.0), (3.0, 6.0, 6.0, 6.0)]
    """
    size = max(1, math.ceil(len(points) / most))
    bins = []
    for first in range(0, len(points), size):
        xs, ys = zip(*points[first : first + size], strict=True)
        bins.append((math.fsum(xs) / len(xs), math.fsum(ys) / len(ys), min(ys), max(ys)))
    return bins


def _figure(
    key: str, title: str, lines: list[Line], x: str, note: str, *, zero: bool = False, percent: bool = False
) -> Curves | None:
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    values = [y for line in lines for _, y in line.points]
    wide = min(values) > 0 and max(values) > 12 * min(values) and not zero
    return Curves(key=slug(key), title=title, x=x, lines=lines, note=note, log=wide, zero=zero, percent=percent)


def slug(name: str) -> str:
    """A name as the name of a file: letters, digits and dashes."""
    return (
        "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower()).strip("-")[:60]
        or "figure"
    )


def _drawn(figures: Sequence[Curves | None]) -> list[Curves]:
    return [figure for figure in figures if figure is not None]
