"""The record of a run, `run.json` in its folder: facts about the model, an entry for each start, its id in wandb.

Settings are what was asked for; the record is what was run: the command, versions, the device, and the resolved plan,
seed included, so that the tokens that a step kept can be computed again. A resume adds an entry.
"""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tread.errors import masked
from tread.files import write_text
from tread.training.fingerprint import KINDS
from tread.training.task import Task

FILE = "run.json"
PACKAGES = ("tread-diffusion", "torch", "accelerate", "diffusers", "transformers", "peft", "bitsandbytes", "numpy")


def write_start(folder: Path, task: Task, accelerator: Accelerator, step: int) -> None:
    """Add the start of this process, which trains from `step` on, to the record in `folder`."""
    before = read_record(folder)
    record = before | {
        "summary": task.summary(),
        "unit": task.unit,
        # without fingerprints, which are for a resume
        "facts": {name: fact for name, fact in task.facts.items() if name not in KINDS},
        "starts": [
            *starts(before),
            {"step": step, **origin(accelerator.device, accelerator.num_processes)},
        ],
    }
    _write(folder, record)


def write_wandb_id(folder: Path, name: str) -> None:
    """Add the run's id in wandb to the record, so that a resume draws on in the same curves."""
    _write(folder, read_record(folder) | {"wandb": name})


def _write(folder: Path, record: dict[str, Any]) -> None:
    write_text(folder / FILE, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a run; empty if there is none, as in runs of earlier versions, or if it is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads((folder / FILE).read_bytes())
        return record if isinstance(record, dict) else {}
    return {}


def starts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The starts in a record, the first one first."""
    entries = record.get("starts")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def origin(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """The time, command, versions and device of this process."""
    on_gpu = device.type == "cuda"
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{device.type}, {platform.machine()}",
        "processes": processes,
        "versions": {"python": platform.python_version(), **_versions(), "cuda": torch.version.cuda},
    }


def command_line(arguments: Sequence[str]) -> str:
    """A command as one would type it into a shell, without secrets.

    >>> command_line(["/usr/bin/tread", "train", "model=tread", "data.token=abc"])
    "tread train model=tread 'data.token=********'"
    """
    program, *rest = arguments or [""]
    name, shown = Path(program).name, [program]
    if name in ("tread", "__main__.py"):
        shown = ["tread"]
    elif name.endswith(".py"):
        shown = ["python", program]
    for argument in rest:
        key, separator, value = argument.partition("=")
        shown.append(f"{key}={masked(value, key)}" if separator else argument)
    return shlex.join(shown)


def _versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
