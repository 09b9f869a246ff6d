"""Figures as inline SVG: axes, ticks, lines with their names at the end, bars.

Colours are CSS variables of the page, so that a figure follows the reader's colour scheme. The numbers behind the lines
are in a block of JSON beside it, for the script that shows them under the pointer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tread.errors import shortened
from tread.page.figure import COLOURS, Bars, Curves, Figure, Line, bounds
from tread.page.html import Html, data_block, joined, tag

WIDTH, HEIGHT = 420, 250
TOP, BOTTOM = 12, 34
CHARACTER = 6.6
"""Approximate width of a label's character, in SVG user units."""
DIGITS = 4
"""Significant digits of an axis label; more if two labels would be equal."""
NAME = 14
"""Most characters of a run's name at the end of its line; the legend has the full name."""


def draw(figure: Figure) -> Html:
    """A figure with its title and note."""
    drawing = _bars(figure) if isinstance(figure, Bars) else _curves(figure)
    note = tag("p", figure.note) if figure.note else ""
    first, rest = figure.title[:1], figure.title[1:]
    title = f"{first.upper() if rest[:1].islower() else first}{rest}"  # keeps names such as sFID
    return tag("figure", tag("figcaption", tag("h3", title), note), drawing, class_="chart", id=f"chart-{figure.key}")


def style(run: int) -> str:
    """The CSS classes of a run's colour and dashes."""
    return f"s{run % COLOURS}" + (" dashed" if run >= COLOURS else "")


def _curves(figure: Curves) -> Html:
    x0, x1, y0, y1 = bounds(figure)
    labelled = len({line.name for line in figure.lines}) > 1
    right = 12 + (CHARACTER * max(len(shortened(line.name, NAME)) for line in figure.lines) + 6 if labelled else 0)
    marks = _marks(log_ticks(y0, y1) if figure.log else ticks(y0, y1, 5), figure)
    left = 14 + CHARACTER * max((len(text) for text in marks.values()), default=0)
    width, height = WIDTH - left - right, HEIGHT - TOP - BOTTOM
    scale = math.log10 if figure.log else float

    def across(x: float) -> float:
        return left + width * (x - x0) / (x1 - x0)

    def down(y: float) -> float:
        return TOP + height * (1 - (scale(y) - scale(y0)) / (scale(y1) - scale(y0)))

    parts: list[object] = []
    for start, end in figure.spans:
        edge, wide = across(max(start, x0)), across(min(end, x1)) - across(max(start, x0))
        shade = tag("rect", x=round(edge, 1), y=TOP, width=round(max(0.5, wide), 1), height=height, class_="span")
        parts.append(shade)
    if figure.spans:
        parts.append(tag("text", "routed", x=round(across(max(figure.spans[0][0], x0)) + 5, 1), y=TOP + height - 6))
    for value, text in marks.items():
        y = round(down(value), 1)
        parts.append(tag("line", x1=left, x2=left + width, y1=y, y2=y, class_="rule"))
        parts.append(tag("text", text, x=left - 7, y=y + 4, text_anchor="end"))
    for value in ticks(x0, x1, 4):
        x = round(across(value), 1)
        parts.append(tag("line", x1=x, x2=x, y1=TOP + height, y2=TOP + height + 4, class_="axis"))
        parts.append(tag("text", number(value), x=x, y=TOP + height + 17, text_anchor="middle"))
    parts.append(tag("text", figure.x, x=left + width, y=HEIGHT - 3, text_anchor="end", class_="name"))
    parts.append(tag("line", x1=left, x2=left + width, y1=TOP + height, y2=TOP + height, class_="axis"))
    parts += [_line(line, across, down, log=figure.log) for line in figure.lines]
    if labelled:
        lines = [line for line in figure.lines if len(line.points) > 1] or figure.lines
        points = [line for line in figure.lines if line not in lines]
        parts += _labels(replace(figure, lines=lines), down, left + width + 6)
        parts += [_beside(line, across, down, left + width) for line in points if _shows(line, figure)]
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{figure.title}, over {figure.x}",
    )
    numbers = {
        "box": [round(left, 1), TOP, round(width, 1), height],
        "range": [x0, x1, y0, y1],
        "log": figure.log,
        "percent": figure.percent,
        "x": figure.x,
        "lines": [
            {"name": line.name, "run": line.run, "points": [[_short(x), _short(y)] for x, y in line.points]}
            for line in figure.lines
        ],
    }
    return joined([drawing, data_block(numbers)])


def _marks(values: Sequence[float], figure: Curves) -> dict[float, str]:
    """The tick values of an axis with their labels, with enough digits to tell them apart."""
    texts: list[str] = []
    for digits in range(DIGITS, 10):
        texts = [f"{y:.{max(0, digits - DIGITS)}%}" if figure.percent else number(y, digits) for y in values]
        if len(set(texts)) == len(texts):
            break
    return dict(zip(values, texts, strict=True))


