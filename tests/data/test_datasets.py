"""One contract for every dataset in DATASETS: a new one is picked up here and must be given an example."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset, default_collate

from tread.data import DATASETS, Dataset, Digits, ImageFolder, Latents

Make = Callable[[], Dataset]


@pytest.fixture(params=[*DATASETS, "latents: moments"])
def dataset(
    request: pytest.FixtureRequest, tmp_path: Path, image_folder: Path, write_tar: Callable, samples: Callable
) -> Dataset:
    shard, moments = tmp_path / "sample.tar", tmp_path / "moments.tar"
    examples: dict[str, Make] = {
        "digits": Digits,
        "images": lambda: ImageFolder(image_folder, size=8, flip=True),
        "latents": lambda: Latents(write_tar(shard, samples(6)), vae="sd", num_classes=3),
        "latents: moments": lambda: Latents(write_tar(moments, samples(6, (8, 2, 3))), vae="sd", num_classes=3),
    }
    return examples[request.param]()


def test_the_contract(dataset: Dataset) -> None:
    assert len(dataset) >= 6
    x, labels = default_collate([dataset[i] for i in range(6)])
    assert x.dtype == torch.float32
    assert all(isinstance(dataset[i][1], int) and 0 <= dataset[i][1] < dataset.num_classes for i in range(6))
    assert torch.equal(x, default_collate([dataset[i] for i in range(6)])[0])
    assert labels.dtype == torch.int64

    before, random_state = x.clone(), torch.get_rng_state()
    positions = torch.tensor([3, 90, 4, 1, 12345, 6])
    ready = dataset.prepare(x, 42, positions)
    assert ready.shape == (6, *dataset.shape)
    assert ready.dtype == torch.float32
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    swapped = torch.tensor([5, 0, 1, 2, 3, 4])
    assert torch.equal(dataset.prepare(x[swapped], 42, positions[swapped]), ready[swapped])

    images = dataset.to_images(ready)
    assert images.dtype == torch.uint8
    assert images.shape[:3] == (6, *dataset.shape[1:])
    assert images.shape[3] in (1, 3)
    assert images.float().std() > 1


def test_torchs_subset_takes_indices_of_any_integer_type(dataset: Dataset) -> None:
    indices = torch.tensor([4, 2])
    for chosen in (indices, indices.numpy(), indices.tolist()):
        subset = Subset(dataset, chosen)  # pyright: ignore[reportArgumentType]
        assert torch.equal(subset[1][0], dataset[2][0])
        assert type(subset[1][1]) is int
