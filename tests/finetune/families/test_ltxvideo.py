"""LTX-Video: first frames, positions in seconds, and the models and clips that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of
from tests.tiny.pipelines.case import first_frame
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.model.source import Source

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def clip() -> Tensor:
    """Seventeen frames of random pixels, (1, 3, 17, 64, 96) in [-1, 1]."""
    return torch.randint(256, (1, 3, 17, 64, 96), generator=torch.Generator().manual_seed(0)) / 127.5 - 1


def call(family: Any, pipeline: Any, batch: dict[str, Tensor], time: float) -> dict[str, Any]:
    """The arguments that reach the transformer."""
    noisy = drawn(*batch["mean"].shape)
    with torch.no_grad(), recorded(pipeline.transformer) as calls:
        family.predict(pipeline.transformer, noisy, torch.tensor([time]), batch)
    return calls[0]


@pytest.mark.parametrize("name", ["ltxvideo-first", "ltxvideo-condition"])
def test_a_given_first_frame_is_clean_at_time_zero(pipeline_folder: Folder, clip: Tensor, name: str) -> None:
    source = Source(str(pipeline_folder(name)))
    family, pipeline = open_family("ltxvideo", source, first_frame=True), source.pipeline(*source.parts)
    assert family.takes_image
    batch: Any = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
    assert batch["mean"].shape == (1, 8, 3, 2, 3)
    assert_close(family.encode_pixels(pipeline, clip[:, :, :1])["mean"], batch["mean"][:, :, :1])
    weight = family.weight(batch)
    assert weight is not None
    assert weight[0, 0].flatten(1).tolist() == [[0] * 6, [1] * 6, [1] * 6]
    given = call(family, pipeline, batch, 0.7)
    assert given["timestep"].tolist() == [[0.0] * 6 + [pytest.approx(700)] * 12]
    assert torch.equal(given["hidden_states"][:, :6], batch["mean"][:, :, 0].flatten(2).transpose(1, 2))
    image = family.encode_pixels(pipeline, clip[:, :, :1])
    assert family.weight(image) is None, "a single image is drawn from text"
    assert call(family, pipeline, {**batch, **image}, 0.7)["timestep"].shape == (1,)


@pytest.mark.parametrize("rate", [25, 10])
def test_a_first_frame_reaches_the_model_as_from_the_condition_pipeline(
    pipeline_folder: Folder, clip: Tensor, rate: int
) -> None:
    """Of the pipeline that draws from text or a frame; without the noise that it adds to the frame by default."""
    source = Source(str(pipeline_folder("ltxvideo-condition")))
    family = open_family("ltxvideo", source, first_frame=True, frame_rate=rate)
    assert family.call_arguments() == {"frame_rate": rate}
    pipeline = source.pipeline(*source.parts)
    pipeline.set_progress_bar_config(disable=True)
    settings = {"height": 64, "width": 96, "num_frames": 17, "num_inference_steps": 2, "guidance_scale": 1.0}
    with recorded(pipeline.transformer) as stock:
        pipeline(
            prompt=PROMPTS[0],
            **first_frame(clip),
            **settings,
            **family.call_arguments(),
            image_cond_noise_scale=0.0,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        )
    batch: Any = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
    ours = call(family, pipeline, batch, stock[0]["timestep"].max().item() / 1000)
    for name in ("timestep", "video_coords"):
        assert_close(ours[name], stock[0][name], rtol=1e-5, atol=1e-5, check_dtype=False)
    assert_close(ours["hidden_states"][:, :6], stock[0]["hidden_states"][:, :6], rtol=1e-4, atol=1e-4)
    seconds = ours["video_coords"][0, 0].view(3, 6)[:, 0]
    assert_close(seconds, torch.tensor([0.0, 1.0, 9.0]) / rate)


def test_positions_follow_the_frame_rate(pipeline_folder: Folder, clip: Tensor) -> None:
    _, pipeline = opened(pipeline_folder("ltxvideo"), "ltxvideo")
    for rate, expected in ((None, 25), (12, 12)):
        family = open_family("ltxvideo", Source(str(pipeline_folder("ltxvideo"))), frame_rate=rate)
        batch: Any = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
        assert call(family, pipeline, batch, 0.5)["rope_interpolation_scale"] == (8 / expected, 32, 32)


def test_first_frame_chooses_the_pipeline(pipeline_folder: Folder) -> None:
    source = Source(str(pipeline_folder("ltxvideo")))
    assert not open_family("ltxvideo", source).takes_image
    family = open_family("ltxvideo", source, first_frame=True)
    assert (family.source.pipeline_name, family.takes_image) == ("LTXImageToVideoPipeline", True)
    assert source.pipeline_name == "LTXPipeline"
    with pytest.raises(ConfigError, match=r"first_frame is true, but .* is a FluxPipeline.*leave first_frame out"):
        open_family("flux", Source(str(pipeline_folder("flux"))), first_frame=True)


def test_distilled_models_are_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    file = "scheduler/scheduler_config.json"
    source = Source(str(changed(pipeline_folder("ltxvideo-condition"), tmp_path / "m", file, stochastic_sampling=True)))
    with pytest.raises(ConfigError, match=r"is a distilled LTX-Video.*set pretrained_model_name_or_path to a dev"):
        open_family("ltxvideo", source)
