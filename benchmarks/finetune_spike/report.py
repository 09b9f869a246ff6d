"""From the results of `run` to a JSON file, figures and a Markdown table."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.record import write_json
from examples.figures import COLORS

from .arms import ARMS, PICTURED
from .measure import (
    WINDOW,
    WITHIN,
    Run,
    excess,
    read_runs,
    run_seconds,
    smoothed,
    spike_of,
    step_seconds,
    validation_at,
)
from .pictures import save_pictures

KINDS = {"lora": "LoRA", "full": "all weights"}
MAIN = ("dense", "0.25", "0.25-schedule", "0.5", "0.5-schedule", "0.5-kept", "0.5-kept-cooldown")
SCHEDULES = ("dense", "0.5", "0.5-warmup", "0.5-cooldown", "0.5-long-cooldown", "0.5-schedule", "preset")
LINES = ("-", "-", (0, (4, 4)), "-", "-", (0, (1, 2)), "-.")
"""Of the schedules: curves that lie on each other for a while both show."""
LOOKS = {
    "dense": (COLORS[0], "-"),
    "0.25": (COLORS[2], "-"),
    "0.25-schedule": (COLORS[2], "--"),
    "0.5": (COLORS[1], "-"),
    "0.5-schedule": (COLORS[1], "--"),
    "0.5-kept": (COLORS[3], "-"),
    "0.5-kept-cooldown": (COLORS[3], "--"),
}


def report(results: Path, json_path: Path, figures: Path) -> str:
    """Write the JSON file and the figures; returns the table."""
    runs = read_runs(results)
    done = [runs[arm.name] for arm in ARMS if arm.name in runs and f"{arm.kind}-dense" in runs]
    rows = [describe(run, runs) for run in done]
    content = {
        "machine": json.loads((results / "machine.json").read_text()),
        "window_steps": WINDOW,
        "within": WITHIN,
        "base": {**runs["base"].facts, "validation_loss": runs["base"].final},
        "arms": rows,
    }
    write_json(json_path, content)
    figures.mkdir(parents=True, exist_ok=True)
    save_losses(runs, figures / "loss.png")
    save_spikes(runs, figures / "spike.png")
    save_schedules(runs, figures / "schedule.png")
    shown = {name: sorted((results / name).glob("picture-*.png")) for name in PICTURED if name in runs}
    save_pictures(shown, json.loads((results / "prompts.json").read_text()), figures / "pictures.png")
    return table(rows)


def describe(run: Run, runs: dict[str, Run]) -> dict[str, Any]:
    """Everything measured on an arm, against the dense one of its kind."""
    dense = runs[f"{run.kind}-dense"]
    per_step = step_seconds(other for other in runs.values() if other.kind == run.kind and other.name != "base")
    times, dense_times = run_seconds(run, per_step), run_seconds(dense, per_step)
    # the step that the dense run had come to when this one was done
    same_time = float(np.searchsorted(dense_times, times[-1] * (1 - 1e-9)) + 1)
    return {
        "name": run.name,
        **run.facts,
        "seconds": round(float(times[-1]), 2),
        "speed_up": round(float(dense_times[-1] / times[-1]), 3),
        "step_ms": {f"{share:.4g}": round(1000 * per_step[share], 2) for share in per_step if share in run.kept},
        "spike": None if not run.facts["ratio"] else asdict(spike_of(run, dense)),
        "validation_loss": run.final,
        "above_dense": run.final / dense.final - 1,
        "above_dense_at_equal_time": run.final / validation_at(dense, min(same_time, len(dense.loss))) - 1,
        "validation": {str(step): round(loss, 5) for step, loss in run.validation.items()},
    }


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The arms in Markdown."""
    lines = [
        f"| arm | seconds | speed-up | GiB | first {WINDOW} steps | peak (step) | lasting | settled after "
        f"| within {WITHIN:.0%} after | dense validation loss | against dense | at equal time |",
        f"|---|{'--:|' * 11}",
    ]
    for row in rows:
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        cells = [
            row["name"], f"{row['seconds']:.1f}", f"{row['speed_up']:.2f}", memory, *_spike_cells(row["spike"]),
            f"{row['validation_loss']:.4f}", f"{row['above_dense']:+.2%}", f"{row['above_dense_at_equal_time']:+.2%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spike_cells(spike: dict[str, Any] | None) -> list[str]:
    if spike is None:
        return [""] * 5
    ends = ["never" if spike[name] is None else f"{spike[name]} steps" for name in ("settled", "length")]
    return [
        f"{spike['height']:+.1%}",
        f"{spike['peak']:+.1%} ({spike['peak_step']})",
        f"{spike['lasting']:+.1%}",
        *ends,
    ]


def save_losses(runs: dict[str, Run], path: Path) -> None:
    """Training loss and dense validation loss over the steps, a column per kind."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for (kind, title), column in zip(KINDS.items(), axes.T, strict=True):
        for run, color, line in _shown(runs, kind):
            values = smoothed(run.loss)
            offset = len(run.loss) - len(values)
            column[0].plot(np.arange(len(values)) + 1 + offset, values, line, color=color, label=_label(run))
            column[1].plot(*_validation(run, runs["base"]), line, color=color)
        column[0].set(title=f"{title}: training loss, mean of the last {WINDOW} steps")
        column[1].set(title=f"{title}: dense validation loss", xlabel="steps")
    _finish(figure, axes, "mean squared error", path)


def save_spikes(runs: dict[str, Run], path: Path) -> None:
    """The excess of the routed training losses, a column per kind."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, squeeze=False, layout="constrained")
    for (kind, title), axis in zip(KINDS.items(), axes[0], strict=True):
        for run, color, line in _shown(runs, kind)[1:]:
            found = excess(run, runs[f"{kind}-dense"])
            offset = len(run.loss) - len(found)
            axis.plot(np.arange(len(found)) + 1 + offset, 100 * found, line, color=color, label=_label(run))
        axis.axhline(100 * WITHIN, color="black", linewidth=0.8, linestyle=":", label=f"{WITHIN:.0%}")
        axis.set(title=f"{title}: routed training loss above dense, mean of {WINDOW} steps", xlabel="steps")
        axis.title.set_fontsize(10)
    _finish(figure, axes, "excess, %", path)


def save_schedules(runs: dict[str, Run], path: Path) -> None:
    """What warm-up and cool-down do to the dense validation loss of a LoRA."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 1, figsize=(9.5, 4.2), squeeze=False, layout="constrained")
    for index, name in enumerate(name for name in SCHEDULES if f"lora-{name}" in runs):
        run = runs[f"lora-{name}"]
        steps, losses = _validation(run, runs["base"])
        axes[0, 0].plot(
            steps,
            losses,
            color=COLORS[(index - 1) % 4 + 1 if index else 0],
            linestyle=LINES[index],
            label=_label(run),
        )
    axes[0, 0].set(title="LoRA: dense validation loss by schedule", xlabel="steps")
    _finish(figure, axes, "mean squared error", path, beside=True)


def _shown(runs: dict[str, Run], kind: str) -> list[tuple[Run, str, str]]:
    """The main arms of a kind that are done, the dense one first, with their colours and lines."""
    return [(runs[f"{kind}-{name}"], *LOOKS[name]) for name in MAIN if f"{kind}-{name}" in runs]


def _validation(run: Run, base: Run) -> tuple[Sequence[int], Sequence[float]]:
    """Steps and losses; the base's own loss is that at step 0."""
    return [0, *run.validation], [base.final, *run.validation.values()]


def _label(run: Run) -> str:
    facts = run.facts
    if not facts["ratio"]:
        return "dense"
    start, end = facts["layers"]
    parts = [f"ratio {facts['ratio']:g} over {start}..{end}"]
    parts += [
        f"{name} {share:.0%}" for name, share in zip(("warm-up", "cool-down"), facts["schedule"], strict=True) if share
    ]
    parts += ["loss on kept tokens"] if facts.get("routed_loss") == "kept" else []
    return ", ".join(parts)


def _finish(figure: Any, axes: Any, unit: str, path: Path, *, beside: bool = False) -> None:
    """Grid, legend (within the axes, or `beside` them) and the file."""
    from matplotlib import pyplot

    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if beside else {}
            axis.legend(frameon=False, fontsize=8, **place)
    for axis in axes[:, 0]:
        axis.set_ylabel(unit)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
