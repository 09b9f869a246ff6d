"""HunyuanVideo 1.0 and 1.5: quoted text, how a first frame is given, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.testing import assert_close

from tests.finetune.tasks import make_config
from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of
from tests.tiny.pictures import write_clips
from tests.tiny.pipelines.case import first_frame
from tread.errors import ConfigError
from tread.finetune.data.prepare import prepare
from tread.finetune.families import open_family
from tread.finetune.model.source import Source

Folder = Callable[[str], Path]


def test_quoted_text_reaches_the_model_as_from_the_pipeline(pipeline_folder: Folder) -> None:
    """ByT5 reads what a caption quotes; a caption that quotes nothing has a mask of zeros."""
    family, pipeline = opened(pipeline_folder("hunyuanvideo"), "hunyuanvideo")
    pipeline.set_progress_bar_config(disable=True)
    prompts = ['a sign that says "two dogs"', "a cat"]
    settings = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 1, "output_type": "latent"}
    family.guide(pipeline, 1.0)
    with recorded(pipeline.transformer) as stock:
        pipeline(prompt=prompts, **settings)
    batch: Any = {"mean": drawn(2, 4, 2, 4, 4)} | text_of(family, pipeline, prompts)
    with torch.no_grad(), recorded(pipeline.transformer) as ours:
        family.predict(pipeline.transformer, batch["mean"], torch.tensor([0.5, 0.5]), batch)
    (ours,), (stock,) = ours, stock
    assert_close(ours["encoder_attention_mask_2"], stock["encoder_attention_mask_2"].long())
    given = stock["encoder_attention_mask_2"].bool()
    assert given.sum(-1).tolist() == [len('Text "two dogs". ') + 1, 0]
    assert_close(ours["encoder_hidden_states_2"][given], stock["encoder_hidden_states_2"][given])
    assert_close(ours["image_embeds"], stock["image_embeds"])


def test_the_first_frame_is_given_three_times(pipeline_folder: Folder) -> None:
    """As latents encoded alone, as a mask, and as SigLIP sees it."""
    family, pipeline = opened(pipeline_folder("hunyuanvideo-i2v"), "hunyuanvideo")
    clip = torch.randint(256, (1, 3, 9, 64, 64), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    batch = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
    noisy = drawn(*batch["mean"].shape)
    with torch.no_grad(), recorded(pipeline.transformer) as calls:
        family.predict(pipeline.transformer, noisy, torch.tensor([0.7]), batch)
        alone = pipeline.vae.encode(clip[:, :, :1]).latent_dist.mean * pipeline.vae.config.scaling_factor
        seen = pipeline.encode_image(first_frame(clip)["image"], 1, torch.device("cpu"), torch.float32)
    given = calls[0]["hidden_states"]  # (B, 2 C + 1, f, h, w)
    assert torch.equal(given[:, :4], noisy)
    assert_close(given[:, 4:8, :1], alone)
    assert (given[:, 4:8, 1:] == 0).all()
    assert given[0, 8].flatten(1).tolist() == [[1] * 16, [0] * 16, [0] * 16]
    assert_close(calls[0]["image_embeds"], seen)
    assert family.weight(batch) is None
    assert "the first frame is given" in family.unfit(64, 64, 1)
    assert opened(pipeline_folder("hunyuanvideo"), "hunyuanvideo")[0].unfit(64, 64, 1) is None


def test_distilled_models_and_other_versions_are_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    source = Source(
        str(changed(pipeline_folder("hunyuanvideo"), tmp_path / "m", "transformer/config.json", use_meanflow=True))
    )
    with pytest.raises(ConfigError, match=r"is a step-distilled HunyuanVideo.*set pretrained_model_name_or_path"):
        open_family("hunyuanvideo", source)
    with pytest.raises(ConfigError, match="is a HunyuanVideo15Pipeline: set model_family to 'hunyuanvideo'"):
        open_family("hunyuanvideo1", source)


def test_the_first_version_is_given_a_frame_that_was_encoded_alone(pipeline_folder: Folder) -> None:
    """As the first latent frame, which carries no loss, or as channels; and LLaVA sees it."""
    clip = torch.randint(256, (1, 3, 9, 64, 64), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    seen: Any = first_frame(clip)["image"]
    for name, tokens, loss in (("hunyuanvideo1-i2v", 288, None), ("hunyuanvideo1-i2v-first", 144, [0, 1, 1])):
        family, pipeline = opened(pipeline_folder(name), "hunyuanvideo1")
        text = family.encode_seen(pipeline, "a cat", [seen])
        other = family.encode_seen(pipeline, "a cat", [seen.rotate(90)])
        assert text["embeds"].shape == other["embeds"].shape
        assert not torch.allclose(text["embeds"], other["embeds"])
        words = family.encode_seen(pipeline, "", [seen])["embeds"]
        assert len(words) < len(text["embeds"])
        assert_close(words[:tokens], text["embeds"][:tokens])  # the tokens of the frame come first, and see no caption
        batch = family.encode_pixels(pipeline, clip) | {f"text.{k}": v for k, v in family.collate_text([text]).items()}
        noisy = drawn(*batch["mean"].shape)
        with torch.no_grad(), recorded(pipeline.transformer) as calls:
            family.predict(pipeline.transformer, noisy, torch.tensor([0.7]), batch)
            alone = pipeline.vae.encode(clip[:, :, :1]).latent_dist.mean * pipeline.vae.config.scaling_factor
        given = calls[0]["hidden_states"]  # (1, C or 2 C + 1, f, h, w)
        weight = family.weight(batch)
        if loss is None:
            assert weight is None
            assert torch.equal(given[:, :4], noisy)
            assert_close(given[:, 4:8, :1], alone)
            assert (given[:, 4:8, 1:] == 0).all()
            assert given[0, 8].flatten(1).mean(1).tolist() == [1, 0, 0]
        else:
            assert weight[0, 0].flatten(1).mean(1).tolist() == loss
            assert_close(given[:, :, :1], alone)
            assert torch.equal(given[:, :, 1:], noisy[:, :, 1:])
        assert "the first frame is given" in family.unfit(64, 64, 1)


def test_the_two_forms_share_a_cache(pipeline_folder: Folder, tmp_path: Path) -> None:
    """One autoencoder, one text encoder and one class of pipeline, but what is encoded differs: each finds its own."""
    data = {"instance_data_dir": str(write_clips(tmp_path / "clips")), "resolution": 64, "video": {"num_frames": 5}}

    def encoded(name: str, cache: str) -> dict[str, Any]:
        """The latents and the text of the first sample."""
        place = pipeline_folder(name)
        settings = {"model_family": "hunyuanvideo1", "cache_dir": str(tmp_path / cache)}
        family = open_family("hunyuanvideo1", Source(str(place)))
        made = prepare(make_config(place, data, **settings), family, Accelerator(cpu=True), tmp_path)
        entry = made.train.entries[0]
        text = made.texts.of(entry.sample.captions[0], entry.seen)
        return {**made.texts.cache.load("latents", entry.latents), **text}

    first = encoded("hunyuanvideo1-i2v", "both")
    second, alone = (encoded("hunyuanvideo1-i2v-first", cache) for cache in ("both", "alone"))
    assert "condition" in first
    assert first["embeds"].shape != second["embeds"].shape
    assert second.keys() == alone.keys()
    assert all(torch.equal(second[name], alone[name]) for name in alone)


def test_a_transformer_that_takes_no_frame_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    given = {"image_condition_type": None}
    place = changed(pipeline_folder("hunyuanvideo1-i2v"), tmp_path / "m", "transformer/config.json", **given)
    with pytest.raises(
        ConfigError, match=r"is None, but a HunyuanVideoImageToVideoPipeline needs latent_concat or tok"
    ):
        open_family("hunyuanvideo1", Source(str(place)))


def test_guidance_of_the_first_version_is_one_in_training(pipeline_folder: Folder) -> None:
    family, pipeline = opened(pipeline_folder("hunyuanvideo1"), "hunyuanvideo1")
    batch: Any = {"mean": drawn(1, 4, 2, 8, 12)} | text_of(family, pipeline, PROMPTS[:1])
    with torch.no_grad(), recorded(pipeline.transformer) as calls:
        family.predict(pipeline.transformer, batch["mean"], torch.tensor([0.7]), batch)
    assert calls[0]["guidance"].tolist() == [1000]
