"""The two pictures of README.md, quality against time and speed, each in a light and a dark version.

python -m benchmarks.front_page docs/front

- Every number in them is read from a file in benchmarks/results.
- `quality` plots the first 5,000 samples of each snapshot, because a Frechet distance falls as their number grows and
  only the snapshots at the end have more.
- `speed` draws the routed step as a share of the dense step of the same process, with a tick at what FLOPs allow.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.record import Facts

RESULTS = Path(__file__).parent / "results"
DISTANCE = "FD-EffLite0"
SECONDS = 430
"""Training time of the runs that the quality picture compares."""


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of one version; the backgrounds are GitHub's."""

    name: str
    background: str
    text: str
    muted: str
    grid: str
    dense: str
    routed: str


THEMES = (
    Theme(
        name="light", background="#ffffff", text="#1f2328", muted="#59636e", grid="#e4e8ec", dense="#8c959f",
        routed="#cf4a3c",
    ),
    Theme(
        name="dark", background="#0d1117", text="#e6edf3", muted="#9198a1", grid="#21262d", dense="#6e7681",
        routed="#f0765f",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row of the speed picture: its words, and the measurement that stands for it."""

    title: str
    details: str
    file: str
    job: str
    row: str
    name: str


WORKS = (
    Work(title="Wan 2.1 14B, LoRA", details="32,760 tokens, checkpointed",
         file="h200-8bit-wan.json", job="wan", row="wan-checkpointed", name="compiled"),
    Work(title="SD3.5-large, LoRA", details="4,096 tokens",
         file="h200-kernels.json", job="sd3", row="sd3", name="graphs"),
    Work(title="FLUX.1-dev, LoRA", details="4,096 tokens",
         file="h200-kernels.json", job="flux", row="flux", name="graphs"),
    Work(title="FLUX.1-dev, LoRA", details="4,096 tokens, checkpointed",
         file="h200-kernels.json", job="flux", row="flux-checkpointed", name="graphs"),
    Work(title="DiT-XL/2 from scratch", details="256 tokens, 256 images",
         file="h200-kernels.json", job="dit-xl", row="dit-xl", name="stream"),
    Work(title="DiT-B/2 from scratch", details="256 tokens, 256 images",
         file="h200-kernels.json", job="dit-b", row="dit-b", name="stream"),
)  # fmt: skip


def draw_quality(runs: dict[str, Facts], theme: Theme, path: Path) -> None:
    """Distance over seconds of training, dense and routed, with the routed run at dense's steps marked."""
    dense, routed = (runs[f"{arm}-s0-{SECONDS}s"] for arm in ("dense", "routed"))
    figure = _figure(theme, 8.4, 4.5)
    axes = figure.add_axes((0.075, 0.13, 0.755, 0.66))
    figure.text(0.075, 0.925, "Better images in the same training time", color=theme.text, fontsize=14, weight="bold")
    figure.text(
        0.075, 0.862,
        "DiT-S/2 on CIFAR-10 from scratch, one H200, one seed. FD-EffLite0 of 5,000 samples, lower is better.",
        color=theme.muted, fontsize=9.5,
    )  # fmt: skip
    lines = {}
    for run, color in ((dense, theme.dense), (routed, theme.routed)):
        lines[color] = points = sorted((look["seconds"], _distance(look), look["at"]) for look in run["snapshots"])
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=color, linewidth=2.4, zorder=3,
                  clip_on=False)  # fmt: skip
        marks = [(x, y) for x, y, at in points if at != "equal-steps"]
        axes.scatter(*zip(*marks, strict=True), color=color, s=34, zorder=4, clip_on=False)
    axes.set(xscale="log", yscale="log", xlim=(27, SECONDS), ylim=(12.6, 74))
    axes.set_xticks([30, 60, 90, 215, SECONDS], ["30", "60", "90", "215", f"{SECONDS}"], minor=False)
    axes.set_yticks([15, 20, 30, 40, 60], ["15", "20", "30", "40", "60"], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("seconds of training", color=theme.muted, fontsize=9.5)
    _clean(axes, theme, grid="both")

    def note(words: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
        box = {"facecolor": theme.background, "edgecolor": "none", "pad": 1.5}
        axes.annotate(words, at, offset, textcoords="offset points", va="center", annotation_clip=False, bbox=box,
                      zorder=2, **style)  # fmt: skip

    for run, color, name in ((dense, theme.dense, "dense"), (routed, theme.routed, "routed")):
        end = SECONDS, _distance(run["snapshots"][-1])
        up = 6 if run is dense else -3  # two lines each, apart from the other run's
        note(f"{name}  {end[1]:.1f}", end, (12, up), color=_ink(color, theme), fontsize=12, weight="bold")
        note(f"{run['steps']:,} steps", end, (12, up - 13), color=theme.muted, fontsize=9)
    equal = next(look for look in routed["snapshots"] if look["at"] == "equal-steps")
    at = equal["seconds"], _distance(equal)
    axes.scatter(*at, facecolor=theme.background, edgecolor=theme.routed, s=48, linewidth=2, zorder=5)
    note(f"after dense's {equal['steps']:,} steps: {at[1]:.1f}", at, (-10, -14), color=theme.muted, fontsize=9.5,
         ha="right")  # fmt: skip
    goal = _distance(dense["snapshots"][-1])
    sooner = seconds_to(goal, [(x, y) for x, y, _ in lines[theme.routed]])
    axes.plot([sooner, SECONDS], [goal, goal], color=theme.muted, linewidth=1.1, linestyle=(0, (2, 2)), zorder=2)
    note(f"dense's last distance, {SECONDS / sooner:.1f}× sooner", (sooner, goal), (-10, -1), color=theme.muted,
         fontsize=9.5, ha="right")  # fmt: skip
    _save(figure, path)


def seconds_to(goal: float, points: Sequence[tuple[float, float]]) -> float:
    """When a falling curve reaches `goal`, between its points by a power law.

    >>> seconds_to(5, [(1, 10), (4, 2.5)])
    2.0
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= goal >= y1:
            return round(exp(log(x0) + (log(x1) - log(x0)) * log(y0 / goal) / log(y0 / y1)), 6)
    raise ValueError(f"the curve does not reach {goal}")


def draw_speed(theme: Theme, path: Path) -> None:
    """Time of a routed step as a share of the dense step, with a tick at what FLOPs allow."""
    figure = _figure(theme, 8.4, 4.7)
    axes = figure.add_axes((0.245, 0.085, 0.535, 0.705))
    figure.text(0.03, 0.93, "Routed steps are 1.4 to 2.5 times as fast", color=theme.text, fontsize=14, weight="bold")
    figure.text(
        0.03, 0.868, "Time of one full training step. Half of the image tokens skip most of the layers. One H200.",
        color=theme.muted, fontsize=9.5,
    )  # fmt: skip
    for place, work in enumerate(WORKS):
        one = measurement(work)
        share, ideal = one["routed"]["median_ms"] / one["dense"]["median_ms"], 1 / one["ideal"]
        axes.barh(place - 0.19, 1, height=0.34, color=theme.dense, zorder=3)
        axes.barh(place + 0.19, share, height=0.34, color=theme.routed, zorder=3)
        axes.plot([ideal, ideal], [place - 0.01, place + 0.41], color=theme.text, linewidth=1.8, zorder=5)
        inside = {"va": "center", "ha": "right", "fontsize": 9, "color": theme.background, "weight": "bold"}
        axes.text(0.99, place - 0.185, _time(one["dense"]["median_ms"]), zorder=6, **inside)
        axes.text(min(share, ideal) - 0.012, place + 0.195, _time(one["routed"]["median_ms"]), zorder=6, **inside)
        axes.text(-0.02, place - 0.17, work.title, color=theme.text, fontsize=10.5, ha="right", va="center")
        axes.text(-0.02, place + 0.2, work.details, color=theme.muted, fontsize=8.5, ha="right", va="center")
        axes.text(1.035, place, f"{1 / share:.2f}×", color=_ink(theme.routed, theme), fontsize=14, weight="bold",
                  va="center")  # fmt: skip
        axes.text(1.212, place + 0.02, f"of {one['ideal']:.2f}×", color=theme.muted, fontsize=10, va="center")
    axes.set(xlim=(0, 1), ylim=(len(WORKS) - 0.4, -0.6), yticks=[])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "dense"])
    _clean(axes, theme, grid="x")
    height = 1.035
    for x, color, words in ((0.0, theme.dense, "dense"), (0.15, theme.routed, "routed")):
        axes.plot([x], [height], marker="s", markersize=8, color=color, transform=axes.transAxes, clip_on=False)
        axes.text(x + 0.022, height, words, transform=axes.transAxes, color=theme.text, fontsize=9.5, va="center")
    axes.plot([0.325], [height], marker="|", markersize=11, markeredgewidth=1.8, color=theme.text,
              transform=axes.transAxes, clip_on=False)  # fmt: skip
    axes.text(0.345, height, "what FLOPs allow", transform=axes.transAxes, color=theme.text, fontsize=9.5, va="center")
    _save(figure, path)


def measurement(work: Work) -> Facts:
    """The measurement behind a row."""
    jobs = json.loads((RESULTS / work.file).read_text(encoding="utf-8"))["jobs"]
    found = [
        one
        for job in jobs
        if job["job"] == work.job
        for one in job["measurements"]
        if one.get("row") == work.row and one.get("name") == work.name
    ]
    (one,) = found
    return one


def _distance(look: Facts) -> float:
    return look["samples"]["unguided"][f"{DISTANCE} few"]


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"


def _ink(color: str, theme: Theme) -> str:
    """A colour for words: grey is too pale for them."""
    return theme.muted if color == theme.dense else color


def _figure(theme: Theme, width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=200, facecolor=theme.background)


def _clean(axes: Any, theme: Theme, *, grid: str) -> None:
    axes.set_facecolor(theme.background)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, colors=theme.muted, labelsize=9.5)
    axes.grid(axis=grid, color=theme.grid, linewidth=1)
    axes.set_axisbelow(True)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor=figure.get_facecolor(), metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the four files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    runs = json.loads((RESULTS / f"quality-{SECONDS}s.json").read_text(encoding="utf-8"))["runs"]
    for theme in THEMES:
        draw_quality(runs, theme, folder / f"quality-{theme.name}.png")
        draw_speed(theme, folder / f"speed-{theme.name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
