"""The named sizes have the published sizes, and every one of them builds."""

import pytest
import torch

from tread.errors import ConfigError
from tread.models import SIZES, DiT, model_size


def _on_meta(name: str) -> DiT:
    with torch.device("meta"):
        return DiT(**model_size(name), input_size=32, in_channels=4, out_channels=8, num_classes=1000)


def _count(patch: int, depth: int, width: int) -> int:
    """Parameters of a DiT on 4 channels with learned variance and 1000 classes, term by term."""
    patch_embed = (4 * patch**2 + 1) * width
    time_embed = (256 + 1) * width + (width + 1) * width
    label_embed = 1001 * width
    attention = (width + 1) * 3 * width + (width + 1) * width
    mlp = (width + 1) * 4 * width + (4 * width + 1) * width
    modulation = (width + 1) * 6 * width
    final = (width + 1) * 2 * width + (width + 1) * 8 * patch**2
    return patch_embed + time_embed + label_embed + depth * (attention + mlp + modulation) + final


@pytest.mark.parametrize(
    ("name", "depth", "width", "millions"),
    [("S/2", 12, 384, 33), ("B/2", 12, 768, 130), ("L/2", 24, 1024, 458), ("XL/2", 28, 1152, 675)],
)
def test_parameter_counts_are_the_published_ones(name: str, depth: int, width: int, millions: int):
    count = sum(parameter.numel() for parameter in _on_meta(name).parameters())
    assert count == _count(2, depth, width)
    assert round(count / 1e6) == millions


@pytest.mark.parametrize("name", SIZES)
def test_every_size_builds(name: str):
    model = _on_meta(name)
    x = torch.zeros(2, 4, 32, 32, device="meta")
    assert model(x, x[:, 0, 0, 0], torch.zeros(2, dtype=torch.int64, device="meta")).shape == (2, 8, 32, 32)


def test_the_names_are_every_size_with_every_patch_plain_and_modern():
    plain = {f"{letter}/{patch}" for letter in ("S", "B", "L", "XL") for patch in (2, 4, 8)} | {"tiny"}
    assert set(SIZES) == plain | {f"modern-{name}" for name in plain}
    assert len(SIZES) == 26


def test_modern_changes_the_layers_and_keeps_the_size():
    for name in (name for name in SIZES if not name.startswith("modern-")):
        plain, modern = model_size(name), model_size(f"modern-{name}")
        assert {key: modern[key] for key in plain} == plain
        assert set(modern) - set(plain) == {"rope", "qk_norm", "norm", "mlp"}


def test_a_size_belongs_to_its_caller():
    model_size("S/2")["depth"] = 1
    assert model_size("S/2")["depth"] == 12


@pytest.mark.parametrize(("given", "nearest"), [("XL2", "XL/2"), ("modern_S/2", "modern-S/2"), ("tinny", "tiny")])
def test_an_unknown_name_gets_the_nearest(given: str, nearest: str):
    with pytest.raises(ConfigError, match=f"'{given}'.*(?i:did you mean) '{nearest}'"):
        model_size(given)
