"""The two pictures of README.md, quality against time and speed, each in a light and a dark version.

python -m benchmarks.front_page docs/front

- Every number in them is read from a file in benchmarks/results.
- `quality` plots every seed, and only looks of all samples, because a Frechet distance falls as their number grows: of
  seed 0 those are the last ones.
- `speed` draws the routed step as a share of the dense step of the same process, with a tick at what FLOPs allow.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common.record import Facts
from benchmarks.quality.results import Results
from benchmarks.quality.speedup import pairs

RESULTS = Path(__file__).parent / "results"
DISTANCE = "FD-EffLite0"
SECONDS = 430
"""Training time of the runs that the quality picture compares."""
MEASURE = "Frechet, to training images"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


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


def draw_quality(results: Results, theme: Theme, path: Path) -> None:
    """Distance over seconds of training, a thin line for each seed, with the routed runs at dense's steps marked."""
    figure = _figure(theme, 8.4, 4.5)
    axes = figure.add_axes((0.075, 0.13, 0.755, 0.66))
    every = [entry for arm in ("dense", "routed") for entry in results.done_of(arm) if entry["seconds"] == SECONDS]
    seeds, samples = sorted({entry["seed"] for entry in every}), results.facts["machine"]["scale"]["samples"]
    figure.text(0.075, 0.925, "Better images in the same training time", color=theme.text, fontsize=14, weight="bold")
    figure.text(
        0.075, 0.862,
        f"DiT-S/2 on CIFAR-10 from scratch, one H200, {NUMBERS[len(seeds)]} seeds. FD-EffLite0 of {samples:,} samples, "
        "lower is better.",
        color=theme.muted, fontsize=9.5,
    )  # fmt: skip
    colors = {"dense": theme.dense, "routed": theme.routed}
    ends: dict[str, list[Facts]] = {arm: [] for arm in colors}
    equal: list[Facts] = []
    for entry in every:
        arm = entry["arm"]["name"]
        looks = sorted((look for look in entry["snapshots"] if _count(look) == samples), key=_seconds)
        points = [(look["seconds"], _distance(look)) for look in looks]
        axes.plot(*zip(*points, strict=True), color=colors[arm], linewidth=1.4, zorder=3, clip_on=False)
        on_line = [point for point, look in zip(points, looks, strict=True) if look["at"] != "equal-steps"]
        axes.scatter(*zip(*on_line, strict=True), color=colors[arm], s=17, zorder=4, clip_on=False)
        ends[arm].append(looks[-1])
        equal += [look for look in looks if look["at"] == "equal-steps"]
    axes.set(xscale="log", yscale="log", xlim=(84, SECONDS), ylim=(11.2, 41.5))
    axes.set_xticks([90, 150, 215, 300, SECONDS], ["90", "150", "215", "300", f"{SECONDS}"], minor=False)
    axes.set_yticks([12, 15, 20, 25, 30, 40], ["12", "15", "20", "25", "30", "40"], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("seconds of training", color=theme.muted, fontsize=9.5)
    _clean(axes, theme, grid="both")

    def note(words: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
        box = {"facecolor": theme.background, "edgecolor": "none", "pad": 1.5}
        axes.annotate(words, at, offset, textcoords="offset points", va="center", annotation_clip=False, bbox=box,
                      zorder=2, **style)  # fmt: skip

    goal = mean(_distance(look) for look in ends["dense"])
    for arm, looks in ends.items():
        end = SECONDS, mean(_distance(look) for look in looks)
        steps = mean(look["steps"] for look in looks)
        note(f"{arm}  {end[1]:.1f}", end, (12, 6), color=_ink(colors[arm], theme), fontsize=12, weight="bold")
        note(f"{steps:,.0f} steps", end, (12, -7), color=theme.muted, fontsize=9)
    for look in equal:
        axes.scatter(look["seconds"], _distance(look), facecolor=theme.background, edgecolor=theme.routed, s=34,
                     linewidth=1.4, zorder=5)  # fmt: skip
    at = mean(map(_seconds, equal)), mean(map(_distance, equal))
    note(f"at dense's number of steps: {at[1]:.1f}", at, (-10, -14), color=theme.muted, fontsize=9.5, ha="right")
    sooner = sorted(pair.at_looks()[SECONDS] for pair in pairs(results) if pair.measure == MEASURE)
    start = SECONDS / mean(sooner)
    axes.plot([start, SECONDS], [goal, goal], color=theme.muted, linewidth=1.1, linestyle=(0, (2, 2)), zorder=2)
    words = f"dense's final distance, {sooner[0]:.2f} to {sooner[-1]:.2f}× sooner"
    note(words, (start, goal), (-10, -1), color=theme.muted, fontsize=9.5, ha="right")
    _save(figure, path)


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
    return look["samples"]["unguided"][DISTANCE]


def _count(look: Facts) -> int:
    return look["samples"]["unguided"]["count"]


def _seconds(look: Facts) -> float:
    return look["seconds"]


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
    results = Results(folder / "none", sorted(RESULTS.glob(f"quality-{SECONDS}s*.json")))
    for theme in THEMES:
        draw_quality(results, theme, folder / f"quality-{theme.name}.png")
        draw_speed(theme, folder / f"speed-{theme.name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
