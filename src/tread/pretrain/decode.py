"""Decoders from samples as the model sees them to images, for previews, `tread sample` and evaluation."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tread.data import DATASETS
from tread.data.dataset import to_uint8
from tread.data.latents import VAES
from tread.data.vae import load_vae
from tread.errors import ConfigError
from tread.kernels.fast import print_once_per_job

Decode = Callable[[Tensor], Tensor]
"""Samples (N, C, H, W) -> uint8 images (N, H, W, 3 or 1)."""


def make_decode(
    data: Mapping[str, Any],
    channels: int,
    vae: str | None,
    *,
    setting: str,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> Decode:
    """The decoder of a `data` section for samples of `channels` channels; `setting` is what `vae` is called there.

    Latents without a VAE are shown by their first channels.
    """
    if vae is None:
        return DATASETS[data["name"]].to_images
    if data["name"] != "latents":
        raise ConfigError(f"{setting} is given, but this run was trained on pixels; leave it out.")
    decoder = load_vae(vae, device=device)
    own = decoder.model.config.latent_channels
    if own != channels:
        raise ConfigError(f"{setting} {vae} has {own} latent channels and this run {channels}; give the run's VAE.")

    if decoder.name not in (data["vae"], "none"):
        print_once_per_job(
            f"warning: {setting} is the VAE {decoder.name}, whose scale is not that of data.vae={data['vae']}: images "
            f"will look wrong. Train with data.vae={decoder.name} (and data.scaled=true if they were stored scaled)."
        )

    def decode(samples: Tensor) -> Tensor:
        latents = VAES[data["vae"]].to_latent(samples).split(batch_size)
        return to_uint8(torch.cat([decoder.decode(part).cpu() for part in latents]))

    return decode
