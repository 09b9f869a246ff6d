"""Data for training: the `Dataset` interface, three datasets, the order of samples, and captioned data.

A dataset is added by writing one file with the members of `dataset.Dataset` and one line in DATASETS; the contract test
in tests/data/test_datasets.py picks it up. Its constructor's arguments are the settings of its config.

It imports `tread.routing` (noise), `tread.files` and `tread.errors`; no model, objective or job.
"""

from tread.data.dataset import Dataset
from tread.data.digits import Digits
from tread.data.images import ImageFolder
from tread.data.latents import Latents
from tread.data.order import Groups, Order, StepSampler, Visited, positions, split
from tread.data.readable import Readable
from tread.errors import DataError

DATASETS: dict[str, type[Dataset]] = {"digits": Digits, "images": ImageFolder, "latents": Latents}

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "Digits",
    "Groups",
    "ImageFolder",
    "Latents",
    "Order",
    "Readable",
    "StepSampler",
    "Visited",
    "positions",
    "split",
]
