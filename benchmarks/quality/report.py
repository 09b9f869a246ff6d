"""The tables and figures of docs/results.md and of the short runs in docs/log.md, from the results that are kept.

- Runs of LONG seconds and more are the page's; shorter ones chose wrongly and stand in the log.
- Frechet distances, precision and recall move with the number of samples, so only figures of equal counts stand in one
  column: those of all samples, or of the first few. Where older results drew no more than those, or have no distance to
  the test images, a cell is empty.
- What is in the table of arms and was not run long is listed as such.
- Sample grids are not kept: without them the pictures of samples stay as they are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.common.record import Facts
from pages.tables import markdown_table, with_tables

from .arms import ARMS, GUIDES
from .pictures import save_curves, save_grids, save_heat_map, save_nearest, save_speedups, save_studies
from .results import NEAREST, Results, distance_name, kernel_name, known_arms, longest, read_grids, snapshot
from .speedup import pairs, speedup_table
from .studies import NOTHING, STUDIES, describe, guidance_table, placements, studies_text, study_rows

LONG = 400
"""Seconds of training."""
ENDS = (
    ("dense", "end", "dense"),
    ("routed", "equal-steps", "routed, equal steps"),
    ("routed", "end", "routed, equal wall-clock"),
    ("dense", "annealed", "dense, annealed"),
    ("routed", "annealed", "routed, annealed"),
)
"""Arm, look and words of what the headline compares."""


def report(paths: Sequence[Path], docs: Path, grids_at: Sequence[Path] = ()) -> None:
    """Write the tables and figures of `docs`/results.md and `docs`/log.md."""
    results = Results(docs / "none", paths)
    grids = {name: images for path in grids_at for name, images in read_grids(path).items()}
    long, short = (results.only(lambda entry, long=long: (entry["seconds"] >= LONG) == long) for long in (True, False))
    distance = distance_name(results)
    figures = docs / "results"
    figures.mkdir(parents=True, exist_ok=True)
    rewrite(
        docs / "results.md",
        {
            "setup": setup_text(results),
            "headline": headline_table(long, distance),
            "marks": marks_table(long, distance),
            "speed-up": speedup_text(long, figures),
            "speed": speed_table(long),
            "missing": missing_text(long),
            "curves": curves(long, distance, figures),
            "samples": pictures_of_samples(grids, figures),
        },
    )
    rewrite(
        docs / "log.md",
        {
            "short runs": headline_table(short, distance),
            "short speed": speed_table(short),
            "guidance": guidance_table(short, distance),
            "studies": studies_text(short, distance),
            "short figures": short_figures(short, distance, figures),
        },
    )


def rewrite(page: Path, tables: Mapping[str, str]) -> None:
    """Write the tables of a page anew."""
    page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def curves(long: Results, distance: str, folder: Path) -> str:
    """Draw the headline's runs."""
    if not pairs(long):
        return NOTHING
    save_curves(long, distance, folder / "quality.png")
    return pictures(folder, ("quality.png", "quality against training time and steps, two arms, each seed a line"))


def speedup_text(long: Results, folder: Path) -> str:
    """The table of the speed-up to quality, and its figure."""
    every = pairs(long)
    if not every:
        return NOTHING
    routed, dense = (mean(entry["steps_per_second"] for entry in long.done_of(arm)) for arm in ("routed", "dense"))
    save_speedups(every, routed / dense, folder / "speedup.png")
    words = "speed-up to quality over the seconds of dense training, each seed a line"
    return f"{pictures(folder, ('speedup.png', words))}\n\n{speedup_table(long)}"


