"""What the tests of the cache share: encoders that are arithmetic, and one way to encode a folder of pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tread.config.schema import parse
from tread.data.captioned.entries import DataConfig, data_configs
from tread.data.captioned.finding import Skipped
from tread.data.captioned.samples import Sample, collect
from tread.finetune.data.cache import Cache, Entry, Tensors
from tread.finetune.data.encode import encode_samples
from tread.finetune.data.items import Shapes, items_of

RNG = np.random.default_rng(1)


class Encoder:
    """Latents are pixels averaged over 8 x 8 cells; what it was called with is remembered."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.sizes = most, list[int]()

    def __call__(self, pixels: Tensor) -> Tensors:
        if len(pixels) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        self.sizes.append(len(pixels))
        mean = F.avg_pool2d(pixels[:, :, 0], 8)  # (B, 3, h, w)
        return {"mean": mean, "std": 0.01 + mean.abs() * 0.1}


class TextEncoder:
    """A caption is the codes of its letters."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.captions = most, list[str]()

    def __call__(self, captions: Sequence[str]) -> list[Tensors]:
        if len(captions) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        self.captions += captions
        return [{"codes": torch.tensor([float(ord(letter)) for letter in f"^{text}"])} for text in captions]


def pad(texts: Sequence[Tensors]) -> Tensors:
    return {"codes": torch.nn.utils.rnn.pad_sequence([text["codes"] for text in texts], batch_first=True)}


def samples_in(folder: Path, **changes: Any) -> tuple[list[Sample], list[DataConfig]]:
    settings = {"resolution": 64, **changes}
    configs = [parse(DataConfig, {**entry, **settings}) for entry in data_configs(str(folder))]
    return collect(configs, video=False, say=lambda text: None, progress=False).samples, configs


def encode(
    cache: Cache, folder: Path, encoder: Any, *, identity: str = "vae", batch_size: int = 2, **changes: Any
) -> tuple[list[Entry], list[Skipped]]:
    items = items_of(
        cache, *samples_in(folder, **changes), identity=identity, shapes=Shapes(multiple=16), progress=False
    )
    quiet: dict[str, Any] = {"say": lambda text: None, "progress": False}
    return encode_samples(cache, items, encode=encoder, batch_size=batch_size, **quiet)


def files(cache: Cache) -> dict[str, bytes]:
    found = sorted(cache.folder.glob("*/*/*.safetensors"))
    return {path.name: path.read_bytes() for path in found}
