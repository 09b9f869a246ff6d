"""The tables of the experiment and the picture of validation loss against time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import Facts
from examples.figures import COLORS

from .arms import ARMS, GUIDANCE, Arm
from .run import loss_of

CHOOSING = 0
"""The seed that chose the rates."""


def report(results: Sequence[Path], figure: Path) -> str:
    """Every run of every seed, the best rate of each arm against dense, and which arms win; draws the curves."""
    seeds = [json.loads(path.read_text()) for path in results]
    save_curves(seeds, figure)
    return f"{every_run(seeds)}\n\n{against_dense(seeds)}\n\n{verdict(seeds)}"


def best(seed: Facts, arm: str) -> Facts | None:
    """The run of an arm with the lowest validation loss."""
    found = [run for run in seed["runs"].values() if run.get("arm") == arm]
    return min(found, key=loss_of, default=None)


def every_run(seeds: Sequence[Facts]) -> str:
    """All runs, the bases first."""
    lines = [
        "| seed | run | steps | seconds | dense val loss | distances, unguided | guided |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for seed in seeds:
        for name, run in seed["runs"].items():
            told = [_told(run["samples"].get(f"{scale:g}", {})) for scale in GUIDANCE]
            cells = [seed["seed"], name, run["steps"], f"{run['seconds']:.1f}", f"{run['val_loss']:.5f}", *told]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _told(distances: Facts) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in distances.items())


def excess(seed: Facts, arm: Arm) -> list[float | None] | None:
    """An arm's loss, unguided and guided distance relative to dense, less one; None where one was not measured."""
    run, dense = best(seed, arm.name), best(seed, f"{arm.kind}-dense")
    if run is None or dense is None or not arm.ratio:
        return None
    found: list[float | None] = [run["val_loss"] / dense["val_loss"] - 1]
    for scale in GUIDANCE:
        figures = [one["samples"].get(f"{scale:g}") for one in (run, dense)]
        frechet = [next(iter(one.values())) for one in figures if one]  # the first is the Frechet distance
        found.append(frechet[0] / frechet[1] - 1 if len(frechet) == len(figures) else None)
    return found


def against_dense(seeds: Sequence[Facts]) -> str:
    """Each arm's best run relative to the dense one of its kind and seed, after the same seconds."""
    lines = [
        "| arm | seed | rate | steps, to dense's | val loss | FD, unguided | FD, guided |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for arm in ARMS:
        for seed in seeds:
            ratios, run, dense = excess(seed, arm), best(seed, arm.name), best(seed, f"{arm.kind}-dense")
            if ratios is None or run is None or dense is None:
                continue
            cells = [arm.name, seed["seed"], f"{run['rate']:g}", f"{run['steps'] / dense['steps']:.2f}"]
            cells += ["" if ratio is None else f"{ratio:+.1%}" for ratio in ratios]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def verdict(seeds: Sequence[Facts]) -> str:
    """A routed arm wins if it is ahead in loss and unguided distance for every seed that did not choose the rates."""
    lines = []
    for arm in ARMS:
        found = {seed["seed"]: excess(seed, arm) for seed in seeds if seed["seed"] != CHOOSING}
        known = {seed: ratios[:2] for seed, ratios in found.items() if ratios is not None and ratios[1] is not None}
        if not known:
            continue
        ahead = sorted(
            seed for seed, ratios in known.items() if all(ratio < 0 for ratio in ratios if ratio is not None)
        )
        lines.append(f"{arm.name}: ahead of dense in loss and distance for {len(ahead)} of {len(known)} seeds")
    return "\n".join(lines) or "no seed but the one that chose the rates has distances"


def save_curves(seeds: Sequence[Facts], path: Path) -> None:
    """Dense validation loss over training seconds, a panel per kind, a line per arm and seed."""
    from matplotlib import pyplot

    kinds = [kind for kind in ("lora", "full") if any(best(seed, f"{kind}-dense") for seed in seeds)]
    figure, axes = pyplot.subplots(1, max(1, len(kinds)), figsize=(6 * max(1, len(kinds)), 4), squeeze=False)
    for kind, axis in zip(kinds, axes[0], strict=False):
        for arm, color in zip((arm for arm in ARMS if arm.kind == kind), COLORS, strict=False):
            for number, seed in enumerate(seeds):
                run: dict[str, Any] | None = best(seed, arm.name)
                if run is not None:
                    _, seconds, losses = zip(*run["curve"], strict=True)
                    axis.plot(seconds, losses, "o-", color=color, alpha=0.9, label=None if number else arm.name)
        axis.set(title={"lora": "LoRA", "full": "all weights"}[kind], xlabel="training seconds", ylabel="dense loss")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
