"""Data for training: the `Dataset` interface, three datasets, the order of samples, and captioned data.

A dataset (`Dataset`) is a map:

    len(ds)                          number of samples
    ds[i]                            (x float32 tensor, label int), the same every time
    ds.shape                         (C, H, W) of what the model sees
    ds.num_classes                   labels are 0..num_classes-1
    ds.prepare(x, seed, positions)   (B, ...) as collated -> (B, C, H, W): the random part, on x's device
    ds.to_images(x)                  (B, C, H, W) -> uint8 (B, H, W, 3 or 1), for a preview

`prepare` is a pure function of the seed and of each sample's global position in the run (`order.positions`),
so its result does not depend on the device, the number of processes or a resume. It samples and scales
latents, flips images, and returns digits unchanged.

A dataset is added by writing one file with these members and one line in DATASETS; the contract test in
tests/data/test_datasets.py picks it up. Its constructor's arguments are the settings of its config.

It imports `tread.routing` (noise), `tread.files` and `tread.errors`; no model, objective or job.
"""

from tread.data.dataset import Dataset
from tread.data.digits import Digits
from tread.data.images import ImageFolder
from tread.data.latents import Latents
from tread.data.order import Order, StepSampler, Visited, positions, split
from tread.errors import DataError

DATASETS: dict[str, type[Dataset]] = {"digits": Digits, "images": ImageFolder, "latents": Latents}

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "Digits",
    "ImageFolder",
    "Latents",
    "Order",
    "StepSampler",
    "Visited",
    "positions",
    "split",
]
