"""Builders of what the sections of a config name: a dataset, an objective, a model and published weights."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from tread.data import DATASETS, Dataset
from tread.errors import ConfigError, shortened, shown
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
    """The state dict in a file; of the several in a checkpoint of facebookresearch/DiT's train.py, that of its average.

    Such a checkpoint keeps its command line as an `argparse.Namespace`, the one class that is allowed beside tensors.
    """
    if not path.is_file():
        raise ConfigError(f"model.weights names {str(path)!r}, which does not exist.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with safe_globals([Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything in the unpickler
        if code := _code_in(path):
            raise ConfigError(
                f"model.weights names {shown(str(path))}, which holds more than tensors ({shortened(code, 80)}), and "
                "reading that could run code: save the state dict alone, with torch.save or as .safetensors."
            ) from error
        raise ConfigError(f"model.weights names {str(path)!r}, which cannot be read; get it again.") from error
    if isinstance(content, Mapping):
        content = next((content[part] for part in ("ema", "model") if isinstance(content.get(part), Mapping)), content)
    if not isinstance(content, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()
    ):
        raise ConfigError(
            f"model.weights names {shown(str(path))}, which holds no tensors by name; give a state dict, or a "
            "checkpoint of facebookresearch/DiT."
        )
    return dict(content)


def _code_in(path: Path) -> str:
    """The classes and functions in a file that torch's safe unpickler refuses, listed; "" if there are none or torch
    cannot read the file."""
    try:
        refused = get_unsafe_globals_in_checkpoint(path)
    except Exception:  # as above
        return ""
    return ", ".join(sorted(name for name in refused if name != "argparse.Namespace"))
