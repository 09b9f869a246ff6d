"""The figures of docs/results.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tread.report.figures import COLORS
from tread.sampling.grid import make_grid

from .results import Results

Facts = dict[str, Any]
LINES = ("-", "--", ":", "-.")
SHOWN = 6


def save_curves(results: Results, distance: str, path: Path) -> None:
    """Distance and dense validation loss of the headline's runs over training time, a line for each seed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for arm, color in (("dense", COLORS[0]), ("routed", COLORS[1])):
        for entry in results.runs.values():
            if entry["status"] != "done" or entry["arm"]["name"] != arm:
                continue
            looks = sorted(entry["snapshots"], key=lambda found: found["seconds"])
            style = {
                "color": color,
                "linestyle": LINES[entry["seed"] % len(LINES)],
                "label": f"{arm}, seed {entry['seed']}",
            }
            distances = [found["samples"]["unguided"][f"{distance} few"] for found in looks]
            axes[0].plot([found["seconds"] for found in looks], distances, marker="o", markersize=4, **style)
            curve = entry["curve"][1:]  # the first point is far above the others
            axes[1].plot([point["seconds"] for point in curve], [point["val_loss"] for point in curve], **style)
    axes[0].set(ylabel=f"{distance}, first few samples, unguided", xlabel="seconds of training", yscale="log")
    axes[1].set(ylabel="dense validation loss", xlabel="seconds of training")
    _finish(figure, axes, path)


def save_grids(grids: Sequence[np.ndarray], titles: Sequence[str], path: Path) -> None:
    """Sample grids side by side, each 100 images (100, H, W, 3), of which the first SHOWN of each class are drawn."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(grids), figsize=(3 * len(grids), 5.2), squeeze=False, layout="constrained")
    for axis, images, title in zip(axes[0], grids, titles, strict=True):
        chosen = images.reshape(-1, 10, *images.shape[1:])[:, :SHOWN].reshape(-1, *images.shape[1:])
        axis.imshow(make_grid(torch.from_numpy(chosen), columns=SHOWN))
        axis.set(title=title, xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def save_studies(studies: Mapping[str, Sequence[Facts]], distance: str, path: Path) -> bool:
    """A panel of bars for each study that has begun, placement aside; False where there is none."""
    from matplotlib import pyplot

    shown = {name: rows for name, rows in studies.items() if name != "placement" and rows}
    if not shown:
        return False
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.2 * len(shown), 4.2), squeeze=False, layout="constrained")
    for axis, (name, rows) in zip(axes[0], shown.items(), strict=True):
        values = [row["samples"]["unguided"][f"{distance} few"] for row in rows]
        colors = [COLORS[0] if not row["arm"].is_routed else COLORS[1] for row in rows]
        bars = axis.bar(range(len(rows)), values, color=colors)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.set_xticks(range(len(rows)), [row["arm"].name for row in rows], rotation=30, ha="right", fontsize=8)
        axis.set(title=name)
    axes[0, 0].set_ylabel(f"{distance}, first few samples")
    _finish(figure, axes[0], path)
    return True


def save_heat_map(placements: Mapping[tuple[int, int], Facts], distance: str, path: Path) -> bool:
    """Distance by first and last layer of the window; False where there are too few windows."""
    from matplotlib import pyplot

    if len(placements) < 2:
        return False
    starts, ends = (sorted({layers[side] for layers in placements}) for side in (0, 1))
    values = np.full((len(starts), len(ends)), np.nan)
    for (start, end), row in placements.items():
        values[starts.index(start), ends.index(end)] = row["samples"]["unguided"][f"{distance} few"]
    figure, axis = pyplot.subplots(figsize=(1.2 * len(ends) + 2.5, 0.8 * len(starts) + 1.5), layout="constrained")
    picture = axis.imshow(values, cmap="viridis_r", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            dark = value > np.nanmean(values)  # the colours run from light, for small, to dark
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
    axis.set(xlabel="last layer", ylabel="first layer")
    axis.set_xticks(range(len(ends)), [str(end) for end in ends])
    axis.set_yticks(range(len(starts)), [str(start) for start in starts])
    figure.colorbar(picture, label=f"{distance}, first few samples")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _finish(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
