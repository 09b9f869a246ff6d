"""Metrics: a JSONL file always, TensorBoard or wandb by setting.

- Values stay on the device until `flush`, one transfer for many steps, so that logging never stalls training.
- The file has one line per step, and one for each validation and speed. After a resume it is cut back to the
  checkpoint's step first: it reads as if the run had never stopped.
"""

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from tread.errors import ConfigError, TrainingDiverged
from tread.files import write_text, writing
from tread.training.settings import JobConfig

FILE = "metrics.jsonl"


def tracker_of(config: JobConfig) -> str | None:
    """The accelerate tracker that a config asks for; one asked for by name must be installed."""
    asked = config.log.trackers
    if asked == "none" or (asked == "auto" and importlib.util.find_spec("tensorboard") is None):
        return None
    name = "tensorboard" if asked == "auto" else asked
    if importlib.util.find_spec(name) is None:
        setting = config.called("log.trackers")
        raise ConfigError(f"{setting} is {asked!r}, but {name} is missing: pip install 'tread-diffusion[track]'.")
    return name


@dataclass(frozen=True)
class _Waiting:
    """One step's numbers: those known on the host, and names and values of those still on the device."""

    step: int
    known: dict[str, float]
    names: list[str]
    values: Tensor


class Metrics:
    """Collects per-step values on every rank; rank 0 writes them. `advice` ends the error about a non-finite value."""

    def __init__(self, folder: Path, accelerator: Accelerator, *, start_step: int, advice: str) -> None:
        self._path, self._accelerator, self._advice = folder / FILE, accelerator, advice
        self._waiting: list[_Waiting] = []
        if accelerator.is_main_process and self._path.exists():
            cut_back(self._path, start_step or -1)  # a new run also validates before its first step

    def add(self, step: int, values: Mapping[str, float], tensors: Mapping[str, Tensor]) -> None:
        """Take the numbers of step `step` (counted from 1); `tensors` are 0-d and averaged over ranks."""
        stacked = torch.stack([tensor.detach().float() for tensor in tensors.values()])  # (N,)
        self._waiting.append(_Waiting(step, dict(values), list(tensors), stacked))

    @property
    def are_finite(self) -> bool:
        """Whether the values that wait to be written are finite on this rank."""
        return all(bool(waiting.values.isfinite().all()) for waiting in self._waiting)

    def flush(self, *, together: bool = True) -> dict[str, float]:
        """Write what is waiting and return the last step's values; raises TrainingDiverged if one is not finite.

        With `together` False no collective runs, and the lines have this rank's numbers.
        """
        if not self._waiting:
            return {}
        table: Any = torch.stack([waiting.values for waiting in self._waiting])  # (steps, N)
        if together:
            table = self._accelerator.reduce(table, "mean")
        last: dict[str, float] = {}
        for row in table.tolist():
            first = self._waiting[0]
            last = {**first.known, **dict(zip(first.names, row, strict=True))}
            if not all(math.isfinite(value) for value in row):
                raise TrainingDiverged(
                    f"the loss or its gradient is no longer finite at step {first.step}. {self._advice}"
                )
            self.write(first.step, last)
            del self._waiting[0]  # only now: a line that could not be written is kept
        return last

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line now, on rank 0."""
        self._accelerator.log(dict(values), step=step)
        if self._accelerator.is_main_process:
            with writing(self._path), self._path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")


def track_image(accelerator: Accelerator, name: str, path: Path, step: int) -> None:
    """Send an image file to the trackers."""
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))[None]  # (1, H, W, 3)
    for tracker in accelerator.trackers:
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        if hasattr(tracker, "log_images"):
            tracker.log_images({name: pixels}, step=step, **layout)


def cut_back(path: Path, step: int) -> None:
    """Remove the lines after `step` from a file of metrics, and those that a kill or a disk damaged."""
    kept = [line for line in _lines(path) if _step_of(line) <= step]
    write_text(path, "".join(f"{line}\n" for line in kept))  # a kill right here must not cost the whole history


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics; one that a kill cut off or a disk damaged is left out."""
    return read_lines(folder)[0]


def read_lines(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """All lines of a run's metrics, and how many were left out because a kill cut them off or a disk damaged them."""
    written = [line for line in _lines(folder / FILE) if line.strip()]
    whole = [values for line in written if (values := _parsed(line)) is not None]
    return whole, len(written) - len(whole)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")


def _step_of(line: str) -> float:
    values = _parsed(line)
    return math.inf if values is None else values["step"]


def _parsed(line: str) -> dict[str, Any] | None:
    """The values of a line; None if a kill cut it off, or if it is not ours."""
    try:
        values = json.loads(line)
        return values if type(values["step"]) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
