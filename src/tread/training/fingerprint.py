"""The fingerprint of a run's data, stored in its checkpoints: a resume on changed data is refused, naming the changes.

A group is a class, a shard or a data entry. Its fingerprint is the number of its files and a hash of their names and
sizes, or the number of its captions and a hash of their text; no file is opened for it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tread.errors import ConfigError
from tread.together import gathered
from tread.training.settings import JobConfig

Fingerprint = Mapping[str, Sequence[int | str]]
"""Group -> the number of its files or captions, and the hash of their descriptions."""
KINDS = {"contents": "files", "held_out": "held-out files", "captions": "captions"}
"""Key of a fingerprint in a manifest -> the word for what it counts; earlier versions have the first at most."""
SHOWN = 5
"""Changes that a message names."""


def fingerprint(groups: Mapping[str, Iterable[object]]) -> dict[str, list[int | str]]:
    """The fingerprint of groups of descriptions, one description per file.

    >>> fingerprint({"cats": ["1.png 300"]})
    {'cats': [1, '7a0f52c796a6309f']}
    """
    lines = {name: [str(item) for item in items] for name, items in groups.items()}
    return {
        name: [len(items), hashlib.sha256("\n".join(items).encode(errors="surrogateescape")).hexdigest()[:16]]
        for name, items in lines.items()
    }


def describe_changes(before: Fingerprint, now: Fingerprint, what: str = "files") -> str:
    """The differences between two fingerprints in words, empty if there are none; `what` is the word for its items.

    >>> describe_changes({"a": [2, "x"], "b": [1, "y"]}, {"a": [3, "z"], "c": [1, "y"]})
    "'a' has 3 files instead of 2, 'b' is gone, 'c' is new"
    """
    told = []
    for name in [*before, *(name for name in now if name not in before)]:
        if name not in now:
            told.append(f"{name!r} is gone")
        elif name not in before:
            told.append(f"{name!r} is new")
        elif before[name][0] != now[name][0]:
            told.append(f"{name!r} has {now[name][0]} {what} instead of {before[name][0]}")
        elif list(before[name]) != list(now[name]):
            told.append(f"{name!r} has other {what}")
    more = f", and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return ", ".join(told[:SHOWN]) + more


def check_shared(facts: Mapping[str, Any]) -> None:
    """Refuse data that is not the same on all processes, whose batches would not be parts of one."""
    first, *others = gathered({key: facts[key] for key in KINDS if key in facts})
    for rank, data in enumerate(others, start=1):
        told = [describe_changes(first[key], data[key], KINDS[key]) for key in first]
        if any(told):
            raise ConfigError(
                f"the data of process {rank} of this run is not that of process 0: {', '.join(filter(None, told))}. "
                "Give all machines the same files."
            )


def check_data(
    config: JobConfig, path: Path, manifest: Mapping[str, Any], facts: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Refuse data that has changed since the checkpoint at `path`; if the user accepts it, `say` what has changed."""
    both = {key: (manifest.get(key), facts.get(key)) for key in KINDS}  # earlier versions kept fewer
    changed = {
        key: told
        for key, (before, now) in both.items()
        if before is not None and now is not None and (told := describe_changes(before, now, KINDS[key]))
    }
    changes = ", ".join(changed.values())
    if changes and config.checkpoint.data_changed == "refuse":
        name = config.called("checkpoint.data_changed")
        raise ConfigError(
            f"the data is not what it was when {path} was saved: {changes}. "
            + "Classes may have other labels and held-out samples be trained on. " * ("contents" in changed)
            + f"Restore the data, or go on with {name}=accept."
        )
    if changes:
        say(f"the data has changed since the run was saved: {changes}")
