"""The outcome of a job: every file in its folder, without what differs between two undisturbed runs.

Left out by name: speeds (`images_per_second` in metrics.jsonl), the random ids of checkpoints and results, checksums
of tensor files (the order of the names in a header is drawn; tensors and header are compared), lock files, the index
cache of shards (`home`), what tells of each start (`run.json`, `report.html`, a part of `evaluation.json`), and
temporary files of killed processes in folders that jobs share without a lock: the cache of encoded samples, whose next
user removes them after an hour, and what `tread eval` keeps. In a run's folder the next start has removed them.
"""

import json
import re
from pathlib import Path
from typing import Any

from tread.training.checkpoint import CheckpointError, read_manifest

LEFT_OUT = re.compile(r"home/.*|(.*/)?(\.lock|run\.json|report\.html)|((cache|work)/(.*/)?)?\.[^/]*\.tmp")
DRAWN = {"checkpoint.json": ("id", "checksums"), "result.json": ("checkpoint",), "evaluation.json": ("start", "paths")}
"""Keys of JSON files that are drawn anew in every run."""


def outcome(folder: Path) -> dict[str, Any]:
    """The content of every file in a folder, by its path."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: _content(path) for name, path in paths.items() if not LEFT_OUT.fullmatch(name)}


def _content(path: Path) -> Any:
    found = path.read_bytes()
    if path.name == "metrics.jsonl":
        return [line for line in map(json.loads, found.splitlines()) if "images_per_second" not in line]
    if path.name in DRAWN:
        return {key: value for key, value in json.loads(found).items() if key not in DRAWN[path.name]}
    if path.suffix == ".safetensors":
        start = 8 + int.from_bytes(found[:8], "little")
        return json.loads(found[8:start]), found[start:]
    return found


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """What differs, in a phrase; empty if nothing does.

    A run that was stopped has a checkpoint more, of the step it stopped at, and one less for it if few are kept.
    """
    steps = sorted({_checkpoint(name) for name in expected} - {""})
    missing = {name for name in expected.keys() - found if _checkpoint(name) not in steps[:-1]}
    further = {name for name in found.keys() - expected if _checkpoint(name) in ("", *steps)}
    changed = {name for name in expected.keys() & found if expected[name] != found[name]}
    kinds = {"missing": missing, "left over": further, "different": changed}
    return "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names)


def _checkpoint(name: str) -> str:
    """The checkpoint that a path belongs to; empty for all others."""
    match = re.match(r".*checkpoints/step-\d+(?=/)", name)
    return match[0] if match else ""


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint that is whole, whatever its name; 0 if there is none."""
    steps = [0]
    for path in folder.glob("run/checkpoints/*step-*"):
        try:
            steps.append(read_manifest(path)["step"])
        except CheckpointError:
            continue
    return max(steps)
