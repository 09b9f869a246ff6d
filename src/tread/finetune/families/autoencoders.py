"""Encode pixels with a stock autoencoder of images or videos, into latents normalised for the transformer.

- AutoencoderKL returns the moments of a posterior; AutoencoderTiny and AutoencoderDC a single latent, without `std`.
- Latents of images are (latent - shift_factor) * scaling_factor; those of videos are standardised channel by channel,
  or multiplied by scaling_factor alone. Stock pipelines apply the inverse before decoding.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def pixels_per_latent(config: Mapping[str, Any]) -> int:
    """Pixels per latent along height and width, from the config of an autoencoder."""
    if factor := config.get("spatial_compression_ratio") or config.get("scale_factor_spatial"):
        return int(factor)
    if "temperal_downsample" in config:
        return 2 ** len(config["temperal_downsample"])
    stages = config.get("encoder_block_out_channels") or config["block_out_channels"]
    return 2 ** (len(stages) - 1)


def frames_per_latent(config: Mapping[str, Any]) -> int:
    """Frames per latent frame, from the config of a video autoencoder."""
    if factor := config.get("temporal_compression_ratio") or config.get("scale_factor_temporal"):
        return int(factor)
    return 2 ** sum(config["temperal_downsample"])


@torch.no_grad()
def encode_images(vae: Any, pixels: Tensor, *, shifted: bool = True) -> dict[str, Tensor]:
    """Pixels (B, 3, 1, H, W) in [-1, 1] -> float32 `mean` (B, C, h, w) and, from an AutoencoderKL, `std`.

    Without `shifted`, the latents are not shifted by the autoencoder's shift_factor.
    """
    encoded = vae.encode(pixels.squeeze(2).to(vae.device, vae.dtype))
    scale, shift = vae.config.scaling_factor, (vae.config.get("shift_factor") if shifted else None) or 0.0
    if not hasattr(encoded, "latent_dist"):
        latents = encoded.latent if hasattr(encoded, "latent") else encoded.latents
        return {"mean": (latents.float() - shift) * scale}
    moments = encoded.latent_dist
    return {"mean": (moments.mean.float() - shift) * scale, "std": moments.std.float() * scale}


@torch.no_grad()
def encode_videos(vae: Any, pixels: Tensor) -> dict[str, Tensor]:
    """Pixels (B, 3, F, H, W) in [-1, 1] -> float32 `mean` and `std`, (B, C, f, h, w)."""
    moments = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    mean, std = _statistics(vae)
    return {"mean": (moments.mean.float() - mean) / std, "std": moments.std.float() / std}


def _statistics(vae: Any) -> tuple[Tensor | float, Tensor | float]:
    """Mean and standard deviation of each channel of a video autoencoder's latents, (1, C, 1, 1, 1).

    AutoencoderKLWan and AutoencoderKLQwenImage have them in their configs, AutoencoderKLLTXVideo as buffers.
    """
    scale = vae.config.get("scaling_factor") or 1.0
    buffers = dict(vae.named_buffers())
    statistics = [buffers.get(name, vae.config.get(name)) for name in ("latents_mean", "latents_std")]
    if statistics[0] is None:
        return 0.0, 1 / scale
    mean, std = (torch.as_tensor(values, device=vae.device).float().view(1, -1, 1, 1, 1) for values in statistics)
    return mean, std / scale


def encode_stills(vae: Any, pixels: Tensor) -> dict[str, Tensor]:
    """Pixels (B, 3, 1, H, W) -> latents of a video autoencoder without their frame axis, (B, C, h, w)."""
    return {name: values[:, :, 0] for name, values in encode_videos(vae, pixels).items()}
