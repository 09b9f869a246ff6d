"""The results: one JSON of all runs by name, and one file of sample grids.

- A run's name is its arm, seed and seconds: `routed-s0-75s`. Its entry is self-contained.
- Results of different scales (a rehearsal's, a smoke test's) are not merged: their figures would share a table.
- Both files are rewritten atomically after every stage, so that a killed experiment loses little.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks.common.record import Facts, write_json
from tread.files import atomic_write

from .arms import ARMS, Arm, arm_of

RESULTS, GRIDS = "results.json", "grids.npz"
NEAREST = "-nearest"
"""Suffix of the name of a grid of training images, each the nearest to a sample."""


def run_name(arm: str, seed: int, seconds: float) -> str:
    """The name of a run."""
    return f"{arm}-s{seed}-{seconds:g}s"


class Results:
    """The results in a folder, with earlier ones beside them."""

    def __init__(self, folder: Path, earlier: Iterable[Path] = ()) -> None:
        self.folder = folder
        self.facts: Facts = {"machine": None, "data": None, "runs": {}}
        for path in [*earlier, folder / RESULTS]:
            if path.is_file():
                self.merge(json.loads(path.read_text(encoding="utf-8")))
        self.grids: dict[str, np.ndarray] = {}
        if (folder / GRIDS).is_file():
            self.grids = read_grids(folder / GRIDS)

    @property
    def runs(self) -> dict[str, Facts]:
        """All entries."""
        return self.facts["runs"]

    def merge(self, other: Facts) -> None:
        """Take over what other results have; a finished run is never replaced by an unfinished one."""
        if other.get("machine"):
            self.check_scale(other["machine"]["scale"])
        self.facts |= {name: other[name] for name in ("machine", "data") if other.get(name)}
        for name, entry in other["runs"].items():
            if not self.is_done(name) or entry["status"] == "done":
                self.runs[name] = entry

    def check_scale(self, scale: Facts) -> None:
        """Refuse to merge runs of another scale."""
        ours = scale if self.facts["machine"] is None else self.facts["machine"]["scale"]
        unequal = [name for name in scale if ours.get(name) != scale[name]]
        if unequal:
            words = "; ".join(f"{name} {ours.get(name)} and {scale[name]}" for name in unequal)
            raise ValueError(f"results of unequal scale do not join, leave one of them out: {words}")

    def is_done(self, name: str) -> bool:
        """Whether a run has finished."""
        return self.runs.get(name, {}).get("status") == "done"

    def done_of(self, arm: str) -> list[Facts]:
        """The finished runs of an arm."""
        return [entry for entry in self.runs.values() if entry["status"] == "done" and entry["arm"]["name"] == arm]

    def done(self, arm: str, seed: int, seconds: float | None = None) -> Facts | None:
        """The finished run of an arm, the longest one unless `seconds` is given."""
        finished = [
            entry
            for entry in self.done_of(arm)
            if entry["seed"] == seed and (seconds is None or entry["seconds"] == seconds)
        ]
        return max(finished, key=lambda entry: entry["seconds"], default=None)

    def only(self, keep: Callable[[Facts], bool]) -> "Results":
        """A copy with the runs that `keep` accepts."""
        subset = Results(self.folder / "none")
        subset.facts = self.facts | {"runs": {name: entry for name, entry in self.runs.items() if keep(entry)}}
        return subset

    def write(self, name: str, entry: Facts) -> None:
        """Save the entry of a run."""
        self.runs[name] = entry
        write_json(self.folder / RESULTS, self.facts)

    def write_grid(self, name: str, images: np.ndarray) -> None:
        """Save a grid of 100 samples (100, H, W, 3)."""
        self.grids[name] = images
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / GRIDS) as file:
            np.savez_compressed(file, **self.grids)  # pyright: ignore[reportArgumentType]


def distance_name(results: Results) -> str:
    """The name of the Frechet distance in the results."""
    data = results.facts["data"]
    return "FD-EffLite0" if data is None else next(name for name in data["test"] if name.startswith("FD-"))


def kernel_name(distance: str) -> str:
    """The kernel distance on the features of a Frechet distance."""
    return f"KD-{distance.removeprefix('FD-')}"


def read_grids(path: Path) -> dict[str, np.ndarray]:
    """Sample grids by name."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def known_arms(results: Results) -> list[Arm]:
    """The table's arms, and those of windows that were run."""
    names = [arm.name for arm in ARMS] + [entry["arm"]["name"] for entry in results.runs.values()]
    return [arm_of(name) for name in dict.fromkeys(names)]


def longest(results: Results, arm: str) -> list[Facts]:
    """The longest finished runs of an arm, by seed."""
    finished = results.done_of(arm)
    most = max((entry["seconds"] for entry in finished), default=0)
    return sorted((entry for entry in finished if entry["seconds"] == most), key=lambda entry: entry["seed"])


def snapshot(entry: Facts, at: str) -> Facts | None:
    """The snapshot of a run at its `end`, at `equal-steps`, at its first `mark`, or when it was `annealed`."""
    if at == "annealed":
        return entry.get("annealed")
    return next((look for look in entry["snapshots"] if look["at"] == at), None)


def at_seconds(entry: Facts, seconds: float) -> Facts | None:
    """The snapshot of a run that was due after `seconds` of training."""
    return next((look for look in entry["snapshots"] if look["due"] == seconds), None)
