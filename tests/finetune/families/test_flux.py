"""FLUX: moments, Kontext's source image, and guidance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

import tread
from tread.finetune.families.flux import Flux
from tread.finetune.model.source import Source

pytestmark = pytest.mark.filterwarnings("ignore::tread.routing.risks.RiskWarning")

Open = Callable[[str], tuple[Flux, Any]]


@pytest.fixture
def flux(pipeline_folder: Callable[[str], Path]) -> Open:
    """The family and its whole pipeline."""

    def find(name: str) -> tuple[Flux, Any]:
        source = Source(str(pipeline_folder(name)))
        return Flux(source), source.pipeline(*source.parts)

    return find


def picture(*size: int) -> Image.Image:
    """Random pixels of a width and a height."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def to_pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, None] / 127.5 - 1  # (1, 3, 1, H, W)


def test_moments_are_normalised_as_samples_are(flux: Open) -> None:
    """Drawing from the normalised moments is normalising a draw of the autoencoder."""
    family, pipeline = flux("flux-kl")
    pixels = to_pixels(picture(96, 64))
    encoded = family.encode_pixels(pipeline, pixels)
    with torch.no_grad():
        drawn = pipeline.vae.encode(pixels[:, :, 0]).latent_dist.sample(torch.Generator().manual_seed(0))
    noise = torch.randn(encoded["mean"].shape, generator=torch.Generator().manual_seed(0))
    assert_close(encoded["mean"] + encoded["std"] * noise, (drawn - 0.1159) * 0.3611)


def test_guidance_is_one_where_the_model_takes_it(pipeline_folder: Callable[[str], Path]) -> None:
    seen: list[Any] = []

    def fake(**arguments: Any) -> tuple[Tensor]:
        seen.append(arguments["guidance"])
        return (arguments["hidden_states"],)

    batch = {"text.embeds": torch.zeros(2, 4, 16), "text.pooled": torch.zeros(2, 16)}
    noisy = torch.randn(2, 16, 4, 6)
    model: Any = fake
    for name in ("flux", "flux-schnell"):
        family = Flux(Source(str(pipeline_folder(name))))
        assert torch.equal(family.predict(model, noisy, torch.tensor([0.2, 0.7]), batch), noisy)
    assert seen[0].tolist() == [1.0, 1.0]
    assert seen[1] is None


def test_ids_are_the_stock_pipeline_s_in_every_step(pipeline_folder: Callable[[str], Path]) -> None:
    """To the bit, and of each size and image its own, though they are kept."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    seen: list[Tensor] = []

    def fake(**arguments: Any) -> tuple[Tensor]:
        seen.append(arguments["img_ids"])
        return (arguments["hidden_states"],)

    family = Flux(Source(str(pipeline_folder("flux-kontext"))))
    text = {"text.embeds": torch.zeros(1, 4, 16), "text.pooled": torch.zeros(1, 16)}
    model: Any = fake
    for rows, columns in [(4, 6), (6, 4), (4, 6)]:
        noisy = torch.randn(1, 16, rows, columns)
        family.predict(model, noisy, torch.tensor([0.2]), text | {"reference.mean": noisy.transpose(2, 3)})
        expected = FluxPipeline._prepare_latent_image_ids(1, rows // 2, columns // 2, "cpu", torch.float32)
        source = FluxPipeline._prepare_latent_image_ids(1, columns // 2, rows // 2, "cpu", torch.float32)
        source[:, 0] = 1
        assert torch.equal(seen[-1], torch.cat([expected, source]))
        assert seen[-1].dtype == torch.float32


def test_an_encoded_negative_prompt_draws_the_same(flux: Open) -> None:
    """Where true_cfg_scale asks for it; the guidance of previews is an input of the model instead."""
    family, pipeline = flux("flux")
    pipeline.set_progress_bar_config(disable=True)
    text, negative = family.encode_text(pipeline, ["a cat", "two dogs"])

    def draw(**prompt: Any) -> Tensor:
        size: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 1, "true_cfg_scale": 3.0}
        return pipeline(**prompt, **size, generator=torch.Generator().manual_seed(0), output_type="latent").images

    expected = draw(prompt="a cat", negative_prompt="two dogs")
    assert_close(draw(**family.prompt_arguments(text, negative)), expected)
    assert (draw(**family.prompt_arguments(text, None)) - expected).abs().max() > 1e-3


@pytest.fixture
def kontext(flux: Open) -> tuple[Flux, Any, Image.Image, dict[str, Tensor]]:
    """A target of 64 x 96 pixels and a source image of another size."""
    family, pipeline = flux("flux-kontext")
    image = picture(48, 80)
    (text,) = family.encode_text(pipeline, ["make it night"])
    reference = family.encode_pixels(pipeline, to_pixels(image))["mean"]  # (1, 16, 10, 6)
    return family, pipeline, image, {"text." + k: v[None] for k, v in text.items()} | {"reference.mean": reference}


def test_a_source_image_of_another_size_is_the_stock_pipeline(
    kontext: tuple[Flux, Any, Image.Image, dict[str, Tensor]],
) -> None:
    family, pipeline, image, batch = kontext
    pipeline.set_progress_bar_config(disable=True)
    stock = pipeline(
        image=image,
        prompt="make it night",
        guidance_scale=1.0,
        height=64,
        width=96,
        max_area=64 * 96,
        _auto_resize=False,
        num_inference_steps=1,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    noise = torch.randn(1, 16, 8, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        velocity = family.predict(pipeline.transformer, noise, torch.ones(1), batch)
        blind = family.predict(pipeline.transformer, noise, torch.ones(1), {**batch, "reference.mean": -noise})
    assert_close(pipeline._pack_latents(noise - velocity, 1, 16, 8, 12), stock, rtol=1e-4, atol=1e-4)
    assert (velocity - blind).abs().max() > 1e-3


def test_a_mask_covers_the_target_and_source_tokens_stay(
    kontext: tuple[Flux, Any, Image.Image, dict[str, Tensor]],
) -> None:
    family, pipeline, _, batch = kontext
    model = pipeline.transformer.train()
    handle = tread.attach(
        model, {"routes": [{"selection_ratio": 0.9, "start_layer_idx": 3, "end_layer_idx": 3}], "seed": 1}
    )
    weight = torch.zeros(1, 1, 8, 12)
    weight[..., 5, 7] = 0.1
    forced = family.patch.any_in_token(weight > 0)
    with handle.force_keep(forced):
        family.predict(model, torch.randn(1, 16, 8, 12), torch.tensor([0.5]), batch)
    (kept,) = handle.selections
    assert forced.nonzero()[:, 1].tolist() == [2 * 6 + 3]
    assert 2 * 6 + 3 in kept
    assert set(range(24, 24 + 15)) <= set(kept[0].tolist())
    assert kept.shape[1] < 24 + 15
