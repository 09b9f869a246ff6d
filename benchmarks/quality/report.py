"""The tables of docs/results.md, from the results of one or more calls.

- Frechet distances, precision and recall move with the number of samples, so only figures of equal counts stand in one
  column: the headline's and the rates' are of all samples, those of guidance, other studies and curves of the first
  few. Where older results drew no more than those, or have no distance to the test images, a cell is empty.
- A study's arms are compared with what the headline's arms were after the same seconds of training.
- What is in the table of arms and not in the results is listed as not run.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.record import Facts, write_json
from pages.tables import markdown_table, with_tables

from .arms import ARMS, BY_NAME, GUIDES, UNGUIDED, Arm
from .pictures import save_curves, save_grids, save_heat_map, save_studies
from .results import GRIDS, Results, at_seconds, read_grids, snapshot

NOTHING = "Not run yet."
STUDIES = {
    "rate": "Learning rate",
    "ratio": "Ratio",
    "selector": "Selector",
    "cool-down": "Dense cool-down",
    "placement": "Placement",
    "size": "B/2",
}
HEADLINE_SEEDS = (0, 1)


def report(paths: Sequence[Path], docs: Path, json_path: Path) -> None:
    """Write the page's tables and figures, and the joined results."""
    results = Results(json_path.parent / "none", paths)
    grids = {
        name: images
        for path in paths
        if (path.parent / GRIDS).is_file()
        for name, images in read_grids(path.parent / GRIDS).items()
    }
    write_json(json_path, results.facts)
    figures = docs.with_suffix("")
    figures.mkdir(parents=True, exist_ok=True)
    distance = distance_name(results)
    tables = {
        "setup": setup_text(results),
        "headline": headline_table(results, distance),
        "speed": speed_table(results),
        "guidance": guidance_table(results, distance),
        "studies": studies_text(results, distance),
        "missing": missing_text(results),
        "figures": "",
    }
    shown = []
    if results.done_of("dense") and results.done_of("routed"):
        save_curves(results, distance, figures / "quality.png")
        shown.append(("quality.png", "quality against training time and steps, two arms, each seed a line"))
        seconds = max(entry["seconds"] for entry in results.done_of("dense"))
        names = [f"dense-s0-{seconds:g}s-end", f"routed-s0-{seconds:g}s-equal-steps", f"routed-s0-{seconds:g}s-end"]
        if all(name in grids for name in names):
            titles = ("dense", "routed, equal steps", "routed, equal wall-clock")
            save_grids([grids[name] for name in names], titles, figures / "samples.png")
            shown.append(("samples.png", "unguided samples from the same noise, a row for each class, seed 0"))
    if save_studies(results, study_rows(results), distance, figures / "studies.png"):
        shown.append(("studies.png", "distance of each study's arms, each seed a point"))
    if save_heat_map(results, placements(results, distance), distance, figures / "placement.png"):
        shown.append(("placement.png", "distance by first and last layer of the window, the mean of its seeds"))
    tables["figures"] = "\n\n".join(f"![{words}]({figures.name}/{name})" for name, words in shown) or NOTHING
    docs.write_text(with_tables(docs.read_text(encoding="utf-8"), tables), encoding="utf-8")


def distance_name(results: Results) -> str:
    """Of the Frechet distance that was taken."""
    data = results.facts["data"]
    return "FD-EffLite0" if data is None else next(name for name in data["test"] if name.startswith("FD-"))


def kernel_name(distance: str) -> str:
    """The kernel distance on the features of a Frechet distance."""
    return f"KD-{distance.removeprefix('FD-')}"


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
    """Dense, routed at equal steps and routed at equal wall-clock, by seed, and their means."""
    rows, groups = [], {}
    for arm, at, words in (
        ("dense", "end", "dense"),
        ("routed", "equal-steps", "routed, equal steps"),
        ("routed", "end", "routed, equal wall-clock"),
    ):
        for entry in longest(results, arm):
            found = snapshot(entry, at)
            if found is None:
                continue
            rows.append(headline_row(words, str(entry["seed"]), found, distance))
            groups.setdefault(words, []).append(found)
    for words, found in groups.items():
        if len(found) > 1:
            rows.append(headline_row(words, "mean", averaged(found), distance))
    head = (
        "arm",
        "seed",
        "steps",
        "seconds",
        distance,
        "first few",
        "KD x 1000",
        "precision",
        "recall",
        "dense validation loss",
    )
    return markdown_table(head, rows) if rows else NOTHING


