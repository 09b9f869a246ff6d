"""The measurements of one tuning: a JSON file rewritten atomically after each, so that an interruption loses only one.

The file records the subject (the settings that measurements depend on, the device, the versions). A tuning of another
subject is refused, because its measurements would be mixed with these.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tread.config.layers import changes
from tread.errors import ConfigError, shortened
from tread.files import sweep, write_text
from tread.training.job import LOCK_FILE, locked, make_folder

FILE = "measurements.json"
FORMAT = 2
KINDS = ("kept", "seconds", "paired", "losses", "verified")
"""Kinds of measurements, each a mapping from a plan's name to figures."""


class Store:
    """The measurements in a folder; `subject` identifies the model, settings and device measured."""

    def __init__(self, folder: Path, subject: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        self.path = folder / FILE
        self.facts: dict[str, Any] = {"format": FORMAT, "subject": dict(subject), "starts": []}
        self.facts |= {kind: {} for kind in KINDS}
        if self.path.is_file():
            self._read(subject)
        self.facts["starts"].append(dict(start))

    def _read(self, subject: Mapping[str, Any]) -> None:
        try:
            saved = json.loads(self.path.read_bytes())
            before, kinds = saved["subject"], [saved[kind] for kind in KINDS]
            whole = saved["format"] == FORMAT and all(isinstance(one, dict) for one in (before, *kinds))
            whole = whole and isinstance(saved["starts"], list)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            whole, saved, before = False, {}, {}
        if not whole:
            raise ConfigError(
                f"{self.path} cannot be read as measurements of this version: remove it, or name another --out."
            )
        expected = json.loads(json.dumps(subject))  # JSON turns tuples into lists
        if different := changes(before, expected):
            listed = shortened("; ".join(different), 250)
            raise ConfigError(
                f"{self.path} has measurements of something else ({listed}): name another --out, or remove the file."
            )
        self.facts = saved

    @property
    def start(self) -> int:
        """The index of this process among the starts."""
        return len(self.facts["starts"]) - 1

    def get(self, kind: str, key: str) -> Any:
        """A measurement; None if there is none yet."""
        return self.facts[kind].get(key)

    def add(self, kind: str, key: str, value: Any) -> None:
        """Add a measurement and write the file."""
        self.facts[kind][key] = value
        self.write()

    def since_start(self, steps: int) -> None:
        """Discard losses measured after a dense start of another length: the model was another one."""
        if self.facts.get("start_steps") != steps:
            self.facts["losses"] = {}
        self.facts["start_steps"] = steps

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Store the result derived from the measurements, replacing an earlier one."""
        self.facts["result"] = dict(result)
        self.write()

    def write(self) -> None:
        """Write the file atomically."""
        write_text(self.path, json.dumps(self.facts, indent=1) + "\n")


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Create and lock the folder of a tuning; refuses one that is not writable or is locked by another process."""
    make_folder(folder, repr(str(folder)), "Name another folder with --out.")
    with locked(folder / LOCK_FILE) as held:
        if not held:
            raise ConfigError(f"another `tread autotune` works in {folder}: wait for its end, or name another --out.")
        sweep(folder)
        yield folder