def _line(line: Line, across: Callable[[float], float], down: Callable[[float], float], *, log: bool) -> Html:
    points = [(round(across(x), 1), round(down(y), 1)) for x, y in line.points if y > 0 or not log]
    parts: list[object] = []
    band = [(x, low, high) for x, low, high in line.band if low > 0 or not log]
    if len(band) > 1:
        edge = [(across(x), down(high)) for x, _, high in band] + [(across(x), down(low)) for x, low, _ in band[::-1]]
        parts.append(tag("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in edge), class_="band"))
    if len(points) > 1:
        parts.append(tag("path", d="M" + "L".join(f"{x} {y}" for x, y in points), class_="curve"))
    if line.dotted or len(points) == 1:
        parts += [tag("circle", cx=x, cy=y, r=2.6) for x, y in points]
    return tag("g", *parts, class_=f"line {style(line.run)}", data_run=line.run)


def _labels(figure: Curves, down: Callable[[float], float], x: float) -> list[Html]:
    """The names at the ends of the lines, moved apart where they would overlap."""
    last = [(next((y for _, y in line.points[::-1] if y > 0 or not figure.log), None), line) for line in figure.lines]
    ends = sorted(((down(y), line) for y, line in last if y is not None), key=lambda end: end[0])
    placed: list[float] = []
    for y, _ in ends:
        placed.append(max(y, placed[-1] + 13) if placed else y)
    excess = max(0.0, placed[-1] - (HEIGHT - BOTTOM)) if placed else 0.0
    return [
        tag(
            "text",
            shortened(line.name, NAME),
            x=round(x, 1),
            y=round(y - excess + 4, 1),
            class_=f"label {style(line.run)}",
            data_run=line.run,
        )
        for y, (_, line) in zip(placed, ends, strict=True)
    ]


def _shows(line: Line, figure: Curves) -> bool:
    return any(y > 0 or not figure.log for _, y in line.points)


def _beside(line: Line, across: Callable[[float], float], down: Callable[[float], float], edge: float) -> Html:
    """The label of a line that is a single point: to its lower right, where a rising line is not; left at the edge."""
    ((x, y),) = line.points
    side = 1 if across(x) + 7 + CHARACTER * len(shortened(line.name, NAME)) <= edge else -1
    return tag(
        "text",
        shortened(line.name, NAME),
        x=round(across(x) + 7 * side, 1),
        y=round(down(y) + 12, 1),
        text_anchor="start" if side > 0 else "end",
        class_=f"label {style(line.run)}",
        data_run=line.run,
    )


def _bars(figure: Bars) -> Html:
    row, left = 26, CHARACTER * max(len(shortened(bar.name, 26)) for bar in figure.bars) + 14
    height = row * len(figure.bars) + 8
    most = max((bar.value for bar in figure.bars), default=0) or 1.0
    room = WIDTH - left - CHARACTER * max(len(bar.label) for bar in figure.bars) - 16
    parts: list[object] = []
    for index, bar in enumerate(figure.bars):
        y, long = 4 + index * row, max(1.0, room * bar.value / most)
        classes = f"bar {style(bar.run)}{' pale' if bar.pale else ''}"
        parts.append(
            tag(
                "g",
                tag("text", shortened(bar.name, 26), x=left - 8, y=y + 16, text_anchor="end"),
                tag("rect", x=round(left, 1), y=y + 3, width=round(long, 1), height=row - 8, rx=2),
                tag("text", bar.label, x=round(left + long + 7, 1), y=y + 16, class_="value"),
                class_=classes,
                data_run=bar.run,
            )
        )
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=figure.title)


def layers(shares: list[float]) -> Html:
    """The share of tokens that each layer of a model sees, a bar per layer."""
    wide, height = min(24.0, (WIDTH - 8) / len(shares)), 64
    parts: list[object] = []
    for index, share in enumerate(shares):
        x, high = 4 + index * wide, max(2.0, share * height)
        look = "layer routed" if share < 1 else "layer"
        title = tag("title", f"layer {index}: {share:.0%} of the tokens")
        shape = {"x": round(x, 1), "y": round(4 + height - high, 1), "width": round(wide * 0.8, 1)}
        parts.append(tag("g", title, tag("rect", **shape, height=round(high, 1), rx=1), class_=look))
        if index in (0, len(shares) - 1) or 1 in (
            shares[index - 1] - share > 0,
            share < 1 and shares[index + 1] > share,
        ):
            parts.append(tag("text", index, x=round(x + wide * 0.4, 1), y=height + 18, text_anchor="middle"))
    words = "share of tokens in each layer"
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height + 22}", role="img", aria_label=words, class_="layers")


def ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers between `low` and `high`.

    >>> ticks(0.0, 1000.0, 5)
    [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]
    """
    size = 10 ** math.floor(math.log10((high - low) / about))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * about >= (high - low) * 0.999)
    digits = max(0, 3 - math.floor(math.log10(step)))
    first = math.ceil(low / step - 1e-9)
    return [round(step * index, digits) + 0.0 for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between `low` and `high`; with their multiples by 2 and 5 if there are few.

    >>> log_ticks(0.05, 2.0)
    [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if len(powers) > 7:
        powers = powers[:: math.ceil(len(powers) / 6)]
    factors = (1, 2, 5) if high < 200 * low else (1,)
    every = [factor * 10.0**power for power in powers for factor in factors]
    return [float(f"{value:.1g}") for value in every if low * 0.999 <= value <= high * 1.001]


def number(value: float, digits: int = DIGITS) -> str:
    """A number as an axis shows it.

    >>> number(0.0), number(25000.0), number(0.0003), number(12.5), number(7.5e-5)
    ('0', '25k', '0.0003', '12.5', '7.5e-5')
    """
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:.{digits}g}".replace("e-0", "e-")


def _short(value: float) -> float:
    return float(f"{value:.5g}")
