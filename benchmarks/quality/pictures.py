"""The figures of docs/results.md and of the short studies in docs/log.md."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.record import Facts
from examples.figures import COLORS, use_log_scale
from tread.sampling.grid import make_grid

from .results import Results
from .speedup import Pair

LINES = ("-", "--", ":", "-.")
SHOWN = 6
FEW_WINDOWS = 6
FAR = 2
"""Medians of all points after which a point, of a run that diverged, is drawn at the border with its number."""


def save_curves(results: Results, distance: str, path: Path) -> None:
    """The headline's runs, a line for each seed: distance over time and over steps, dense validation loss over time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    lengths = {entry["seconds"] for arm in ("dense", "routed") for entry in results.done_of(arm)}
    for arm, color in (("dense", COLORS[0]), ("routed", COLORS[1])):
        for entry in sorted(results.done_of(arm), key=lambda entry: (entry["seconds"], entry["seed"])):
            looks = sorted(entry["snapshots"], key=lambda found: found["seconds"])
            style = {"color": color, **_line(arm, entry["seed"], entry["seconds"], lengths)}
            distances = [found["samples"]["unguided"][f"{distance} few"] for found in looks]
            for axis, over in zip(axes, ("seconds", "steps"), strict=False):
                axis.plot([found[over] for found in looks], distances, marker="o", markersize=3.5, **style)
            curve = entry["curve"][1:]  # the first point is far above the others
            axes[2].plot([point["seconds"] for point in curve], [point["val_loss"] for point in curve], **style)
    for axis, over in zip(axes, ("seconds of training", "steps"), strict=False):
        axis.set(title=f"{distance}, {_few(results):,} samples", xlabel=over)
        use_log_scale(axis)
    axes[2].set(title="dense validation loss", xlabel="seconds of training")
    for axis in axes:
        _log_axis(axis)
    _finish(figure, axes, path)


