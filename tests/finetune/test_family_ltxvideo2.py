"""LTX-2: the video's prediction without sound, weights that stay as they are, latents, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of
from tests.tiny.pipelines.ltxvideo2 import AS_VIDEO, PLAIN
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.model.source import Source

Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", ["ltxvideo2", pytest.param("ltxvideo2-2.3", marks=pytest.mark.contract)])
def test_the_prediction_is_the_stock_model_s_without_sound(pipeline_folder: Folder, name: str) -> None:
    """Whatever sound the isolated model is given; with attention between the streams it would be another."""
    family, pipeline = opened(pipeline_folder(name), "ltxvideo2")
    pipeline.set_progress_bar_config(disable=True)
    model = pipeline.transformer
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2, "frame_rate": 24.0}
    with recorded(model) as calls:
        pipeline(PROMPTS[0], **size, **PLAIN, **AS_VIDEO, guidance_scale=1.0, output_type="latent")
    stock = calls[0]
    noisy = pipeline._unpack_latents(stock["hidden_states"], 2, 2, 3)
    with torch.no_grad():
        ours = family.predict(model, noisy, stock["timestep"] / 1000, text_of(family, pipeline, PROMPTS[:1]))
        ours = pipeline._pack_latents(ours)
        joint, _ = model(**stock, return_dict=False)
        for sound in (stock["audio_hidden_states"], torch.randn_like(stock["audio_hidden_states"])):
            apart = stock | {"audio_hidden_states": sound, "isolate_modalities": True}
            assert_close(ours, model(**apart, return_dict=False)[0])
    assert (ours - joint).abs().max() > 1e-3


def test_weights_of_sound_stay_as_they_are(pipeline_folder: Folder) -> None:
    """Neither the audio's stream nor the attention between both gets a gradient, and no adapter."""
    family, pipeline = opened(pipeline_folder("ltxvideo2"), "ltxvideo2")
    model = pipeline.transformer
    batch: Any = {"mean": drawn(1, 8, 2, 2, 3)} | text_of(family, pipeline, PROMPTS[:1])
    family.predict(model, batch["mean"], torch.tensor([0.7]), batch).square().mean().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    sound = {name for name, _ in model.named_parameters() if "audio" in name or "av_cross" in name or "a2v" in name}
    assert moved
    assert not moved & sound
    assert {name for name, _ in model.named_parameters()} - moved == sound
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    adapted = [name for name in linears if name.endswith(tuple(f".{target}" for target in family.lora_targets))]
    assert len(adapted) == 4 * 8
    assert not set(adapted) & {name.removesuffix(".weight") for name in sound}


@torch.no_grad()
def test_latents_decode_in_the_stock_pipeline(pipeline_folder: Folder) -> None:
    """By its own denormalisation; and the first latent frame is that of the first frame alone."""
    family, pipeline = opened(pipeline_folder("ltxvideo2-first"), "ltxvideo2")
    clip = torch.randint(256, (1, 3, 17, 64, 96), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    latents = family.encode_pixels(pipeline, clip)["mean"]
    assert latents.shape == (1, 8, 3, 2, 3)
    vae = pipeline.vae
    stock = pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    assert_close(stock, vae.encode(clip).latent_dist.mode())
    assert_close(family.encode_pixels(pipeline, clip[:, :, :1])["mean"], latents[:, :, :1])
    batch: Any = {"mean": latents}
    weight = family.weight(batch)
    assert weight is not None
    assert weight[0, 0].flatten(1).tolist() == [[0] * 6, [1] * 6, [1] * 6]


def test_the_frame_rate_moves_frames_in_time(pipeline_folder: Folder) -> None:
    source = Source(str(pipeline_folder("ltxvideo2")))
    pipeline = source.pipeline(*source.parts)
    ends = []
    for rate in (24, 12):
        family = open_family("ltxvideo2", source, frame_rate=rate)
        batch: Any = {"mean": drawn(2, 8, 3, 2, 3)} | text_of(family, pipeline, PROMPTS)
        with torch.no_grad(), recorded(pipeline.transformer) as calls:
            family.predict(pipeline.transformer, batch["mean"], torch.tensor([0.7, 0.7]), batch)
        stock = pipeline.transformer.rope.prepare_video_coords(2, 3, 2, 3, torch.device("cpu"), fps=rate)
        assert_close(calls[0]["video_coords"], stock)
        ends.append(stock[0, 0, -1, 1].item())
    assert ends == [pytest.approx(17 / 24), pytest.approx(17 / 12)]


def test_what_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    source = Source(str(pipeline_folder("ltxvideo2")))
    with pytest.raises(ConfigError, match=r"tokenizer_max_length is 100, but .* set it to a multiple of 8, or leave"):
        open_family("ltxvideo2", source, 100)
    with pytest.raises(ConfigError, match="is a LTX2Pipeline: set model_family to 'ltxvideo2'"):
        open_family("ltxvideo", source)
    few = changed(
        pipeline_folder("ltxvideo2"), tmp_path / "m", "scheduler/scheduler_config.json", stochastic_sampling=True
    )
    with pytest.raises(ConfigError, match=r"is a distilled LTX-Video .*set pretrained_model_name_or_path to a dev"):
        open_family("ltxvideo2", Source(str(few)))


def test_the_connectors_are_checked_like_any_part(pipeline_folder: Folder) -> None:
    """Their class belongs to the stock pipeline's module, not to diffusers' own names."""
    source = Source(str(pipeline_folder("ltxvideo2")))
    assert type(source.check("connectors")["connectors"]).__name__ == "LTX2TextConnectors"
