"""Figures: loss curves and a picture of which tokens a route kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLORS = ("#4c4c4c", "#d1495b", "#2e86ab", "#66a182", "#edae49")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run's validation loss at some moments: seconds of compute, optimizer steps, loss."""

    seconds: Sequence[float]
    steps: Sequence[int]
    loss: Sequence[float]


def save_curves(curves: Mapping[str, Curve], path: Path) -> None:
    """Loss over compute time and over steps, side by side."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, attribute, label in zip(axes, ("seconds", "steps"), ("seconds of compute", "steps"), strict=True):
        for (name, curve), color in zip(curves.items(), COLORS, strict=False):
            axis.plot(getattr(curve, attribute), curve.loss, label=name, color=color, linewidth=1.8)
        axis.set(xlabel=label)
        use_log_scale(axis)
        axis.grid(alpha=0.3, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("validation loss, all tokens")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def use_log_scale(axis: Any) -> None:
    """A logarithmic y axis with plain numbers."""
    from matplotlib.ticker import StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))


def save_kept_tokens(images: Tensor, selections: Sequence[Tensor], grid: tuple[int, int], path: Path) -> None:
    """A row per selection (N, K): the images (N, H, W, 3 or 1) with the patches of dropped tokens hatched out."""
    from matplotlib import pyplot

    count, height, width = images.shape[:3]
    rows, columns = grid
    figure, axes = pyplot.subplots(
        len(selections) + 1, count, figsize=(count, len(selections) + 1.2), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for column, image in enumerate(images):
        axes[0, column].imshow(image.squeeze(-1), cmap="gray", vmin=0, vmax=255)
    axes[0, 0].set_ylabel("input", fontsize=8)
    for row, selection in enumerate(selections, start=1):
        kept = torch.zeros(count, rows * columns, dtype=torch.bool).scatter(1, selection.cpu(), True)
        kept = kept.view(count, rows, columns)
        kept = kept.repeat_interleave(height // rows, 1).repeat_interleave(width // columns, 2)  # (N, H, W)
        for column, (image, mask) in enumerate(zip(images, kept, strict=True)):
            colors = image.expand(-1, -1, 3).float() / 255  # (H, W, 3)
            dropped = torch.tensor([0.82, 0.29, 0.36])
            axes[row, column].imshow(torch.where(mask[..., None], colors, dropped).numpy())
        axes[row, 0].set_ylabel(f"step {row - 1}", fontsize=8)
    figure.suptitle(
        f"tokens kept in the window ({selections[0].shape[1]} of {rows * columns}); red: dropped", fontsize=9
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
