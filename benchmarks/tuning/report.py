"""The answer on docs/results.md: a table of every run, who is ahead, the figure, and samples."""

import json
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from benchmarks.common.record import Facts
from benchmarks.quality.report import pictures, rewrite
from examples.figures import COLORS
from pages.tables import markdown_table
from tread.sampling.grid import make_grid

from .arms import TUNED, Arm
from .run import loss_of

CHOOSING = 0
"""The seed that chose the rates; it makes no claim."""
DISTANCE, KERNEL = "FD-EffLite0", "KD-EffLite0"
MARKERS = "osD^"
"""Markers of arms: another one where the colours begin anew."""
SHOWN = 8
"""Samples of each class in the picture."""


def report(results: Sequence[Path], docs: Path, samples: Path | None = None) -> None:
    """Write the table and the figures of `docs`/results.md; without `samples` their picture stays as it is."""
    seeds = [json.loads(path.read_text()) for path in results]
    seeds = sorted((seed for seed in seeds if seed["seed"] != CHOOSING), key=lambda seed: seed["seed"])
    folder = docs / "results"
    folder.mkdir(parents=True, exist_ok=True)
    save_figure(seeds, folder / "tuning.png")
    if samples is not None:
        save_samples(samples, seeds[0], folder / "tuning-samples.png")
    words = {
        "tuning.png": "dense validation loss over time, and distances of samples; each seed a line or a point",
        "tuning-samples.png": "unguided samples of the two classes, from the same noise for every arm",
    }
    shown = pictures(folder, *((name, text) for name, text in words.items() if (folder / name).is_file()))
    rewrite(docs / "results.md", {"tuning": "\n\n".join([runs_table(seeds), verdict(seeds), shown])})


def arms_of(seeds: Sequence[Facts]) -> list[Arm]:
    """The arms that were run: LoRA first, and by their ratios."""
    names = {run["arm"] for seed in seeds for run in seed["runs"].values() if "arm" in run}
    return sorted(
        map(Arm.parse, names), key=lambda arm: (arm.kind == "full", bool(arm.recomputed), arm.ratio, arm.layers)
    )


def describe(arm: Arm) -> str:
    """An arm in words."""
    kind = {"lora": "LoRA", "full": "all weights"}[arm.kind]
    routes = f"{arm.ratio:g} over {arm.layers[0]}..{arm.layers[1]}" if arm.ratio else "dense"
    steps = {"": "", "all": ", checkpointed", "dense": ", dense steps checkpointed"}[arm.recomputed]
    return f"{kind}, {routes}{steps}"


def best(seed: Facts, arm: str) -> Facts | None:
    """The run of an arm with the lowest validation loss."""
    found = [run for run in seed["runs"].values() if run.get("arm") == arm]
    return min(found, key=loss_of, default=None)


def figures_of(run: Facts) -> tuple[float, float, float]:
    """Unguided Frechet and kernel distance, and the validation loss; NaN for samples that were not drawn."""
    distance, kernel = run["samples"].get("1", {DISTANCE: nan, KERNEL: nan}).values()
    return distance, kernel, run["val_loss"]


def excess(seed: Facts, arm: Arm) -> tuple[float, float, float] | None:
    """An arm's figures relative to the dense arm of its kind and seed, less one; checkpointed with checkpointed."""
    recomputed = "all" if arm.recomputed else ""
    run, dense = best(seed, arm.name), best(seed, Arm(kind=arm.kind, ratio=0, recomputed=recomputed).name)
    if run is None or dense is None or not arm.ratio:
        return None
    distance, kernel, loss = (one / other - 1 for one, other in zip(figures_of(run), figures_of(dense), strict=True))
    return distance, kernel, loss


