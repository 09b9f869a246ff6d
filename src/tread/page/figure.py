"""A figure as data, which `svg.py` draws for the page and `png.py` with matplotlib."""

from dataclasses import dataclass, field

Points = list[tuple[float, float]]
SMALLEST = 1e-100
"""Differences below this count as zero."""
COLOURS = 6
"""Number of colours for runs; further runs repeat them with dashes."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve; `run` is the index of its run, which decides colour and dashes."""

    name: str
    run: int
    points: Points
    band: list[tuple[float, float, float]] = field(default_factory=list)
    """(x, lowest, highest) of the shaded band around the line."""
    dotted: bool = False
    """Whether each point is marked: few, exact values."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Lines over a common x axis."""

    key: str
    """The figure's id in the page and its file name."""
    title: str
    x: str
    lines: list[Line]
    note: str = ""
    log: bool = False
    zero: bool = False
    """Whether the y axis begins at 0."""
    percent: bool = False
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Shaded intervals of x: routed steps."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar with its label; `pale` marks a prediction beside a measurement."""

    name: str
    run: int
    value: float
    label: str
    pale: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars from 0."""

    key: str
    title: str
    bars: list[Bar]
    note: str = ""


Figure = Curves | Bars


def bounds(figure: Curves) -> tuple[float, float, float, float]:
    """Lowest and highest x and y of a figure's axes."""
    xs = [x for line in figure.lines for x, _ in line.points]
    ys = [y for line in figure.lines for _, y in line.points]
    ys += [y for line in figure.lines for _, low, high in line.band for y in (low, high)]
    if figure.log:
        ys = [y for y in ys if y > 0]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if x0 == x1:
        x0, x1 = x0 - 0.5, x1 + 0.5
    if figure.log:
        return x0, x1, y0 / 1.1, y1 * 1.1
    if figure.percent:
        y0, y1 = min(0.0, y0), max(1.0, y1)
    if figure.zero:
        y0, y1 = min(0.0, y0), y1 * 1.05 if y1 > SMALLEST else 1.0
    room = 0.05 * (y1 - y0) or abs(y1) * 0.1
    room = room if room > SMALLEST else 1.0
    return x0, x1, (y0 if figure.zero else y0 - room), (y1 if figure.zero else y1 + room)
