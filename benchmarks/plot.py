"""Draws the curve: measured speed-up against token count, beside the ideal.

python -m benchmarks.plot benchmarks/results/h200-graphs.json docs/performance/curve.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {"0.25": "#4c78a8", "0.5": "#e45756", "0.75": "#54a24b"}


def draw(facts: dict[str, Any], path: Path) -> None:
    """The measurements of `benchmarks.curve`, alone or among those of other jobs, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    measured = [one for job in facts.get("jobs", [facts]) for one in job.get("measurements", ())]
    found = [one for one in measured if one.get("row") == "curve" and one["status"] == "ok"]
    found.sort(key=lambda one: one["shapes"]["tokens"])
    if not found:
        raise ValueError("there is no point to draw: every measurement of the curve failed or was skipped")
    shapes = found[0]["shapes"]
    tokens = [one["shapes"]["tokens"] for one in found]
    figure, axes = plt.subplots(figsize=(7.5, 4.8), dpi=150)
    for ratio, colour in COLOURS.items():
        points = [one["points"][ratio] for one in found]
        axes.plot(tokens, [point["ideal"] for point in points], "--", color=colour, alpha=0.6, linewidth=1.3)
        label = f"{float(ratio):.0%} of tokens dropped"
        axes.plot(tokens, [point["speedup"] for point in points], "o-", color=colour, markersize=4, label=label)
    axes.plot([], [], "--", color="grey", label="what FLOPs allow")
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens], rotation=30)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("tokens per sample")
    axes.set_ylabel("speed-up over dense")
    machine = facts["machine"]
    axes.set_title(
        f"Routed against dense steps, {machine['device']}, torch {machine['torch']}\n"
        f"{shapes['depth']} DiT layers of width {shapes['width']}, {shapes['depth'] - 2} of them routed, "
        f"{shapes['total']:,} tokens per step",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """From a file of results to a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    given = parser.parse_args(arguments)
    draw(json.loads(given.results.read_text()), given.figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
