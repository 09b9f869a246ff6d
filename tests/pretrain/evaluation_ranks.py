"""Run in one process or in each of two: evaluates random weights; each rank writes down what it drew."""

from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from tests.pretrain.corner import register
from tread.pretrain.config import compose
from tread.pretrain.task import Pretraining
from tread.training.job import end


def evaluate(arguments: list[str]) -> Path:
    """Figures of step 7 in the run's folder, and the pictures of this rank's first batch."""
    register()
    config = compose(arguments)
    folder, accelerator = Path(config.output_dir), Accelerator(cpu=True)
    task = Pretraining(config, accelerator, folder)
    torch.manual_seed(0)
    for parameter in task.model.parameters():
        nn.init.normal_(parameter, std=0.2)
    figures = task.evaluate(7)
    rank, world = accelerator.process_index, accelerator.num_processes
    assert bool(figures) == (rank == 0)
    assert config.evaluate is not None
    first = config.evaluate.samples * rank // world
    drawn = task.evaluation_images(config.evaluate).read(first, first + config.evaluate.batch_size)
    np.save(folder / f"rank-{rank}.npy", np.stack(drawn))
    end(accelerator)
    return folder