def headline_row(words: str, seed: str, found: Facts, distance: str) -> tuple[str, ...]:
    """One line of the headline's table."""
    figures = found["samples"]["unguided"]
    kernel = figures[kernel_name(distance)]
    return (
        words, seed, f"{found['steps']:,.0f}", f"{found['seconds']:.1f}", f"{figures[distance]:.2f}",
        f"{figures[f'{distance} few']:.2f}", f"{1000 * kernel:.2f}", f"{figures['precision']:.3f}",
        f"{figures['recall']:.3f}", f"{found['val_loss']:.4f}",
    )  # fmt: skip


def averaged(found: Sequence[Facts]) -> Facts:
    """The mean of several snapshots."""
    unguided = [one["samples"]["unguided"] for one in found]
    shared = [name for name in unguided[0] if all(name in figures for figures in unguided)]  # older ones have less
    figures = {name: mean(one[name] for one in unguided) for name in shared}
    return {name: mean(one[name] for one in found) for name in ("steps", "seconds", "val_loss")} | {
        "samples": {"unguided": figures}
    }


def longest(results: Results, arm: str) -> list[Facts]:
    """The longest finished runs of an arm, by seed."""
    found = results.done_of(arm)
    most = max((entry["seconds"] for entry in found), default=0)
    return sorted((entry for entry in found if entry["seconds"] == most), key=lambda entry: entry["seed"])


def speed_table(results: Results) -> str:
    """Steps, images and memory of every arm that was run."""
    rows = []
    for arm in ARMS:
        if arm.study == "rate":  # as fast as the headline's
            continue
        dense = longest(results, "b2-dense" if arm.size == "B" else "dense")
        for entry in longest(results, arm.name)[:1]:
            ratio = entry["steps_per_second"] / dense[0]["steps_per_second"] if dense else None
            rows.append((
                describe(arm), f"{entry['steps_per_second']:.1f}", f"{entry['images_per_second']:,.0f}",
                "" if ratio is None else f"{ratio:.2f}", f"{entry['ideal_speedup']:.2f}", f"{entry['peak_gib']:.1f}",
            ))  # fmt: skip
    head = ("arm", "steps/s", "images/s", "against dense", "FLOPs allow", "GiB")
    return markdown_table(head, rows) if rows else NOTHING


def guidance_table(results: Results, distance: str) -> str:
    """The headline's arms under each guidance, seed 0, first few samples."""
    rows = []
    for arm in ("dense", "routed"):
        for entry in longest(results, arm)[:1]:
            found = snapshot(entry, "end")
            assert found is not None
            for guide in (UNGUIDED, *GUIDES):
                if (figures := found["samples"].get(guide.name)) is None:
                    continue
                scale = "" if guide.scale == 1 else f"{guide.scale:g}"
                weak = "" if guide.weak_ratio is None else f"{guide.weak_ratio:g}"
                rows.append((
                    arm, guide.name, scale, weak, f"{figures[f'{distance} few']:.2f}",
                    f"{figures['precision few']:.3f}", f"{figures['recall few']:.3f}",
                    f"{figures['gflops_per_sample']:,.0f}",
                ))  # fmt: skip
    head = (
        "arm",
        "guidance",
        "scale",
        "weak ratio",
        f"{distance}, first few",
        "precision, first few",
        "recall, first few",
        "GFLOPs a sample",
    )
    return markdown_table(head, rows) if rows else NOTHING


def study_rows(results: Results) -> dict[str, list[Facts]]:
    """By study: what was measured of each arm after its seconds, and of dense and routed after the same."""
    found: dict[str, list[Facts]] = {}
    for study in STUDIES:
        for arm in ARMS:
            for entry in results.done_of(arm.name) if arm.study == study else ():
                rows = found.setdefault(study, [])
                if not any(row["due"] == entry["seconds"] for row in rows) and study != "size":
                    rows += [
                        row for name in ("dense", "routed") for row in headline_at(results, name, entry["seconds"])
                    ]
                if end := snapshot(entry, "end"):
                    rows.append(study_row(end, arm, entry))
    return {study: sorted(rows, key=by_setting) for study, rows in found.items()}


def by_setting(row: Facts) -> tuple[float | int, ...]:
    """The order of a study's lines: dense first, then by what the study varies."""
    arm = row["arm"]
    return (arm.is_routed, *arm.layers, arm.ratio, arm.importance or 0, arm.cooldown, row["rate"], row["seed"])


def headline_at(results: Results, name: str, seconds: float) -> list[Facts]:
    """What a headline arm was after so many seconds, by seed."""
    return [
        study_row(found, BY_NAME[name], entry)
        for entry in results.done_of(name)
        if (found := at_seconds(entry, seconds))
    ]


