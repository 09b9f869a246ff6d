"""A trial of a `tread train` config: its DiT compared with the same DiT without routes, and its steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tread.kernels.attention import kernel
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Pretraining
from tread.training.job import make_accelerator
from tread.training.memory import out_of_memory
from tread.training.session import Session
from tread.training.trial import Comparison, Trial, compare_routed, eager_figures, predict, try_steps


def try_pretrain(config: PretrainConfig, folder: Path) -> tuple[str, list[Trial]]:
    """One line about the task, and the outcome for its network; files go to `folder`, not to the run's."""
    config = replace(steps_alone(config, folder), resume=None)
    accelerator = make_accelerator(config)
    with out_of_memory(config.memory_advice), kernel.explained(config.train.attention, "train.attention"):
        task = Pretraining(config, accelerator, folder)
        batch = next(task.batches(0))
        comparisons: list[Comparison] = []
        if task.routing:
            with nonzero(task.model):
                routing, task.model.routing = task.model.routing, None
                stock, _ = predict(task, accelerator, batch)
                task.model.routing = routing
                comparisons = compare_routed(task, accelerator, batch, stock)
        summary = task.summary()
        if not all(one.fits for one in comparisons):
            return summary, [Trial(part="model", comparisons=comparisons)]
        eager = eager_figures(task, accelerator, batch)
        session = Session(task, task.config, accelerator)
        return summary, [try_steps(session, batch, "model", comparisons, *eager)]


def steps_alone(config: PretrainConfig, folder: Path) -> PretrainConfig:
    """The config of a few steps in one process, without what a run has beside them; files go to `folder`."""
    return replace(
        config,
        output_dir=str(folder),
        train=replace(config.train, workers=0, parallel="ddp", shard_size=None, cpu_offload=False),
        sample=replace(config.sample, vae=None),  # nothing is drawn
        evaluate=replace(config.evaluate, every=0),
        log=replace(config.log, trackers="none"),
    )


@contextmanager
def nonzero(model: nn.Module) -> Iterator[None]:
    """Inside, parameters that are all zero have random values: a fresh DiT predicts 0, whatever its layers do."""
    zeros = [parameter for parameter in model.parameters() if not parameter.any()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in zeros:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()
