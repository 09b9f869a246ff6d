"""New figures beside the committed ones, row by row; fails where one is worse than its spread allows.

    python -m benchmarks.compare NEW.json [NEW.json ...]

- Run it before a release, on the files that the benchmarks wrote on the same kind of GPU.
- A step is worse if even its fast blocks are slower than the slow blocks of the committed one, by more than two
  machines of one kind differ (3 %). Memory is worse if it grew by more than 2 %.
- Of several committed figures of a row and variant, the newest file's counts.
"""

import argparse
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.common.record import RESULTS, Facts

MACHINES, MEMORY = 0.03, 0.02
Key = tuple[str, str, str]
"""Row, variant, and dense or routed."""


def figures(facts: Facts) -> Iterator[tuple[Key, Facts]]:
    """Every timed step of a results file, of one script or of several jobs."""
    for part in (facts, *facts.get("jobs", ())):
        for entry in part.get("measurements", ()):
            for kind in ("dense", "routed"):
                if entry["status"] == "ok" and kind in entry:
                    yield (entry["row"], entry["name"], kind), entry[kind]


def committed(device: str, paths: Iterable[Path]) -> dict[Key, Facts]:
    """The figures of a device in `paths`; later files win."""
    found: dict[Key, Facts] = {}
    for path in paths:
        facts = json.loads(path.read_text())
        if facts.get("machine", {}).get("device") == device:
            found |= dict(figures(facts))
    return found


def worse(new: Facts, old: Facts) -> list[str]:
    """What is worse than the spread allows, in words."""
    found = []
    if new["low_ms"] > old["high_ms"] * (1 + MACHINES):
        found.append("slower")
    if new.get("peak_gib") and old.get("peak_gib") and new["peak_gib"] > old["peak_gib"] * (1 + MEMORY):
        found.append("more memory")
    return found


def line(key: Key, new: Facts, old: Facts | None) -> str:
    """One row of the table."""
    if old is None:
        return f"| {' | '.join(key)} | - | {_shown(new)} | | new |"
    ratio = new["median_ms"] / old["median_ms"]
    return f"| {' | '.join(key)} | {_shown(old)} | {_shown(new)} | {ratio:.3f} | {', '.join(worse(new, old)) or 'ok'} |"


def _shown(figure: Facts) -> str:
    memory = f", {figure['peak_gib']:.1f} GiB" if figure.get("peak_gib") else ""
    return f"{figure['median_ms']:.1f} ms ({figure['low_ms']:.1f}-{figure['high_ms']:.1f}{memory})"


def by_age(paths: Iterable[Path]) -> list[Path]:
    """Files in the order of their last commits, oldest first; one that was never committed comes last."""

    def committed_at(path: Path) -> tuple[bool, str]:
        command = ["git", "log", "-1", "--format=%cI", "--", path.name]
        said = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False).stdout.strip()
        return not said, said

    return sorted(paths, key=committed_at)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a figure is worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, nargs="+", help="files that the benchmarks wrote")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of committed files")
    given = parser.parse_args(arguments)
    chosen = {path.resolve() for path in given.new}
    olds = by_age(path for path in given.results.glob("*.json") if path.resolve() not in chosen)
    print("| row | variant | step | committed | new | new / committed | verdict |\n|---|---|---|---|---|---|---|")
    found_worse = False
    for path in given.new:
        facts = json.loads(path.read_text())
        old = committed(facts["machine"]["device"], olds)
        for key, new in figures(facts):
            print(line(key, new, old.get(key)))
            found_worse |= key in old and bool(worse(new, old[key]))
    return 1 if found_worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
