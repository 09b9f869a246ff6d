"""Latents are normalised by the autoencoder's own shift and scale, in float32 whatever it computes in."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.tiny.autoencoders import kl_autoencoder, tiny_autoencoder
from tread.finetune.families.autoencoders import encode_images, pixels_per_latent

PIXELS = torch.rand(2, 3, 1, 16, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
SCALING: dict[str, Any] = {"channels": 4, "scaling_factor": 0.5, "shift_factor": 0.25}


@pytest.fixture
def autoencoders() -> tuple[Any, Any]:
    """An AutoencoderKL of 2 pixels per latent and an AutoencoderTiny of 4."""
    return kl_autoencoder(stages=2, **SCALING), tiny_autoencoder(stages=3, **SCALING)


def test_moments_and_latents_are_shifted_and_then_scaled(autoencoders: tuple[Any, Any]) -> None:
    kl, tiny = autoencoders
    with torch.no_grad():
        moments, latents = kl.encode(PIXELS[:, :, 0]).latent_dist, tiny.encode(PIXELS[:, :, 0]).latents
    assert_close(encode_images(kl, PIXELS), {"mean": (moments.mean - 0.25) * 0.5, "std": moments.std * 0.5})
    assert_close(encode_images(tiny, PIXELS), {"mean": (latents - 0.25) * 0.5})


def test_an_autoencoder_without_a_shift(autoencoders: tuple[Any, Any]) -> None:
    kl, _ = autoencoders
    shifted = encode_images(kl, PIXELS)["mean"]
    kl.register_to_config(shift_factor=None)
    assert_close(encode_images(kl, PIXELS)["mean"], shifted + 0.25 * 0.5)


def test_latents_are_float32(autoencoders: tuple[Any, Any]) -> None:
    for vae in autoencoders:
        assert {tensor.dtype for tensor in encode_images(vae.bfloat16(), PIXELS).values()} == {torch.float32}


def test_pixels_per_latent(autoencoders: tuple[Any, Any]) -> None:
    for vae, factor in zip(autoencoders, (2, 4), strict=True):
        assert pixels_per_latent(vae.config) == factor
        assert encode_images(vae, PIXELS)["mean"].shape == (2, 4, 16 // factor, 8 // factor)
