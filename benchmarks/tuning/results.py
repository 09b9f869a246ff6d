"""Finished runs on disk, a file for each seed."""

import json
import sys
from pathlib import Path

from benchmarks.common.record import Facts, machine, write_json


class Results:
    """The finished runs of one seed, in one JSON file that is whole after each of them."""

    def __init__(self, out: Path, name: str) -> None:
        self.path = out / f"tuning-{name}.json"
        self.facts: Facts = json.loads(self.path.read_text()) if self.path.is_file() else {"runs": {}}

    @classmethod
    def of_seed(cls, out: Path, seed: int) -> "Results":
        """The arms of a seed."""
        found = cls(out, f"s{seed}")
        found.facts["seed"] = seed
        return found

    @property
    def runs(self) -> dict[str, Facts]:
        """Name -> figures."""
        return self.facts["runs"]

    def save(self, name: str, facts: Facts) -> None:
        """Write a run to disk, with the machine and the command that made it."""
        self.runs[name] = facts
        self.facts |= {"machine": machine(), "command": " ".join(sys.argv[1:])}
        write_json(self.path, self.facts)
        shown = {key: facts[key] for key in facts if key != "curve"}
        print(f"{self.path.stem} {name} {json.dumps(shown)}", flush=True)
