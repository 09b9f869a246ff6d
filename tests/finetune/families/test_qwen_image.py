"""Qwen-Image: masks that are made only where they are needed, packing, and the references of Edit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.tasks import make_config, make_task
from tests.finetune.trained import PROMPTS, drawn, opened, text_of
from tests.tiny.pictures import write_noise
from tests.tiny.pipelines.qwen_image import AREA
from tread.data.captioned.buckets import RATIOS, Bucket, bucket_of
from tread.data.captioned.entries import DataConfig
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.families.qwen_image import QwenImage
from tread.finetune.loss import LATENT, NOISE, TIME
from tread.finetune.model.source import Source
from tread.routing import noise


@pytest.fixture
def qwen(pipeline_folder: Callable[[str], Path]) -> tuple[QwenImage, Any]:
    return opened(pipeline_folder("qwen_image"), "qwen_image")


@torch.no_grad()
def test_a_mask_is_made_where_lengths_differ(qwen: tuple[QwenImage, Any]) -> None:
    """As the pipeline makes it; a text alone has none."""
    family, pipeline = qwen
    batch = text_of(family, pipeline, PROMPTS)
    embeds, mask = pipeline.encode_prompt(PROMPTS)
    assert torch.equal(batch["text.mask"], mask)
    assert_close(batch["text.embeds"], embeds)
    assert text_of(family, pipeline, ["a photo", "a picture"]).keys() == {"text.embeds"}


def test_patches_come_back_where_they_were(qwen: tuple[QwenImage, Any]) -> None:
    noisy, seen = drawn(2, 16, 4, 6), []

    def fake(*, hidden_states: Tensor, img_shapes: Any, **arguments: Any) -> tuple[Tensor]:
        seen.append((hidden_states.shape, img_shapes))
        return (hidden_states,)

    model: Any = fake
    batch = {"text.embeds": torch.zeros(2, 3, 16)}
    assert torch.equal(qwen[0].predict(model, noisy, torch.tensor([0.25, 0.9]), batch), noisy)
    assert seen == [((2, 6, 64), [[(1, 2, 3)], [(1, 2, 3)]])]


def picture(*size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(sum(size)).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def to_pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, None] / 127.5 - 1  # (1, 3, 1, H, W)


def test_references_of_two_sizes_are_the_stock_pipeline_s(pipeline_folder: Callable[[str], Path]) -> None:
    """A target of a third size; the order of the references counts, and the text encoder sees them."""
    family, pipeline = opened(pipeline_folder("qwen_image-edit-2511"), "qwen_image")
    pipeline.set_progress_bar_config(disable=True)
    images = [picture(64, 96), picture(96, 64)]

    def predict(images: list[Image.Image]) -> Tensor:
        text = family.collate_text([family.encode_seen(pipeline, "join them", images)])
        batch = {f"text.{name}": value for name, value in text.items()}
        for name, image in zip(("reference", "reference_2"), images, strict=True):
            batch[f"{name}.mean"] = family.encode_pixels(pipeline, to_pixels(image))["mean"]
        with torch.no_grad():
            return family.predict(pipeline.transformer, drawn(1, 16, 4, 6), torch.ones(1), batch)

    seen: list[Tensor] = []
    hook = pipeline.transformer.register_forward_hook(lambda model, args, output: seen.append(output[0]))
    size: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 2, "true_cfg_scale": 1.0}
    pipeline(image=images, prompt="join them", **size, generator=torch.Generator().manual_seed(0))
    hook.remove()
    velocity = predict(images)
    assert_close(pipeline._pack_latents(velocity, 1, 16, 4, 6), seen[0][:, :6], rtol=1e-4, atol=1e-4)
    assert (predict(images[::-1]) - velocity).abs().max() > 1e-3


def test_the_loss_is_that_of_the_stock_transformer(pipeline_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Dense, with two references: by hand from the cached latents, text and the hashed noise and time."""
    data = str(write_noise(tmp_path / "data", [(64, 64)]))
    entry = {"instance_data_dir": data, "conditioning_data_dir": [data, data], "conditioning_type": "reference"}
    config = make_config(
        pipeline_folder("qwen_image-edit-2511"),
        entry,
        model_family="qwen_image",
        resolution=64,
        cache_dir=str(tmp_path / "cache"),
        train_batch_size=1,
        tread_config=None,
    )
    task = make_task(config, tmp_path)
    batch = next(task.batches(3))
    found, at, tensors = task.loss(task.model, batch), torch.tensor([3]), batch.tensors
    x = tensors["mean"] + tensors["std"] * noise.per_sample_normal(config.seed, at, (16, 8, 8), LATENT)
    normal = noise.per_sample_normal(config.seed, at, (16, 8, 8), NOISE)
    time = task.target.times(noise.uniform(config.seed, TIME, at), 16)

    def packed(latents: Tensor) -> Tensor:
        return torch.nn.functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)

    images = ((1 - time) * x + time * normal, tensors["reference.mean"], tensors["reference_2.mean"])
    velocity = task.model(
        hidden_states=torch.cat([packed(image) for image in images], dim=1),
        encoder_hidden_states=tensors["text.embeds"],
        timestep=time,
        img_shapes=[[(1, 4, 4)] * 3],
        return_dict=False,
    )[0][:, :16]
    assert_close(found, (velocity - packed(normal - x)).square().mean(), rtol=1e-5, atol=1e-6)


def test_the_text_encoder_sees_the_references(pipeline_folder: Callable[[str], Path]) -> None:
    for name in ("qwen_image-edit", "qwen_image-edit-2511"):
        family, pipeline = opened(pipeline_folder(name), "qwen_image")
        one, other = (
            family.encode_seen(pipeline, "a cat", [image])["embeds"] for image in (picture(96, 64), picture(64, 96))
        )
        assert one.shape == other.shape
        assert (one - other).abs().max() > 1e-3


def test_buckets_of_references_are_what_the_stock_pipeline_makes_of_such_pictures(
    pipeline_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every aspect ratio of buckets, at the real size."""
    family = open_family("qwen_image", Source(str(pipeline_folder("qwen_image-edit-2511"))))
    small = plus.calculate_dimensions
    monkeypatch.setattr(plus, "calculate_dimensions", lambda area, ratio: small(area * 1024**2 / AREA, ratio))
    assert family.reference_shape == (1024 * 1024, 32)
    data = DataConfig(instance_data_dir="x", resolution=1024)
    for long, short in RATIOS:
        for size in ((1000 * long, 1000 * short), (1000 * short, 1000 * long)):
            assert bucket_of(size, data, 32) == Bucket(*plus.calculate_dimensions(1024**2, size[0] / size[1]))


def test_what_edit_cannot_take_is_said(pipeline_folder: Callable[[str], Path]) -> None:
    source = Source(str(pipeline_folder("qwen_image-edit")))
    with pytest.raises(ConfigError, match=r"tokenizer_max_length is 77, but a QwenImageEditPipeline reads captions"):
        open_family("qwen_image", source, 77)
    source.index["_class_name"] = "QwenImageLayeredPipeline"
    with pytest.raises(ConfigError, match=r"is a QwenImageLayeredPipeline: set model_family to 'qwen_layered'"):
        open_family("qwen_image", source)
