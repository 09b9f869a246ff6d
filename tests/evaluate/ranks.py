"""Run in each of two processes: measures a batch file, and each rank writes down what it got."""

from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import nn

from tread.evaluate.compare import measure
from tread.evaluate.features import Extractor
from tread.evaluate.images import open_images


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    extractor = Extractor("Corner", nn.Flatten(), lambda x: x[:, :, :2, :2].float().mean(1) / 255)
    found = measure(open_images(folder / "images.npz"), extractor, batch_size=6, progress=False)
    assert found.vectors is not None
    np.savez(folder / f"rank-{dist.get_rank()}.npz", covariance=found.pool.covariance, vectors=found.vectors)
    dist.destroy_process_group()