def save_speedups(every: Sequence[Pair], steps: float, path: Path) -> None:
    """Speed-up to quality over the seconds of dense training, a thin line for each seed; `steps` is that of a step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    colors, lengths = {"training": COLORS[1], "test": COLORS[2]}, {pair.seconds for pair in every}
    for axis, kind in zip(axes, ("Frechet", "kernel"), strict=True):
        for pair in every:
            curve = pair.curve()
            if not (curve and pair.measure.startswith(kind)):
                continue
            words = next(words for words in colors if words in pair.measure)
            style = _line(f"to {words} images", pair.seed, pair.seconds, lengths)
            axis.plot(*zip(*curve, strict=True), color=colors[words], **style)
            looks = list(pair.at_looks().items())
            axis.scatter(*zip(*looks, strict=True), color=colors[words], s=12, zorder=3)
        axis.axhline(1, color="#999999", linewidth=1)
        axis.axhline(steps, color="#999999", linewidth=1, linestyle=(0, (2, 2)))
        axis.annotate(f" steps alone: {steps:.2f}", (0, steps), (0, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", color="#777777", fontsize=9)  # fmt: skip
        axis.set(title=f"{kind} distance", xlabel="seconds of dense training to the same distance")
        _log_axis(axis)
    axes[0].set_ylabel("routed is so many times sooner")
    _finish(figure, axes, path)


def save_grids(grids: Sequence[np.ndarray], titles: Sequence[str], path: Path) -> None:
    """Sample grids side by side, each 100 images (100, H, W, 3), of which the first SHOWN of each class are drawn."""
    first = [images.reshape(-1, 10, *images.shape[1:])[:, :SHOWN].reshape(-1, *images.shape[1:]) for images in grids]
    _save_grids(first, titles, SHOWN, path)


def _save_grids(grids: Sequence[np.ndarray], titles: Sequence[str], columns: int, path: Path) -> None:
    from matplotlib import pyplot

    size = 0.5 * columns * len(grids), 5.35
    figure, axes = pyplot.subplots(1, len(grids), figsize=size, squeeze=False, layout="constrained")
    for axis, images, title in zip(axes[0], grids, titles, strict=True):
        axis.imshow(make_grid(torch.from_numpy(images), columns=columns))
        axis.set(title=title, xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def save_nearest(
    grids: Sequence[tuple[np.ndarray, np.ndarray]], titles: Sequence[str], path: Path, shown: int = 4
) -> None:
    """Samples and, to the right of each, the nearest training image: the first few of each class, a grid per model."""
    mixed = []
    for pair in grids:
        rows = [images.reshape(-1, 10, *images.shape[1:])[:, :shown] for images in pair]  # (10, shown, H, W, 3)
        mixed.append(np.stack(rows, axis=2).reshape(-1, *pair[0].shape[1:]))
    _save_grids(mixed, titles, 2 * shown, path)


def save_studies(results: Results, studies: Mapping[str, Sequence[Facts]], distance: str, path: Path) -> bool:
    """A panel for each study that compares something: a row for each arm, a point for each seed; False without any."""
    from matplotlib import pyplot

    shown = {name: rows for name, rows in studies.items() if len({row["label"] for row in rows}) > 1}
    if not shown:
        return False
    heights = [len({row["label"] for row in rows}) for rows in shown.values()]
    figure, axes = pyplot.subplots(
        len(shown), figsize=(9, 0.26 * sum(heights) + 0.5 * len(shown) + 0.6), squeeze=False, sharex=True,
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    found = {name: [row["samples"]["unguided"][f"{distance} few"] for row in rows] for name, rows in shown.items()}
    every = sorted(value for values in found.values() for value in values)
    limit = FAR * every[len(every) // 2]
    for axis, (name, rows) in zip(axes.flat, shown.items(), strict=True):
        arms = list(dict.fromkeys(row["label"] for row in rows))
        for value, row in zip(found[name], rows, strict=True):
            color, place = COLORS[row["arm"].is_routed], arms.index(row["label"])
            axis.scatter(min(value, limit), place, color=color, marker="o" if value <= limit else ">", zorder=3)
            if value > limit:
                axis.annotate(f"{value:.0f}  ", (limit, place), ha="right", va="center", color=color)
        axis.set_yticks(range(len(arms)), arms)
        axis.set(ylim=(len(arms) - 0.5, -0.5))
        axis.set_title(name, loc="left", fontsize=11)
    axes.flat[-1].set_xlabel(f"{distance}, {_few(results):,} samples; a point for each seed")
    _finish(figure, axes.flat, path)
    return True


def save_heat_map(
    results: Results, placements: Mapping[tuple[int, int] | None, float], distance: str, path: Path
) -> bool:
    """Distance by first and last layer of the window; False where too few windows were tried to fill a map."""
    from matplotlib import pyplot

    windows = {window: value for window, value in placements.items() if window is not None}
    if len(windows) < FEW_WINDOWS:
        return False
    starts, ends = (sorted({layers[side] for layers in windows}) for side in (0, 1))
    values = np.full((len(starts), len(ends)), np.nan)
    for (start, end), value in windows.items():
        values[starts.index(start), ends.index(end)] = value
    figure, axis = pyplot.subplots(figsize=(1.2 * len(ends) + 2.5, 0.8 * len(starts) + 1.8), layout="constrained")
    picture = axis.imshow(values, cmap="viridis_r", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            dark = value > np.nanmean(values)  # the colours run from light, for small, to dark
            axis.text(column, row, f"{value:.1f}", ha="center", va="center", color="white" if dark else "black")
    dense = f"; dense has {placements[None]:.1f}" if None in placements else ""
    axis.set(xlabel="last layer", ylabel="first layer")
    axis.set_title(f"half of the tokens dropped in the window{dense}", fontsize=11)
    axis.set_xticks(range(len(ends)), [str(end) for end in ends])
    axis.set_yticks(range(len(starts)), [str(start) for start in starts])
    figure.colorbar(picture, label=f"{distance}, {_few(results):,} samples")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _line(words: str, seed: int, seconds: float, lengths: Collection[float]) -> dict[str, Any]:
    """The line of a run and its label; runs of other `lengths` beside it are told apart by the line's width."""
    length = f", {seconds:g} s" if len(lengths) > 1 else ""
    return {
        "linestyle": LINES[seed % len(LINES)],
        "linewidth": 1.2 + sum(shorter < seconds for shorter in lengths),
        "label": f"{words}, seed {seed}{length}",
    }


def _log_axis(axis: Any) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.xaxis.set_minor_locator(NullLocator())


def _few(results: Results) -> int:
    """How many samples figures are of that stand side by side."""
    return results.facts["machine"]["scale"]["few"]


def _finish(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
