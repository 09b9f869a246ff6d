"""`tread autotune` on a config of `tread train`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tread.autotune.cost import Stack
from tread.autotune.jobs.job import TrainedJob, batches_of, check_alone, newest_checkpoint, routing_beside
from tread.autotune.jobs.trainer import TrainerLoop
from tread.autotune.subject import Opened, check_depth, check_samples, wide_routes
from tread.config.schema import plain
from tread.errors import ConfigError
from tread.kernels.attention import kernel
from tread.models import model_size
from tread.pretrain.resumed import check_resumed
from tread.pretrain.run import pretrain
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Pretraining
from tread.pretrain.trial import steps_alone
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.job import make_accelerator
from tread.training.memory import out_of_memory
from tread.training.session import Session

LEFT_OUT = ("output_dir", "log", "checkpoint", "sample", "evaluate", "validation")
"""Sections that no measurement depends on."""
OF_TRAIN = ("steps", "epochs", "workers", "timeout_minutes")
"""Settings of the section `train` that none depends on."""


class PretrainTuning(TrainedJob):
    """The job of a `PretrainConfig`."""

    program = "train"
    setting = "model.tread_config"

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config

    @property
    def routing(self) -> dict[str, Any]:
        return routing_beside(self.config.model.tread_config)

    def identity(self) -> dict[str, Any]:
        settings = {name: value for name, value in plain(self.config).items() if name not in LEFT_OUT}
        settings["model"] = {**settings["model"], "tread_config": self.routing, "name": None}
        settings["train"] = {name: value for name, value in settings["train"].items() if name not in OF_TRAIN}
        return {"job": "train", **settings, **newest_checkpoint(self.config.resumed)}

    @contextmanager
    def explained(self) -> Iterator[None]:
        config = self.config
        with out_of_memory(config.memory_advice), kernel.explained(config.train.attention, "train.attention"):
            yield

    def check_verify(self) -> None:
        if self.config.validation.samples == 0:
            raise ConfigError(
                "--verify compares validation losses, and validation.samples is 0: set it, or leave --verify out."
            )

    def validation(self) -> dict[str, Any]:
        return {"validation.samples": self.config.validation.samples}

    def open(self, folder: Path, ratios: Sequence[float]) -> Opened:
        check_resumed(self.config)
        depth = int((model_size(self.config.model.size) | self.config.model.overrides())["depth"])
        check_depth(depth, ratios)
        beside = {name: value for name, value in self.routing.items() if name != "schedule"}
        config = replace(
            steps_alone(self.config, folder),
            model=replace(self.config.model, tread_config={**beside, "routes": wide_routes(ratios)}),
            validation=replace(self.config.validation, every=0, samples=0),
        )
        accelerator = make_accelerator(config)
        check_alone(accelerator)
        task = Pretraining(config, accelerator, folder)
        size = config.train.batch_size // config.train.micro_steps
        count = min(batches_of(size), check_samples(len(task.train_set), size, "train.batch_size"))
        session = Session(task, task.config, accelerator)
        resumed = self.config.resumed  # without a checkpoint, the weights that a run begins with are measured
        done = 0 if resumed is None else session.load(resumed / CHECKPOINTS)
        loop = TrainerLoop(task, session)
        return Opened(
            loop=loop,
            batches=list(islice(task.batches(0), count)),
            stacks=(Stack(name="blocks", first=0, last=depth - 1),),
            tokens=task.model.grid[0] * task.model.grid[1],
            forced=None,
            always=0,
            adapts=False,
            start=loop.start if config.model.weights is None and done == 0 else None,
        )

    def train(self, tread_config: Mapping[str, Any] | None, steps: int, folder: Path) -> None:
        pretrain(
            replace(
                self.config,
                output_dir=str(folder),
                resume="latest" if list_checkpoints(folder / CHECKPOINTS) else None,
                model=replace(self.config.model, tread_config=None if tread_config is None else dict(tread_config)),
                train=replace(self.config.train, steps=steps, epochs=None),
                validation=replace(self.config.validation, every=steps),
                sample=replace(self.config.sample, every=0),
                evaluate=replace(self.config.evaluate, every=0),
                checkpoint=replace(self.config.checkpoint, every=steps, keep=1),
                log=replace(self.config.log, trackers="none"),
            )
        )
