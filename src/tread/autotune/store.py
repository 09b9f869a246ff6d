"""The measurements of one tuning: a JSON file that is whole after each of them, so that an interrupted probe loses one.

The file says what was measured (the settings that figures depend on, the device, the versions). A tuning of anything
else is refused, because its figures would be mixed with these.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tread.config.layers import changes
from tread.errors import ConfigError, shortened
from tread.files import atomic_write, sweep
from tread.training.job import LOCK_FILE, locked

FILE = "measurements.json"
FORMAT = 1
KINDS = ("kept", "seconds", "losses", "verified")
"""Kinds of measurements, each a mapping from a plan's name to figures."""


class Store:
    """The measurements in a folder; `subject` is what they are of."""

    def __init__(self, folder: Path, subject: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        self.path = folder / FILE
        self.facts: dict[str, Any] = {"format": FORMAT, "subject": dict(subject), "starts": []}
        self.facts |= {kind: {} for kind in KINDS}
        if self.path.is_file():
            self._read(subject)
        self.facts["starts"].append(dict(start))

    def _read(self, subject: Mapping[str, Any]) -> None:
        try:
            found = json.loads(self.path.read_bytes())
            before, kinds = found["subject"], [found[kind] for kind in KINDS]
            whole = found["format"] == FORMAT and all(isinstance(one, dict) for one in (before, *kinds))
            whole = whole and isinstance(found["starts"], list)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            whole, found, before = False, {}, {}
        if not whole:
            raise ConfigError(
                f"{self.path} cannot be read as measurements of this version: remove it, or name another --out."
            )
        here = json.loads(json.dumps(subject))  # tuples are lists there
        if different := changes(before, here):
            listed = shortened("; ".join(different), 250)
            raise ConfigError(
                f"{self.path} has measurements of something else ({listed}): name another --out, or remove the file."
            )
        self.facts = found

    def get(self, kind: str, key: str) -> Any:
        """A measurement; None if there is none yet."""
        return self.facts[kind].get(key)

    def add(self, kind: str, key: str, value: Any) -> None:
        """Keep a measurement, on the disk, before the next one begins."""
        self.facts[kind][key] = value
        self.write()

    def since_start(self, steps: int) -> None:
        """Forget losses that were measured after a start of another number of steps: they are another model's."""
        if self.facts.get("start_steps") != steps:
            self.facts["losses"] = {}
        self.facts["start_steps"] = steps

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Keep what the measurements were found to mean, in place of an earlier conclusion."""
        self.facts["result"] = dict(result)
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        with atomic_write(self.path) as file:
            file.write((json.dumps(self.facts, indent=1) + "\n").encode())


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """A folder for the files of a tuning, made and held; refuses one that cannot be written or that another holds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder), (folder / LOCK_FILE).open("a"):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write to {str(folder)!r}: {error.strerror}. Name another folder with --out."
        ) from None
    with locked(folder / LOCK_FILE) as held:
        if not held:
            raise ConfigError(f"another `tread autotune` works in {folder}: wait for its end, or name another --out.")
        sweep(folder)
        yield folder