def runs_table(seeds: Sequence[Facts]) -> str:
    """Every arm with every seed, its mean, and what it is relative to the dense arm of its seed."""
    rows: list[tuple[str, ...]] = []
    for arm in arms_of(seeds):
        runs = {seed["seed"]: run for seed in seeds if (run := best(seed, arm.name)) is not None}
        ratios = {seed["seed"]: found for seed in seeds if (found := excess(seed, arm)) is not None}
        for number, run in runs.items():
            gib = "" if run["peak_gib"] is None else f"{run['peak_gib']:.1f}"
            cells = f"{run['steps']:,}", f"{run['seconds']:.1f}", gib, *_cells(figures_of(run))
            rows.append((describe(arm), str(number), *cells, *_percent(ratios.get(number))))
        if len(runs) > 1:
            means = _cells(tuple(map(mean, zip(*map(figures_of, runs.values()), strict=True))))
            gap = tuple(map(mean, zip(*ratios.values(), strict=True))) if ratios else None
            rows.append((describe(arm), "mean", "", "", "", *means, *_percent(gap)))
    head = ("arm", "seed", "steps", "seconds", "GiB", DISTANCE, "KD x 1000", "dense validation loss",
            "distance to dense's", "KD", "loss")  # fmt: skip
    return markdown_table(head, rows)


def _cells(figures: Sequence[float]) -> tuple[str, ...]:
    distance, kernel, loss = figures
    return (*(f"{value:.1f}" if isfinite(value) else "" for value in (distance, 1000 * kernel)), f"{loss:.5f}")


def _percent(ratios: Sequence[float] | None) -> tuple[str, ...]:
    return ("",) * 3 if ratios is None else tuple(f"{ratio:+.1%}" if isfinite(ratio) else "" for ratio in ratios)


def verdict(seeds: Sequence[Facts]) -> str:
    """For each routed arm the number of seeds in which it is ahead of dense: in loss, in distance and in both."""
    lines = []
    for arm in arms_of(seeds):
        found = [ratios for seed in seeds if (ratios := excess(seed, arm)) is not None and isfinite(ratios[0])]
        if found:
            loss, distance = (sum(ratios[index] < 0 for ratios in found) for index in (2, 0))
            both = sum(ratios[0] < 0 and ratios[2] < 0 for ratios in found)
            lines.append(
                f"- {describe(arm)}: ahead of dense in loss for {loss}, in {DISTANCE} for {distance} and in both for "
                f"{both} of {len(found)} seeds."
            )
    return "\n".join(lines)


def save_figure(seeds: Sequence[Facts], path: Path) -> None:
    """Dense validation loss over training seconds, a line per seed, and distances of samples, a point per seed."""
    from matplotlib import pyplot

    arms = arms_of(seeds)
    figure, (losses, distances) = pyplot.subplots(1, 2, figsize=(11, max(4, 0.4 * len(arms))), layout="constrained")
    for row, arm in enumerate(arms):
        color, marker = COLORS[row % len(COLORS)], MARKERS[row // len(COLORS) % len(MARKERS)]
        runs = [run for seed in seeds if (run := best(seed, arm.name)) is not None]
        for run in runs:
            _, seconds, values = zip(*run["curve"], strict=True)
            losses.plot(seconds, values, f"{marker}-", markersize=3.5, linewidth=1.2, color=color)
        drawn = [figures_of(run)[0] for run in runs if run["samples"]]
        distances.plot(drawn, [row] * len(drawn), marker, color=color, markersize=6)
    losses.set(title="dense validation loss", xlabel="seconds of training")
    distances.set(
        title=f"{DISTANCE} of samples, lower is better", yticks=range(len(arms)), ylim=(len(arms) - 0.5, -0.5)
    )
    for row, label in enumerate(distances.set_yticklabels([describe(arm) for arm in arms])):
        label.set_color(COLORS[row % len(COLORS)])  # they name the lines to their left too
    for axis in (losses, distances):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def save_samples(folder: Path, seed: Facts, path: Path) -> None:
    """Samples of the arms of one seed, from the files that `run` left in `folder`; rows of one class each."""
    from matplotlib import pyplot

    runs = {describe(arm): best(seed, arm.name) for arm in arms_of([seed])}
    files = {
        words: folder / f"tuning-s{seed['seed']}-{run['arm']}-{run['rate']:g}-1.npy"
        for words, run in runs.items()
        if run
    }
    figure, axes = pyplot.subplots(1, len(files), figsize=(3.6 * len(files), 2.1), squeeze=False, layout="constrained")
    for axis, (words, file) in zip(axes[0], files.items(), strict=True):
        images = np.load(file, allow_pickle=False)  # (N, H, W, 3), classes in turn
        rows = [images[first :: len(TUNED)][: 2 * SHOWN] for first in range(len(TUNED))]
        axis.imshow(make_grid(torch.from_numpy(np.concatenate(rows)), columns=SHOWN))
        axis.set(title=words, xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
