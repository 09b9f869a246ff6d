"""FLUX.2: the batch norm's statistics, references that a sample may have, the fitted shift, and distilled models."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.tasks import make_config
from tests.finetune.trained import changed, drawn, opened, text_of
from tests.tiny.pictures import write_noise
from tread.data.captioned.samples import Sample
from tread.errors import ConfigError
from tread.finetune.data.prepare import check_references
from tread.finetune.families import open_family
from tread.finetune.families.flux2 import Flux2
from tread.finetune.model.source import Source
from tread.finetune.preflight import look, open_model
from tread.finetune.previews import check_image
from tread.finetune.result.card import example
from tread.finetune.target import FlowTarget

Folder = Callable[[str], Path]


@pytest.fixture
def dev(pipeline_folder: Folder) -> tuple[Flux2, Any]:
    return opened(pipeline_folder("flux2"), "flux2")


def test_moments_are_standardised_as_samples_are(dev: tuple[Flux2, Any]) -> None:
    """Drawing from the standardised moments is standardising a draw of the autoencoder, patch by patch."""
    family, pipeline = dev
    pixels = drawn(1, 3, 1, 64, 96).clamp(-1, 1)
    encoded = family.encode_pixels(pipeline, pixels)
    assert encoded["mean"].shape == (1, 128, 4, 6)
    noise = drawn(*encoded["mean"].shape)
    with torch.no_grad():
        moments = pipeline.vae.encode(pixels[:, :, 0]).latent_dist
        sample = moments.mean + moments.std * pipeline._unpatchify_latents(noise)
        expected = torch.nn.functional.batch_norm(
            pipeline._patchify_latents(sample),
            pipeline.vae.bn.running_mean,
            pipeline.vae.bn.running_var,
            eps=pipeline.vae.config.batch_norm_eps,
        )
    assert_close(encoded["mean"] + encoded["std"] * noise, expected)


@torch.no_grad()
def test_a_reference_of_another_size_is_the_stock_pipeline(dev: tuple[Flux2, Any]) -> None:
    family, pipeline = dev
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    batch = text_of(family, pipeline, ["make it night"])
    batch["reference.mean"] = family.encode_pixels(pipeline, pixels)["mean"]  # (1, 128, 6, 4)
    noise = drawn(1, 128, 4, 5)
    pipeline.set_progress_bar_config(disable=True)
    size: dict[str, Any] = {"height": 64, "width": 80, "num_inference_steps": 1, "guidance_scale": 1.0}
    stock = pipeline(image, "make it night", **size, latents=noise, output_type="latent").images  # (1, 20, 128)
    velocity = family.predict(pipeline.transformer, noise, torch.ones(1), batch)
    assert_close((noise - velocity).flatten(2).transpose(1, 2), stock, rtol=1e-4, atol=1e-4)
    del batch["reference.mean"]
    alone = family.predict(pipeline.transformer, noise, torch.ones(1), batch)
    assert (velocity - alone).abs().max() > 1e-3


def test_times_are_shifted_as_the_pipeline_shifts_them(dev: tuple[Flux2, Any], pipeline_folder: Folder) -> None:
    """By its scheduler, with the shift that it fits to the tokens and the 50 steps; a klein of few steps to its 4."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    family, pipeline = dev
    target = family.target(shift=None, distance="l2")
    levels = torch.tensor([0.9, 0.5, 0.1])
    for tokens in (24, 4096, 9000):
        pipeline.scheduler.set_timesteps(sigmas=levels.tolist(), mu=compute_empirical_mu(tokens, 50))
        assert_close(target.times(torch.special.ndtr(torch.logit(levels)), tokens), pipeline.scheduler.sigmas[:3])
    given = family.target(shift=2.0, distance="l2")
    assert isinstance(given, FlowTarget)
    assert given.shift_of(4096) == 2.0


