"""Files of weights: the checkpoints of facebookresearch/DiT's train.py, and files that hold code or something else."""

import os
from argparse import Namespace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_weights import CHANNELS, SHAPE, published
from tread.errors import ConfigError
from tread.models import DiT, load_published_dit
from tread.pretrain.build import read_weights

__all__ = ["published"]


def checkpoint(path: Path, published: dict[str, Tensor], **changes: Any) -> Path:
    """What facebookresearch/DiT's train.py saves: two state dicts, the optimizer's, and the parsed command line."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0)
    optimizer.step()
    trained = {key: tensor if key == "pos_embed" else tensor + 1 for key, tensor in published.items()}
    arguments = Namespace(model="DiT-XL/2", image_size=256, global_batch_size=256, vae="ema", data_path=None)
    whole = {"model": trained, "ema": published, "opt": optimizer.state_dict(), "args": arguments}
    torch.save(whole | changes, path)
    return path


def test_a_training_checkpoint_gives_its_averaged_weights(published: dict[str, Tensor], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "0050000.pt", published)
    with pytest.raises(UnpicklingError, match=r"argparse\.Namespace"):
        torch.load(path, weights_only=True)
    model, expected = (DiT(**SHAPE, out_channels=2 * CHANNELS) for _ in range(2))
    load_published_dit(model, read_weights(path))
    load_published_dit(expected, published)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert Namespace not in torch.serialization.get_safe_globals(), "it is allowed while this file is read"
    torch.save({"model": published}, path)
    assert read_weights(path).keys() == published.keys()


class Code:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("part", ["args", "inside args", "ema", "opt"])
def test_code_in_a_training_checkpoint_is_refused_and_not_run(
    published: dict[str, Tensor], tmp_path: Path, part: str
) -> None:
    code = Code(tmp_path / "ran")
    changes = {"args": Namespace(model=code)} if part == "inside args" else {part: code}
    path = checkpoint(tmp_path / "weights.pt", published, **changes)
    with pytest.raises(ConfigError) as error:
        read_weights(path)
    assert str(error.value) == (
        f"model.weights names {str(path)!r}, which holds more than tensors (posix.system), and reading that could run "
        "code: save the state dict alone, with torch.save or as .safetensors."
    )
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists(), "it would have run"


@pytest.mark.parametrize("content", [[1], {"ema": 3}, {"ema": {"a": 1}}, {1: torch.zeros(1)}, torch.zeros(2), "text"])
def test_other_files_of_torch_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="which holds no tensors by name; give a state dict, or a checkpoint of"):
        read_weights(tmp_path / "weights.pt")
