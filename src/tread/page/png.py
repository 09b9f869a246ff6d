"""Figures as PNG files, drawn with matplotlib from the same data as the page's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tread.errors import needs, shortened
from tread.files import writing
from tread.page.figure import COLOURS, Bars, Curves, Figure, bounds
from tread.page.read import read_runs
from tread.page.sections import figures

PALETTE = ("#0072b2", "#d55e00", "#00875f", "#b5578e", "#8a6d00", "#4b4fbf")
"""The page's colours on white."""
SIZE, DPI = (6.4, 3.8), 150


def write_pngs(paths: Sequence[Path], folder: Path) -> list[Path]:
    """One PNG for each figure of the report of some runs, named after it."""
    with needs("figures as PNG need matplotlib", "demo"):
        import matplotlib

        matplotlib.use("Agg")
    every = [figure for some in figures(read_runs(paths)).values() for figure in some]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return [_save(figure, folder / f"{figure.key}.png") for figure in every]


def _save(figure: Figure, path: Path) -> Path:
    from matplotlib import pyplot

    sheet, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
    try:
        axes.set_title(_plain(figure.title), loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        _bars(figure, axes) if isinstance(figure, Bars) else _curves(figure, axes)
        with writing(path):
            sheet.savefig(path, dpi=DPI)
    finally:
        pyplot.close(sheet)
    return path


def _curves(figure: Curves, axes: Any) -> None:
    x0, x1, y0, y1 = bounds(figure)
    for line in figure.lines:
        xs, ys = zip(*line.points, strict=True)
        colour = PALETTE[line.run % COLOURS]
        dashes = "--" if line.run >= COLOURS else "-"
        mark = "o" if line.dotted or len(xs) == 1 else None
        axes.plot(xs, ys, dashes, color=colour, marker=mark, markersize=3.5, linewidth=1.5, label=_plain(line.name))
        if line.band:
            at, low, high = zip(*line.band, strict=True)
            axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_yscale("log" if figure.log else "linear")
    axes.set_xlim(x0, x1)
    axes.set_ylim(y0, y1)
    axes.set_xlabel(figure.x)
    axes.grid(axis="y", color="#e1e5ea")
    if len(figure.lines) > 1:
        axes.legend(frameon=False)


def _bars(figure: Bars, axes: Any) -> None:
    for position, bar in enumerate(reversed(figure.bars)):
        colour = PALETTE[bar.run % COLOURS]
        face = {"facecolor": "white", "edgecolor": colour, "linestyle": "--"} if bar.pale else {"color": colour}
        axes.barh(position, bar.value, height=0.6, **face)
        axes.text(bar.value, position, f" {bar.label}", va="center")
    axes.set_yticks(range(len(figure.bars)), [_plain(bar.name) for bar in reversed(figure.bars)])
    axes.margins(x=0.15)


def _plain(text: str) -> str:
    """Text escaped from matplotlib's mathtext."""
    return shortened(text, 60).replace("$", r"\$")
