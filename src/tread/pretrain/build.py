"""From the sections of a config to what they name: a dataset, an objective, a model and published weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tread.data import DATASETS, Dataset
from tread.errors import ConfigError
from tread.kernels.checkpointing import Checkpointing
from tread.models import DiT, model_size
from tread.objectives import Objective, build
from tread.pretrain.settings import ModelConfig


def build_dataset(settings: Mapping[str, Any]) -> Dataset:
    """The dataset of a `data` section: its name, and the arguments of its class."""
    settings = dict(settings)
    return DATASETS[settings.pop("name")](**settings)


def build_objective(settings: Mapping[str, Any]) -> Objective:
    """The objective of an `objective` section: its name and its fields."""
    settings = dict(settings)
    return build(settings.pop("name"), settings)


def build_model(
    config: ModelConfig, shape: tuple[int, int, int], num_classes: int, *, checkpointing: Checkpointing
) -> DiT:
    """The model of a `model` section for samples of `shape` (C, H, W), dense and freshly initialised."""
    channels, height, width = shape
    return DiT(
        input_size=(height, width),
        in_channels=channels,
        num_classes=num_classes,
        checkpointing=checkpointing,
        **(model_size(config.size) | config.overrides()),
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"model.weights names {str(path)!r}, which does not exist.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes of the unpickler
        raise ConfigError(f"model.weights names {str(path)!r}, which cannot be read; get it again.") from error
