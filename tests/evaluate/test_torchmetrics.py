"""Figures against torchmetrics, an implementation that shares nothing with ours."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tread.evaluate.activations import Activations
from tread.evaluate.compare import compare, measure
from tread.evaluate.features import Extractor
from tread.evaluate.images import ArrayImages
from tread.evaluate.statistics import Tally

pytest.importorskip("torchmetrics")
WIDTH = 12
RNG = np.random.default_rng(0)
SAMPLES = RNG.integers(40, 256, size=(60, 4, 4, 3), dtype=np.uint8)
REFERENCE = RNG.integers(0, 180, size=(60, 4, 4, 3), dtype=np.uint8)


class Pixels(nn.Module):
    """The upper left quarter of an image as its features; torchmetrics asks a module how many."""

    num_features = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, :2, :2].flatten(1).double() / 255  # (B, WIDTH)


def tensors(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)  # (N, 3, H, W)


def theirs(metric: Any) -> Any:
    for images, real in ((REFERENCE, True), (SAMPLES, False)):
        for batch in tensors(images).split(25):
            metric.update(batch, real=real)
    return metric.compute()


@pytest.fixture(scope="module")
def ours() -> dict[str, float]:
    extractor = Extractor("Pixels", Pixels(), lambda x: x)
    sides = (measure(ArrayImages(side), extractor, progress=False) for side in (SAMPLES, REFERENCE))
    return compare(*sides).metrics


def test_the_frechet_distance(ours: dict[str, float]) -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    found = theirs(FrechetInceptionDistance(feature=Pixels()).set_dtype(torch.float64))
    assert ours["FD-Pixels"] == pytest.approx(float(found), rel=1e-5)


def test_the_kernel_distance_of_the_whole_set(ours: dict[str, float]) -> None:
    """Subsets of all images, so that it does not matter which are drawn."""
    from torchmetrics.image.kid import KernelInceptionDistance

    mean, std = theirs(KernelInceptionDistance(feature=Pixels(), subsets=2, subset_size=len(SAMPLES)))
    assert ours["KD-Pixels"] == pytest.approx(float(mean), rel=1e-5)
    assert float(std) == pytest.approx(0, abs=1e-9)


def test_the_inception_score_of_one_split() -> None:
    from torchmetrics.image.inception import InceptionScore

    metric = InceptionScore(feature=Pixels(), splits=1)
    metric.update(tensors(SAMPLES))
    logits = Pixels()(tensors(SAMPLES))
    tally = Tally("Pixels", len(SAMPLES))
    tally.add(Activations(logits, probabilities=logits.softmax(1)), 0)
    score = tally.statistics().score
    assert score is not None
    assert score[0] == pytest.approx(float(metric.compute()[0]), rel=1e-6)
