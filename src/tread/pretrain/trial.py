"""A trial of a `tread train` config: its DiT beside the same DiT without routes, and its steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tread.kernels import attention
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Pretraining
from tread.training.job import make_accelerator
from tread.training.loop import Session
from tread.training.memory import out_of_memory
from tread.training.trial import TOLERANCE, Trial, compare, compare_routed, flop_ratio, predict, try_steps


def try_pretrain(config: PretrainConfig, folder: Path) -> tuple[str, list[Trial]]:
    """One line about the task, and what came of its network; files go to `folder`, not to the run's."""
    config = replace(
        config,
        output_dir=str(folder),
        resume=None,
        train=replace(config.train, workers=0),
        sample=replace(config.sample, vae=None),  # nothing is drawn
        evaluate=replace(config.evaluate, every=0),
        log=replace(config.log, trackers="none"),
    )
    accelerator = make_accelerator(config)
    with out_of_memory(config.memory_advice), attention.explained(config.train.attention, "train.attention"):
        task = Pretraining(config, accelerator, folder)
        batch = next(task.batches(0))
        with awake(task.model):
            routing, task.model.routing = task.model.routing, None
            stock, _ = predict(task, accelerator, batch)
            task.model.routing = routing
            if task.routing:
                comparisons = compare_routed(task, accelerator, batch, stock)
            else:
                again, _ = predict(task, accelerator, batch)
                comparisons = [compare("again, dense", again, stock, TOLERANCE[accelerator.mixed_precision])]
        _, eager_loss = predict(task, accelerator, batch)
        flops = flop_ratio(task, accelerator, batch) if task.routing else None
        summary = task.summary()
        session = Session(task, config, accelerator)
        trial = try_steps(session, batch, part="model", comparisons=comparisons, eager_loss=eager_loss, flops=flops)
    return summary, [trial]


@contextmanager
def awake(model: nn.Module) -> Iterator[None]:
    """Inside, parameters that are zero have random values: a fresh DiT predicts 0, whatever its layers do."""
    asleep = [parameter for parameter in model.parameters() if not parameter.any()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in asleep:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in asleep:
                parameter.zero_()
