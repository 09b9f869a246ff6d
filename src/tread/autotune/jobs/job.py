"""A job as the tuner sees it, and the helpers that both jobs share."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import nn

from tread.attach.family import Family
from tread.autotune.cost import Stack
from tread.autotune.subject import FEWEST, Opened
from tread.config.documents import ENV_SUFFIX
from tread.errors import ConfigError
from tread.report.doctor import is_finetune
from tread.routing.plan import RoutePlan, tread_mapping
from tread.routing.schedule import Schedule
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints

BATCHES = 2
"""Batches that sensitivity is measured on, if the data has that many; more if batches are small."""


class Job(ABC):
    """A config of `tread train` or `tread finetune`, or a custom loop, to be tuned."""

    @property
    @abstractmethod
    def routing(self) -> dict[str, Any]:
        """The config's routing settings other than the routes: the selector, the schedule."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The settings that a measurement depends on."""

    def schedule(self, tread_config: Mapping[str, Any], steps: int) -> Schedule | None:
        """The schedule of a run of `steps` steps with these routes; None if every step drops the full ratio."""
        return RoutePlan.from_config(tread_config).with_total_steps(steps).schedule

    def said(self, text: str) -> str:
        """A message that names options of the command, in the words of this job's user."""
        return text

    @abstractmethod
    def explained(self) -> AbstractContextManager[None]:
        """A context that turns an out-of-memory error into a message with the setting to change."""

    @abstractmethod
    def open(self, folder: Path, ratios: Sequence[float]) -> Opened:
        """Load the model and some batches, ready for steps."""

    @abstractmethod
    def command(self, config: str | None, settings: Sequence[str], path: Path) -> str:
        """The shell command that trains with the routes in a file."""


class TrainedJob(Job):
    """A job that tread can train, which verifying runs need."""

    program: ClassVar[str]
    """The command that trains it."""
    setting: ClassVar[str]
    """The setting that names the routes."""

    @abstractmethod
    def check_verify(self) -> None:
        """Refuse a config whose runs would have no validation loss."""

    @abstractmethod
    def validation(self) -> dict[str, Any]:
        """The settings that a validation loss depends on and that `identity` leaves out."""

    @abstractmethod
    def train(self, tread_config: Mapping[str, Any] | None, steps: int, folder: Path) -> None:
        """Train for `steps` steps with the job's own trainer, resuming a checkpoint in `folder`; None is dense."""

    def command(self, config: str | None, settings: Sequence[str], path: Path) -> str:
        kept = [text for text in settings if not text.startswith(f"{self.setting}=")]
        file = [] if config is None else [config]
        return shlex.join(["tread", self.program, *file, *kept, f"{self.setting}={path}"])


def read_job(config: str | None, settings: Sequence[str]) -> TrainedJob:
    """The job of a config that has been read; without a file the settings are those of `tread train`."""
    if config is not None and is_finetune(config):
        from tread.autotune.jobs.finetuning import FinetuneTuning
        from tread.finetune.config import read_config

        return FinetuneTuning(read_config(config, settings))
    from tread.autotune.jobs.pretraining import PretrainTuning
    from tread.pretrain.config import compose

    return PretrainTuning(compose([*([] if config is None else [config]), *settings]))


def stacks_of(model: nn.Module, family: Family) -> tuple[Stack, ...]:
    """The stacks of a stock model with their layers, as routes count them."""
    stacks, first = [], 0
    for stack in family.stacks:
        count = len(stack.layers(model))
        if count:
            stacks.append(Stack(name=stack.name, first=first, last=first + count - 1))
        first += count
    return tuple(stacks)


def stem(config: str | None) -> str:
    """The name of a config without its ending, for the folder of its measurements."""
    if config is None:
        return "train"
    name = Path(config).name
    return name.removesuffix(ENV_SUFFIX) or name if name.lower().endswith(ENV_SUFFIX) else Path(config).stem


def routing_beside(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """A tread_config without its routes."""
    mapping = {} if config is None else tread_mapping(config)
    return {key: value for key, value in mapping.items() if key not in ("routes", "preset") and value is not None}


def newest_checkpoint(run: Path | None) -> dict[str, str]:
    """The newest checkpoint of a run that is measured, for a job's identity: a run that trains on gets others."""
    found = [] if run is None else list_checkpoints(run / CHECKPOINTS)
    return {"checkpoint": found[-1].name} if found else {}


def batches_of(size: int) -> int:
    """The number of batches of `size` samples that sensitivity is measured on.

    >>> batches_of(1), batches_of(8)
    (4, 2)
    """
    return max(BATCHES, -(-FEWEST // size))


def check_alone(accelerator: Accelerator) -> torch.device:
    """The device; refuses several processes, whose collectives would distort the timings."""
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"tread autotune was launched as {accelerator.num_processes} processes and measures on one: run it without "
            "accelerate launch; the routes it writes are for any number."
        )
    return accelerator.device