def pictures_of_samples(grids: Mapping[str, np.ndarray], folder: Path) -> str:
    """Draw the samples of the longest pair in `grids`, and the nearest training images; without them, show the last."""
    ends = [name for name in grids if name.startswith("dense-") and name.endswith("s-end")]
    runs = [name.removeprefix("dense").removesuffix("-end") for name in ends]  # such as -s2-430s
    for run in sorted(runs, key=lambda run: float(run.rpartition("-")[2].removesuffix("s"))):
        shown = {f"{arm}{run}-{at}": words for arm, at, words in ENDS if at != "annealed"}
        if all(name in grids for name in shown):
            save_grids([grids[name] for name in shown], list(shown.values()), folder / "samples.png")
        ends = {name: words for name, words in shown.items() if name.endswith("-end") and f"{name}{NEAREST}" in grids}
        if len(ends) > 1:
            both = [(grids[name], grids[f"{name}{NEAREST}"]) for name in ends]
            save_nearest(both, list(ends.values()), folder / "nearest.png")
    words = {
        "samples.png": "unguided samples from the same noise, a row for each class",
        "nearest.png": "samples, each with the nearest training image to its right",
    }
    return pictures(folder, *((name, text) for name, text in words.items() if (folder / name).is_file())) or NOTHING


def short_figures(short: Results, distance: str, folder: Path) -> str:
    """Draw the studies and the map of windows."""
    shown = []
    if save_studies(short, study_rows(short), distance, folder / "studies.png"):
        shown.append(("studies.png", "distance of each study's arms, each seed a point"))
    if save_heat_map(short, placements(short, distance), distance, folder / "placement.png"):
        shown.append(("placement.png", "distance by first and last layer of the window, the mean of its seeds"))
    return pictures(folder, *shown) or NOTHING


def pictures(folder: Path, *shown: tuple[str, str]) -> str:
    """Pictures in Markdown, with their words."""
    return "\n\n".join(f"![{words}]({folder.name}/{name})" for name, words in shown)


def setup_text(results: Results) -> str:
    """The machine and the data."""
    machine, data = results.facts["machine"], results.facts["data"]
    if machine is None or data is None:
        return NOTHING
    scale, name = machine["scale"], distance_name(results)
    return (
        f"{machine['device']}, torch {machine['torch']}, {data['train_images']:,} training images; "
        f"batch {scale['batch']}, learning rate {scale['learning_rate']:g} after {scale['warmup_steps']} steps, "
        f"{scale['solver_steps']} Euler steps. For comparison: {data['test']['count']:,} real test images have "
        f"{name} {data['test'][name]:.2f} to the training images."
    )


def headline_table(results: Results, distance: str) -> str:
    """Dense, routed at equal steps and at equal wall-clock, and other windows, by length and seed, and their means."""
    rows = []
    windows = [(arm.name, "end", describe(arm)) for arm in known_arms(results) if arm.study == "windows"]
    lengths = {entry["seconds"] for arm in ("dense", "routed") for entry in results.done_of(arm)}
    for length in sorted(lengths, reverse=True):
        means = []
        for arm, at, words in (*ENDS, *windows):
            entries = sorted(results.done_of(arm), key=lambda entry: entry["seed"])
            looks = [(entry["seed"], snapshot(entry, at)) for entry in entries if entry["seconds"] == length]
            available = [(seed, look) for seed, look in looks if look is not None]
            rows += [headline_row(words, str(seed), look, distance) for seed, look in available]
            if len(available) > 1:
                means.append(headline_row(words, "mean", averaged([look for _, look in available]), distance))
        rows += means
    head = (
        "arm", "seed", "steps", "seconds", distance, "first few", "to test images", "KD x 1000", "KD to test x 1000",
        "cfg, first few", "precision", "recall", "dense validation loss",
    )  # fmt: skip
    return markdown_table(head, rows) if rows else NOTHING


def headline_row(words: str, seed: str, found: Facts, distance: str) -> tuple[str, ...]:
    """One line of the headline's table."""
    figures, kernel, few = found["samples"]["unguided"], kernel_name(distance), f"{distance} few"
    guided = found["samples"].get("cfg", {})

    def cell(name: str, times: float = 1.0, digits: int = 2, of: Facts = figures) -> str:
        return f"{times * of[name]:.{digits}f}" if name in of else ""

    return (
        words, seed, f"{found['steps']:,.0f}", f"{found['seconds']:.1f}", cell(distance), cell(few),
        cell(f"{distance} test"), cell(kernel, 1000), cell(f"{kernel} test", 1000), cell(few, of=guided),
        cell("precision", digits=3), cell("recall", digits=3), f"{found['val_loss']:.4f}",
    )  # fmt: skip


