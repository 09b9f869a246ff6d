"""The tables of short runs, which stand in docs/log.md: studies of one setting, and guidance.

A study's arms are compared with what the headline's arms were after the same seconds of training.
"""

from collections.abc import Sequence
from statistics import mean

from benchmarks.common.record import Facts
from pages.tables import markdown_table

from .arms import BY_NAME, GUIDES, UNGUIDED, Arm
from .results import Results, at_seconds, kernel_name, known_arms, longest, snapshot

NOTHING = "Not run yet."
STUDIES = {
    "rate": "Learning rate",
    "ratio": "Ratio",
    "selector": "Selector",
    "cool-down": "Dense cool-down",
    "placement": "Placement",
    "size": "B/2",
    "windows": "Other windows",
}


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
        for arm in known_arms(results):
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
    varied = *arm.layers, arm.ratio, arm.importance or 0, arm.cooldown, row["rate"]
    return (arm.is_routed, *varied, row["seed"])


def headline_at(results: Results, name: str, seconds: float) -> list[Facts]:
    """The snapshots of a headline arm after `seconds` of training, by seed."""
    return [
        study_row(found, BY_NAME[name], entry)
        for entry in results.done_of(name)
        if (found := at_seconds(entry, seconds))
    ]


def study_row(found: Facts, arm: Arm, entry: Facts) -> Facts:
    """A snapshot of a run, with the facts that its table row shows."""
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
    windows = [f"{ratio:g} over {start}..{end}" for ratio, start, end in arm.windows]
    words = [f"{size}{' and '.join(windows) or 'dense'}"]
    words += [] if arm.importance is None else [f"l1, importance {arm.importance:g}"]
    words += [f"last {arm.cooldown:.0%} dense"] if arm.cooldown else []
    words += [] if arm.learning_rate is None else [f"rate {arm.learning_rate:g}"]
    return ", ".join(words)
