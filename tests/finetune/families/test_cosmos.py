"""Cosmos Predict 2 and 2.5: the given first frame, times per frame, the guardrail, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of
from tread.errors import ConfigError
from tread.finetune.families import cosmos, open_family
from tread.finetune.model.source import Source

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def clip() -> Tensor:
    """Nine frames of random pixels, (1, 3, 9, 64, 96) in [-1, 1]."""
    return torch.randint(256, (1, 3, 9, 64, 96), generator=torch.Generator().manual_seed(0)) / 127.5 - 1


def test_a_given_first_frame_is_marked_and_almost_clean(pipeline_folder: Folder, clip: Tensor) -> None:
    family, pipeline = opened(pipeline_folder("cosmos-first"), "cosmos_video")
    batch = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
    noisy = drawn(*batch["mean"].shape)
    with torch.no_grad(), recorded(pipeline.transformer) as calls:
        family.predict(pipeline.transformer, noisy, torch.tensor([0.7]), batch)
    (call,) = calls
    assert call["timestep"].flatten().tolist() == pytest.approx([0.0001, 0.7, 0.7], rel=1e-3)
    assert call["condition_mask"][0, 0].flatten(1).tolist() == [[1] * 96, [0] * 96, [0] * 96]
    assert torch.equal(call["hidden_states"][:, :, 0], batch["mean"][:, :, 0])
    assert torch.equal(call["hidden_states"][:, :, 1:], noisy[:, :, 1:])
    assert call["fps"] == 16
    alone = family.encode_pixels(pipeline, clip[:, :, :1])["mean"]
    assert_close(alone, batch["mean"][:, :, :1])
    weight = family.weight(batch)
    assert weight[0, 0].flatten(1).amax(1).tolist() == weight[0, 0].flatten(1).amin(1).tolist() == [0, 1, 1]
    assert "the first frame is given" in family.unfit(96, 64, 1)


def test_2_5_is_given_a_frame_as_from_its_pipeline(pipeline_folder: Folder, clip: Tensor) -> None:
    """Every tensor of the first call; the pipeline takes the last frame of a clip, or an image through torchvision."""
    source = Source(str(pipeline_folder("cosmos25")))
    family, pipeline = open_family("cosmos25", source, first_frame=True), source.pipeline(*source.parts)
    pipeline.set_progress_bar_config(disable=True)
    with recorded(pipeline.transformer) as stock:
        pipeline(
            video=clip[:, :, :1],
            num_latent_conditional_frames=1,
            prompt=PROMPTS[0],
            **{"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 1.0},
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    batch = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
    noise = torch.randn(batch["mean"].shape, generator=torch.Generator().manual_seed(0))
    time = stock[0]["timestep"][:, 0, -1, 0, 0]
    with torch.no_grad(), recorded(pipeline.transformer) as ours:
        family.predict(pipeline.transformer, noise, time, batch)
    assert ours[0].keys() == stock[0].keys()
    for name, value in ours[0].items():
        assert_close(value, stock[0][name])
    assert ours[0]["timestep"].flatten().tolist() == pytest.approx([0.0001, time.item(), time.item()])
    weight = family.weight(batch)
    assert weight is not None
    assert weight[0, 0].flatten(1).mean(1).tolist() == [0, 1, 1]
    image = family.encode_pixels(pipeline, clip[:, :, :1])
    assert family.weight(image) is None, "a single image is drawn from text"
    assert family.takes_image
    assert not open_family("cosmos25", source).takes_image


def test_encoding_needs_no_guardrail(pipeline_folder: Folder, tmp_path: Path) -> None:
    """The released models do not bring it, and the pipeline cannot be made without."""
    place = changed(pipeline_folder("cosmos"), tmp_path / "m", "model_index.json", safety_checker=[None, None])
    source = Source(str(place))
    family = open_family("cosmos", source)
    pipeline = source.pipeline(*family.text_parts, "vae", given=family.stand_ins())
    (text,) = family.encode_text(pipeline, ["a cat"])
    assert family.collate_text([text])["embeds"].shape == (1, 512, 16)
    assert family.encode_pixels(pipeline, torch.zeros(1, 3, 1, 64, 64))["mean"].shape == (1, 16, 8, 8)


def test_a_padding_mask_needs_torchvision(
    pipeline_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = changed(pipeline_folder("cosmos"), tmp_path / "m", "transformer/config.json", concat_padding_mask=True)
    source = Source(str(place))
    found: Any = None
    monkeypatch.setattr(cosmos.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=r"with torchvision, which is not installed: run pip install torchvision"):
        open_family("cosmos", source)
    found = object()
    assert open_family("cosmos", source).name == "cosmos"
    with pytest.raises(ConfigError, match="is a Cosmos2TextToImagePipeline: set model_family to 'cosmos'"):
        open_family("cosmos_video", source)
