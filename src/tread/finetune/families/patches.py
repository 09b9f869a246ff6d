"""Latents as FLUX's transformer reads them: 2 x 2 patches, each with the ids (image, row, column)."""

from functools import lru_cache

import torch
from torch import Tensor


def packed(latents: Tensor) -> Tensor:
    """Latents (B, C, H, W) -> patches (B, S, 4 C)."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    return FluxPipeline._pack_latents(latents, *latents.shape)


def unpacked(patches: Tensor, rows: int, columns: int) -> Tensor:
    """Patches (B, S, 4 C) -> latents (B, C, H, W) with this many rows and columns."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    return FluxPipeline._unpack_latents(patches, rows, columns, vae_scale_factor=1)


def ids_of(latents: Tensor, *, image: int = 0) -> Tensor:
    """The ids (S, 3) of the patches of latents (B, C, H, W); cached, so do not modify them."""
    rows, columns = latents.shape[2:]
    return _ids(rows // 2, columns // 2, image, latents.device)


@lru_cache
def _ids(rows: int, columns: int, image: int, device: torch.device) -> Tensor:
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    with device:  # otherwise the stock function builds them on the host, and the copy synchronises
        ids = FluxPipeline._prepare_latent_image_ids(1, rows, columns, device, torch.float32)
        ids[:, 0] = image
    return ids
