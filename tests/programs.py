"""Programs that tests start in processes of their own, with one torch thread each: `run("-m", "tests.training.ranks")`.

`tests` and `benchmarks` are found from the repository's root, and what the tests import is what a program imports.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
"""Python's arguments that start a program twice."""


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"} | changes


def finished(*arguments: object, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    """Python's run of `arguments`, whatever came of it; `changes` are variables of its environment."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment(**changes), cwd=cwd, capture_output=True, text=True)


def run(*arguments: object, cwd: Path | None = None, **changes: str) -> str:
    """What a program prints that has to succeed."""
    done = finished(*arguments, cwd=cwd, **changes)
    assert done.returncode == 0, done.stderr
    return done.stdout
