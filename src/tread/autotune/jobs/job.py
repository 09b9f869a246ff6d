"""A job as the tuner sees it, and the helpers that both jobs share."""

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from tread.attach.family import Family
from tread.autotune.cost import Stack
from tread.autotune.subject import FEWEST, Opened
from tread.config.documents import ENV_SUFFIX
from tread.errors import ConfigError
from tread.report.doctor import is_finetune
from tread.routing.plan import tread_mapping

BATCHES = 2
"""Batches that sensitivity is measured on, where the data has so many; more if they have few samples."""


class Job(Protocol):
    """What is tuned: a config of `tread train` or `tread finetune`, or a loop."""

    @property
    def routing(self) -> dict[str, Any]:
        """What the config says about routing beside the routes: the selector, the schedule."""
        ...

    def identity(self) -> dict[str, Any]:
        """The settings that a measurement depends on."""
        ...

    def dense_share(self, tread_config: Mapping[str, Any]) -> float:
        """The share of a run's steps, its last ones, that the schedule of these routes leaves dense."""
        ...

    def explained(self) -> AbstractContextManager[None]:
        """Inside, too little memory is a sentence that says what to change."""
        ...

    def open(self, folder: Path, ratios: Sequence[float]) -> Opened:
        """Load the model and some batches, ready for steps."""
        ...

    def command(self, config: str | None, settings: Sequence[str], path: Path) -> str:
        """What a user types to train with the routes in a file."""
        ...


class TrainedJob(Job, Protocol):
    """A job that tread can train, which verifying runs need."""

    def check_verify(self) -> None:
        """Refuse a config whose runs would have no validation loss."""
        ...

    def train(self, tread_config: Mapping[str, Any] | None, steps: int, folder: Path) -> None:
        """Train for so many steps by the job's own trainer, or go on with it; None: dense."""
        ...


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
    found, first = [], 0
    for stack in family.stacks:
        count = len(operator.attrgetter(stack.name)(model))
        if count:
            found.append(Stack(name=stack.name, first=first, last=first + count - 1))
        first += count
    return tuple(found)


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


def batches_of(size: int) -> int:
    """The number of batches of so many samples that sensitivity is measured on.

    >>> batches_of(1), batches_of(8)
    (4, 2)
    """
    return max(BATCHES, -(-FEWEST // size))


def check_alone(accelerator: Accelerator) -> torch.device:
    """The device; refuses several processes, whose steps wait for each other."""
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"tread autotune was launched as {accelerator.num_processes} processes and measures on one: run it without "
            "accelerate launch; the routes it writes are for any number."
        )
    return accelerator.device