def study_row(found: Facts, arm: Arm, entry: Facts) -> Facts:
    """What was seen of a run, with what its line in a table says of the run."""
    return found | {
        "arm": arm,
        "label": describe(arm),
        "rate": entry["settings"]["optimizer"]["learning_rate"],
        "seed": entry["seed"],
        "speed": entry["steps_per_second"],
    }


def studies_text(results: Results, distance: str) -> str:
    """A table for each study that has begun."""
    parts = []
    for study, rows in study_rows(results).items():
        if study == "rate":
            parts.append(f"### {STUDIES[study]}\n\n{rate_table(results, rows, distance)}")
            continue
        lines = [
            (
                row["label"], str(row["seed"]), f"{row['seconds']:.1f}", f"{row['steps']:,}",
                f"{row['speed']:.1f}", f"{row['samples']['unguided'][f'{distance} few']:.2f}", f"{row['val_loss']:.4f}",
            )
            for row in rows
        ]  # fmt: skip
        head = ("arm", "seed", "seconds", "steps", "steps/s", f"{distance}, first few", "dense validation loss")
        parts.append(f"### {STUDIES[study]}\n\n{markdown_table(head, lines)}")
    return "\n\n".join(parts) or NOTHING


def rate_table(results: Results, rows: Sequence[Facts], distance: str) -> str:
    """The rates of both arms: distances to training and test images, of all samples, unguided and with `cfg`."""
    samples, kernel = results.facts["machine"]["scale"]["samples"], kernel_name(distance)

    def cell(row: Facts, guide: str, name: str, times: float = 1.0) -> str:
        figures = row["samples"].get(guide, {"count": 0})
        return f"{times * figures[name]:.2f}" if figures["count"] == samples and name in figures else ""

    lines = [
        (
            "routed" if row["arm"].is_routed else "dense", f"{row['rate']:g}", str(row["seed"]),
            f"{row['seconds']:.1f}", f"{row['steps']:,}", f"{row['samples']['unguided'][f'{distance} few']:.2f}",
            cell(row, "unguided", distance), cell(row, "unguided", f"{distance} test"),
            cell(row, "unguided", kernel, 1000), cell(row, "unguided", f"{kernel} test", 1000),
            cell(row, "cfg", distance), cell(row, "cfg", f"{distance} test"), f"{row['val_loss']:.4f}",
        )
        for row in rows
    ]  # fmt: skip
    head = (
        "arm", "rate", "seed", "seconds", "steps", f"{distance}, first few", distance, "to test images",
        "KD x 1000", "KD to test x 1000", "cfg", "cfg, to test images", "dense validation loss",
    )  # fmt: skip
    return markdown_table(head, lines)


def placements(results: Results, distance: str) -> dict[tuple[int, int] | None, float]:
    """The distance of each window at ratio 0.5, and of dense (None), after the seconds of the placement study.

    The mean of the seeds that were run.
    """
    found: dict[tuple[int, int] | None, list[float]] = {}
    for row in study_rows(results).get("placement", []):
        window = row["arm"].layers if row["arm"].is_routed else None
        found.setdefault(window, []).append(row["samples"]["unguided"][f"{distance} few"])
    return {window: mean(values) for window, values in found.items()}


def describe(arm: Arm) -> str:
    """An arm in words."""
    size = "" if arm.size == "S" else "B/2, "
    words = [f"{size}{arm.ratio:g} over {arm.layers[0]}..{arm.layers[1]}" if arm.is_routed else f"{size}dense"]
    words += [] if arm.importance is None else [f"l1, importance {arm.importance:g}"]
    words += [f"last {arm.cooldown:.0%} dense"] if arm.cooldown else []
    words += [] if arm.learning_rate is None else [f"rate {arm.learning_rate:g}"]
    return ", ".join(words)


def missing_text(results: Results) -> str:
    """What was not run."""
    lines = [
        f"- {describe(arm)}, seed {seed} ({arm.name})"
        for arm in ARMS
        for seed in (HEADLINE_SEEDS if arm.study == "headline" else (0,))
        if results.done(arm.name, seed) is None
    ]
    routed = longest(results, "routed")
    sampled = set() if not routed else set((snapshot(routed[0], "end") or {"samples": {}})["samples"])
    lines += [f"- guidance {guide.name}" for guide in GUIDES if guide.name not in sampled]
    lines += [
        f"- {name} failed: {entry['error'].splitlines()[0]}"
        for name, entry in results.runs.items()
        if entry["status"] == "failed"
    ]
    return "\n".join(lines) or "Everything was run."