def test_references_are_taken_and_not_needed(dev: tuple[Flux2, Any]) -> None:
    family, _ = dev
    plain = Sample(dataset=0, media=Path("a.png"), captions=("a",), size=(64, 64))
    one, two = (replace(plain, references=(Path("c.png"),) * n, reference_sizes=((64, 64),) * n) for n in (1, 2))
    for samples in ([plain], [one], [two], [plain, one, two]):
        check_references(family, samples)
    config = make_config(Path(family.source.name_or_path), "data", model_family="flux2", validation_prompt="a fox")
    check_image(config, family)
    assert "load_image" not in example(family, ["transformer"], config, {})
    pairs = {"instance_data_dir": "data", "conditioning_data_dir": "more", "conditioning_type": "reference"}
    edits = replace(config, data=pairs)
    assert 'image=load_image("input.png")' in example(family, ["transformer"], edits, {})


def test_a_distilled_model_is_warned_of_and_drawn_in_few_steps(pipeline_folder: Folder, tmp_path: Path) -> None:
    place = changed(pipeline_folder("flux2-klein"), tmp_path / "klein", "model_index.json", is_distilled=True)
    config = make_config(place, write_noise(tmp_path / "data"), model_family="flux2", validation_prompt=None)
    with pytest.warns(UserWarning, match=r"klein' is distilled to a few steps, which training undoes.*Tune the model"):
        family = open_model(config)
    assert (family.steps, family.guidance) == (4, 1.0)
    assert (Flux2.steps, Flux2.guidance) == (50, 4.0)
    with pytest.warns(UserWarning, match="is distilled"):
        assert look(config).problems == []
    target = family.target(shift=None, distance="l2")
    assert isinstance(target, FlowTarget)
    whole = open_family("flux2", Source(str(pipeline_folder("flux2-klein")))).target(shift=None, distance="l2")
    assert isinstance(whole, FlowTarget)
    assert target.shift_of(4096) > whole.shift_of(4096)


def test_the_processor_of_dev_needs_torchvision(
    pipeline_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = ["transformers", "PixtralProcessor"]
    place = changed(pipeline_folder("flux2"), tmp_path / "m", "model_index.json", tokenizer=processor)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match="PixtralProcessor, which needs torchvision: install the build that fits"):
        open_family("flux2", Source(str(place)))


def test_another_text_encoder_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    place = changed(pipeline_folder("flux2-klein"), tmp_path / "m", "text_encoder/config.json", hidden_size=16)
    with pytest.raises(ConfigError, match=r"text_encoder of .* gives .* width 48, but the transformer reads 24: it is"):
        open_family("flux2", Source(str(place)))


def test_the_pipeline_that_caches_references_is_no_flux2_to_tune(pipeline_folder: Folder, tmp_path: Path) -> None:
    cached = {"_class_name": "Flux2KleinKVPipeline"}
    place = changed(pipeline_folder("flux2-klein"), tmp_path / "m", "model_index.json", **cached)
    with pytest.raises(
        ConfigError, match=r"is a Flux2KleinKVPipeline: tread finetune does not.*\(Flux2Pipeline, Flux2"
    ):
        open_family("flux2", Source(str(place)))
    with pytest.raises(ConfigError, match="is a Flux2KleinPipeline: set model_family to 'flux2'"):
        open_family("flux", Source(str(pipeline_folder("flux2-klein"))))


def test_ids_count_rows_columns_and_words(dev: tuple[Flux2, Any]) -> None:
    """To the bit as the pipeline makes them."""
    family, pipeline = dev
    seen: list[dict[str, Tensor]] = []

    def fake(**arguments: Any) -> tuple[Tensor]:
        seen.append(arguments)
        return (arguments["hidden_states"],)

    model: Any = fake
    noisy, reference = drawn(2, 128, 2, 3), drawn(2, 128, 3, 2, seed=1)
    batch = {"text.embeds": torch.zeros(2, 5, 24), "reference.mean": reference}
    assert torch.equal(family.predict(model, noisy, torch.tensor([0.2, 0.7]), batch), noisy)
    (call,) = seen
    own, others = pipeline._prepare_latent_ids(noisy), pipeline._prepare_image_ids([reference[:1]])
    assert torch.equal(call["img_ids"], torch.cat([own, others.expand(2, -1, -1)], dim=1))
    assert torch.equal(call["txt_ids"], pipeline._prepare_text_ids(batch["text.embeds"]))
    assert call["guidance"].tolist() == [1.0, 1.0]
    assert math.prod(call["hidden_states"].shape) == noisy.numel() + reference.numel()
