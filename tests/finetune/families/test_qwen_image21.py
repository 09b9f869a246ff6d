"""Qwen-Image 2.1: opaque images, whole captions of one length in a batch, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS, drawn, opened, recorded, text_of
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.model.source import Source

Folder = Callable[[str], Path]


@torch.no_grad()
def test_latents_are_those_of_an_opaque_image(pipeline_folder: Folder) -> None:
    """As the stock pipeline encodes a condition image; they decode to the same picture."""
    family, pipeline = opened(pipeline_folder("qwen_image21"), "qwen_image21")
    pixels = torch.randint(256, (1, 3, 1, 64, 96), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    latents = family.encode_pixels(pipeline, pixels)["mean"]
    assert latents.shape == (1, 8, 4, 6)
    frame = (pixels[0, :, 0].permute(1, 2, 0) * 127.5 + 127.5).round().byte().numpy()
    image = pipeline.image_processor.numpy_to_pil(frame[None] / 255)[0].convert("RGBA")
    given = pipeline.image_processor.preprocess(image, height=64, width=96).unsqueeze(2)
    assert_close(latents, pipeline._encode_vae_image(given, torch.Generator())[:, :, 0])
    packed = pipeline._pack_latents(latents, *latents.shape)
    assert_close(pipeline._unpack_latents(packed, 64, 96, 16)[:, :, 0], latents)


@torch.no_grad()
def test_an_image_s_positions_follow_its_caption(pipeline_folder: Folder) -> None:
    """Padding would move them: the stock model in a padded batch predicts something else than for the caption alone."""
    family, pipeline = opened(pipeline_folder("qwen_image21"), "qwen_image21")
    with pytest.raises(
        ConfigError, match=r"a batch of qwen_image21 has texts of \d+ and \d+ tokens, .* to 1 and raise"
    ):
        text_of(family, pipeline, PROMPTS)
    batch: Any = {"mean": drawn(1, 8, 4, 6)} | text_of(family, pipeline, PROMPTS[1:])
    with recorded(pipeline.transformer) as calls:
        alone = family.predict(pipeline.transformer, batch["mean"], torch.tensor([0.7]), batch)
    call, pad = calls[0], 3
    text = torch.nn.functional.pad(call["encoder_hidden_states"], (0, 0, 0, pad))
    slots = torch.nn.functional.pad(call["img_mask"], (pad, 0))
    mask = torch.arange(text.shape[1])[None] < text.shape[1] - pad
    longer = call | {"encoder_hidden_states": text, "img_mask": slots, "encoder_hidden_states_mask": mask}
    found = pipeline.transformer(**longer, return_dict=False)[0][:, -24:].transpose(1, 2).reshape(alone.shape)
    assert (found - alone).abs().max() > 1e-4


def test_what_is_refused(pipeline_folder: Folder) -> None:
    source = Source(str(pipeline_folder("qwen_image21")))
    with pytest.raises(ConfigError, match="tokenizer_max_length is 77, but a QwenImage21Pipeline reads captions whole"):
        open_family("qwen_image21", source, 77)
    with pytest.raises(ConfigError, match="is a QwenImage21Pipeline: set model_family to 'qwen_image21'"):
        open_family("qwen_image", source)
    assert not open_family("qwen_image21", source).takes_references
