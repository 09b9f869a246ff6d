"""Kandinsky 5: texts of one length, the given first frame, sizes, and what is refused before anything is encoded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.tasks import make_config, make_task
from tests.finetune.trained import PROMPTS, drawn, opened, text_of
from tests.tiny.pictures import write_clips, write_noise
from tread.errors import ConfigError, DataError
from tread.finetune.families import open_family
from tread.finetune.loss import LATENT, NOISE, TIME
from tread.finetune.model.source import Source
from tread.finetune.preflight import check_batch
from tread.routing import noise

Folder = Callable[[str], Path]


def test_texts_are_the_stock_pipeline_s_alone(pipeline_folder: Folder) -> None:
    """In a batch the pipeline pads them; here each is as it would be alone."""
    family, pipeline = opened(pipeline_folder("kandinsky5_video"), "kandinsky5_video")
    for prompt, text in zip(PROMPTS, family.encode_text(pipeline, PROMPTS), strict=True):
        with torch.no_grad():
            embeds, pooled, ends = pipeline.encode_prompt([prompt])
        assert len(text["embeds"]) == ends[-1]
        assert_close(text["embeds"], embeds[0], rtol=1e-4, atol=1e-5)
        assert_close(text["pooled"], pooled[0], rtol=1e-4, atol=1e-5)


def test_texts_of_two_lengths_are_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    family, pipeline = opened(pipeline_folder("kandinsky5_image"), "kandinsky5_image")
    with pytest.raises(
        ConfigError, match=r"a batch of kandinsky5_image has texts of \d+ and \d+ tokens, but the model"
    ):
        text_of(family, pipeline, PROMPTS)
    config = make_config(Path(family.source.name_or_path), write_noise(tmp_path / "data"), model_family=family.name)
    with pytest.raises(ConfigError, match=r"train_batch_size is 2, but the model of kandinsky5_image would read"):
        check_batch(config, family)


def test_the_condition_of_a_first_frame(pipeline_folder: Folder) -> None:
    """The frame alone is encoded; zeros and a mask of it are the other channels."""
    family, pipeline = opened(pipeline_folder("kandinsky5_video-i2v-first"), "kandinsky5_video")
    pixels = drawn(1, 3, 5, 32, 48).clamp(-1, 1)
    batch = family.encode_pixels(pipeline, pixels)
    with torch.no_grad():
        alone = pipeline.vae.encode(pixels[:, :, :1]).latent_dist.mean * pipeline.vae.config.scaling_factor
    assert_close(batch["mean"][:, :, :1], alone)
    seen: list[Tensor] = []

    def fake(*, hidden_states: Tensor, **arguments: Any) -> Tensor:
        seen.append(hidden_states)
        return hidden_states[..., :4]

    noisy, model = drawn(1, 4, 2, 4, 6), fake
    batch |= {"text.embeds": torch.zeros(1, 3, 16), "text.pooled": torch.zeros(1, 16)}
    family.predict(model, noisy, torch.tensor([0.5]), batch)  # pyright: ignore[reportArgumentType]
    latents, condition, mask = seen[0].split([4, 4, 1], dim=-1)  # (1, f, h, w, C)
    assert_close(latents.movedim(-1, 1), torch.cat([alone, noisy[:, :, 1:]], dim=2))
    assert condition.count_nonzero() == 0
    assert mask[:, 0].min() == 1
    assert mask[:, 1:].max() == 0
    with pytest.raises(DataError, match="the sample is an image, which an image-to-video model would learn to copy"):
        family.encode_pixels(pipeline, pixels[:, :, :1])


@pytest.mark.filterwarnings("ignore")
def test_the_loss_is_that_of_the_stock_transformer(pipeline_folder: Folder, tmp_path: Path) -> None:
    """Image to video, dense: by hand, without the given frame."""
    config = make_config(
        pipeline_folder("kandinsky5_video-i2v-first"),
        {"instance_data_dir": str(write_clips(tmp_path / "clips")), "video": {"num_frames": 5}},
        model_family="kandinsky5_video",
        resolution=32,
        cache_dir=str(tmp_path / "cache"),
        train_batch_size=1,
        tread_config=None,
    )
    task = make_task(config, tmp_path)
    batch = next(task.batches(3))
    found, at, tensors = task.loss(task.model, batch), torch.tensor([3]), batch.tensors
    shape = (4, 2, 4, 4)
    x = tensors["mean"] + tensors["std"] * noise.per_sample_normal(config.seed, at, shape, LATENT)
    normal = noise.per_sample_normal(config.seed, at, shape, NOISE)
    time = task.target.times(noise.uniform(config.seed, TIME, at), 8)
    noisy = (1 - time) * x + time * normal
    noisy[:, :, 0] = tensors["mean"][:, :, 0]
    mask = torch.zeros(1, 1, 2, 4, 4)
    mask[:, :, 0] = 1
    velocity = task.model(
        hidden_states=torch.cat([noisy, torch.zeros_like(noisy), mask], dim=1).movedim(1, -1),
        encoder_hidden_states=tensors["text.embeds"],
        pooled_projections=tensors["text.pooled"],
        timestep=time * 1000,
        visual_rope_pos=[torch.arange(2), torch.arange(2), torch.arange(2)],
        text_rope_pos=torch.arange(tensors["text.embeds"].shape[1]),
        scale_factor=(1, 3.16, 3.16),
        return_dict=False,
    ).movedim(-1, 1)
    expected = (velocity - (normal - x)).square()[:, :, 1:].mean()
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_positions_are_scaled_by_the_size(pipeline_folder: Folder) -> None:
    family, _ = opened(pipeline_folder("kandinsky5_video"), "kandinsky5_video")
    seen: list[Any] = []

    def fake(*, hidden_states: Tensor, scale_factor: Any, **arguments: Any) -> Tensor:
        seen.append(scale_factor)
        return hidden_states[..., :4]

    model: Any = fake
    text = {"text.embeds": torch.zeros(1, 3, 16), "text.pooled": torch.zeros(1, 16)}
    for rows, columns in ((64, 96), (64, 64), (90, 160)):
        family.predict(model, torch.zeros(1, 4, 1, rows, columns), torch.tensor([0.5]), text)
    assert seen == [(1, 2, 2), (1, 2, 2), (1, 3.16, 3.16)]


def test_a_caption_that_the_stock_pipeline_cannot_cut_is_said(pipeline_folder: Folder) -> None:
    family, pipeline = opened(pipeline_folder("kandinsky5_image-edit"), "kandinsky5_image")
    with pytest.raises(
        DataError, match=r"the caption 'a photo of .* more tokens than the 1024 that a Kandinsky5I2IPip"
    ):
        family.encode_seen(pipeline, "a photo of " * 400, [Image.new("RGB", (96, 64))])


def test_what_cannot_be_tuned_is_said(pipeline_folder: Folder) -> None:
    source = Source(str(pipeline_folder("kandinsky5_video")))
    source.config("transformer")["attention_type"] = "nabla"
    with pytest.raises(
        ConfigError, match=r"has sparse attention \(nabla\), which cannot be routed: set .*with tread\.attach"
    ):
        open_family("kandinsky5_video", source)
    with pytest.raises(ConfigError, match=r"is a Kandinsky5T2VPipeline: set model_family to 'kandinsky5_video'"):
        open_family("kandinsky5_image", source)