def averaged(found: Sequence[Facts]) -> Facts:
    """The mean of several looks, of the figures that all of them have."""
    ways = [way for way in found[0]["samples"] if all(way in look["samples"] for look in found)]
    samples = {}
    for way in ways:
        figures = [look["samples"][way] for look in found]
        shared = [name for name in figures[0] if all(name in one for one in figures)]
        samples[way] = {name: mean(one[name] for one in figures) for name in shared}
    return {name: mean(look[name] for look in found) for name in ("steps", "seconds", "val_loss")} | {
        "samples": samples
    }


def marks_table(results: Results, distance: str) -> str:
    """The distance of the first few samples after each mark, a line for each run."""
    runs = [
        (arm, entry)
        for arm in known_arms(results)
        for entry in sorted(results.done_of(arm.name), key=lambda entry: (entry["seconds"], entry["seed"]))
    ]
    marks = sorted({look["due"] for _, entry in runs for look in entry["snapshots"] if look["due"] is not None})
    rows = []
    for arm, entry in runs:
        distances = {look["due"]: look["samples"]["unguided"][f"{distance} few"] for look in entry["snapshots"]}
        cells = [f"{distances[mark]:.2f}" if mark in distances else "" for mark in marks]
        rows.append((describe(arm), str(entry["seed"]), f"{entry['seconds']:g} s", *cells))
    head = ("arm", "seed", "run of", *(f"{mark:g} s" for mark in marks))
    return markdown_table(head, rows) if rows else NOTHING


def speed_table(results: Results) -> str:
    """Steps, images and memory of every arm that was run."""
    rows = []
    for arm in known_arms(results):
        if arm.study == "rate":  # as fast as the headline's
            continue
        for entry in longest(results, arm.name)[:1]:
            dense = dense_beside(results, "b2-dense" if arm.size == "B" else "dense", entry)
            ratio = entry["steps_per_second"] / dense["steps_per_second"] if dense else None
            rows.append((
                describe(arm), f"{entry['steps_per_second']:.1f}", f"{entry['images_per_second']:,.0f}",
                "" if ratio is None else f"{ratio:.2f}", f"{entry['ideal_speedup']:.2f}", f"{entry['peak_gib']:.1f}",
            ))  # fmt: skip
    head = ("arm", "steps/s", "images/s", "against dense", "FLOPs allow", "GiB")
    return markdown_table(head, rows) if rows else NOTHING


def dense_beside(results: Results, dense: str, entry: Facts) -> Facts | None:
    """The dense run whose speed a run's is compared with: of the same GPU, seed and length, as far as there is one."""

    def alike(other: Facts) -> list[bool]:
        return [other.get(name) == entry.get(name) for name in ("gpu", "seed", "seconds")]

    return max(results.done_of(dense), key=alike, default=None)


def missing_text(results: Results) -> str:
    """What was not run, of long runs."""
    arms = {
        title: [describe(arm) for arm in ARMS if arm.study == study and not longest(results, arm.name)]
        for study, title in {"headline": "Headline", **STUDIES}.items()
    }
    ways = {way for entry in longest(results, "routed") for look in entry["snapshots"] for way in look["samples"]}
    guides = [guide.name for guide in GUIDES if guide.name not in ways]
    lines = [f"- {title}: {'; '.join(found)}." for title, found in arms.items() if found]
    lines += [f"- Guidance: {', '.join(guides)}."] if guides else []
    pairs_of = {
        "of 20 minutes": lambda entry: entry["seconds"] >= 1200,
        "annealed to zero": lambda entry: "annealed" in entry,
    }
    lines += [
        f"- A pair {words}."
        for words, is_one in pairs_of.items()
        if not all(any(map(is_one, results.done_of(arm))) for arm in ("dense", "routed"))
    ]
    lines += [
        f"- {name} failed: {entry['error'].splitlines()[0]}"
        for name, entry in results.runs.items()
        if entry["status"] == "failed"
    ]
    return "\n".join(lines) or "Everything was run."
