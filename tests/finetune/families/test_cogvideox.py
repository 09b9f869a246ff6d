"""CogVideoX: v as the target, whole tokens of 1.5, the first frame's latents, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.model.source import Source
from tread.finetune.target import VelocityTarget

Folder = Callable[[str], Path]


def pixels(frames: int) -> Tensor:
    """(1, 3, F, 64, 64) in [-1, 1]."""
    return torch.randint(256, (1, 3, frames, 64, 64), generator=torch.Generator().manual_seed(0)) / 127.5 - 1


@pytest.mark.parametrize("scheduler", ["CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"])
def test_states_and_the_loss_are_those_of_the_stock_scheduler(scheduler: str) -> None:
    """The error of v is that of x, as the scheduler finds it, divided by the noise's variance."""
    settings = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "snr_shift_scale": 3.0}
    stock: Any = getattr(diffusers, scheduler)(**settings)
    target = VelocityTarget.from_scheduler(dict(stock.config) | {"_class_name": scheduler}, shift=None, distance="l2")
    x, noise, off = drawn(4, 2, 3, 4), drawn(4, 2, 3, 4, seed=1), 0.1 * drawn(4, 2, 3, 4, seed=2)
    time = torch.tensor([0, 300, 800, 999])
    noisy = target.mix(x, noise, time)
    assert_close(noisy, stock.add_noise(x, noise, time), rtol=1e-5, atol=1e-5, check_dtype=False)
    v = stock.get_velocity(x, noise, time)
    assert_close(target.error(v, x, noise, time), torch.zeros_like(x), atol=1e-9, rtol=0)
    guess = stock.get_velocity(v + off, noisy, time)  # x, from v and the state: the same formula
    expected = (guess - x).square() / (1 - stock.alphas_cumprod[time]).view(-1, 1, 1, 1)
    assert_close(target.error(v + off, x, noise, time), expected, rtol=1e-2, atol=1e-5, check_dtype=False)
    u = (torch.arange(4000) + 0.5) / 4000
    assert torch.equal(target.times(u, 64).bincount(), torch.full((1000,), 4))


def test_a_model_that_predicts_noise_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    file = "scheduler/scheduler_config.json"
    place = changed(pipeline_folder("cogvideox"), tmp_path / "m", file, prediction_type="epsilon")
    family = open_family("cogvideox", Source(str(place)))
    with pytest.raises(ConfigError, match="prediction_type of the scheduler is 'epsilon'"):
        family.target(shift=None, distance="l2")
    with pytest.raises(ConfigError, match=r"flow_schedule_shift is 3.0, but the model is no flow model.*leave it out"):
        family.target(shift=3.0, distance="l2")


def test_odd_clips_begin_with_their_first_latent_frame_twice(pipeline_folder: Folder) -> None:
    """As the pipeline draws nine frames: four latent ones, of which it discards the first."""
    family, pipeline = opened(pipeline_folder("cogvideox-1.5-i2v"), "cogvideox")
    with torch.no_grad():
        encoded = pipeline.vae.encode(pixels(9)).latent_dist.mean * pipeline.vae.config.scaling_factor
    found = family.encode_pixels(pipeline, pixels(9))["mean"]
    assert_close(found, torch.cat([encoded[:, :, :1], encoded], dim=2))
    assert family.encode_pixels(pipeline, pixels(1))["mean"].shape[2] == 2
    drawing = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 1, "output_type": "latent"}
    image = torch.zeros(1, 3, 64, 64)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(prompt="a cat", image=image, **drawing, return_dict=False)[0].transpose(1, 2).shape == found.shape


def test_the_first_frame_is_given_in_channels_of_its_own(pipeline_folder: Folder) -> None:
    """1.5 divides by the scaling factor that everything else is multiplied by."""
    for name, scale in (("cogvideox-i2v", 0.7), ("cogvideox-1.5-i2v", 1 / 0.7)):
        family, pipeline = opened(pipeline_folder(name), "cogvideox")
        batch = family.encode_pixels(pipeline, pixels(13)) | text_of(family, pipeline, PROMPTS[:1])
        noisy = drawn(*batch["mean"].shape)
        with torch.no_grad(), recorded(pipeline.transformer) as calls:
            family.predict(pipeline.transformer, noisy, torch.tensor([700]), batch)
            first = pipeline.vae.encode(pixels(13)[:, :, :1]).latent_dist.mean[:, :, 0]
        given = calls[0]["hidden_states"]  # (B, f, 2 C, h, w)
        assert torch.equal(given[:, :, :4], noisy.transpose(1, 2))
        assert_close(given[:, 0, 4:], first * scale)
        assert (given[:, 1:, 4:] == 0).all()


def test_sizes_and_texts_that_do_not_fit(pipeline_folder: Folder) -> None:
    family, _ = opened(pipeline_folder("cogvideox-i2v"), "cogvideox")
    assert family.unfit(64, 64, 9) is None
    assert "for 64x64 pixels and the sample would be 96x64" in family.unfit(96, 64, 9)
    assert "the first frame is given" in family.unfit(64, 64, 1)
    assert opened(pipeline_folder("cogvideox-1.5-i2v"), "cogvideox")[0].unfit(96, 64, 9) is None
    source = opened(pipeline_folder("cogvideox"), "cogvideox")[0].source
    assert open_family("cogvideox", source).unfit(96, 64, 1) is None
    with pytest.raises(ConfigError, match=r"tokenizer_max_length is 64, but the positions.*32 tokens: leave it out"):
        open_family("cogvideox", source, 64)
