"""Diffusers' autoencoders behind one interface: `encode` and `decode`.

- AutoencoderKL gives moments; AutoencoderTiny gives one deterministic latent. `has_moments` tells.
- A VAE is given by a folder or hub id, of the VAE itself or of a pipeline that has one in `vae/`.
- Latents are unscaled; `latents.VAES` has the scaling to a model's input.
"""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tread.data.latents import VAES
from tread.data.stock import check_loaded
from tread.errors import ConfigError, check_choice, needs, one_line

Dtype = Literal["float32", "bfloat16", "float16"]


class Autoencoder:
    """An autoencoder from `load_vae`; runs without gradients, in the VAE's own dtype."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model.eval().requires_grad_(False)
        self.has_moments = type(model).__name__ == "AutoencoderKL"
        stages = config.block_out_channels if self.has_moments else config.encoder_block_out_channels
        self.factor = 2 ** (len(stages) - 1)
        """Image size over latent size, per side."""
        known = (config.latent_channels, config.scaling_factor, config.shift_factor or 0.0)
        named = (name for name, v in VAES.items() if (v.channels, v.scale, v.shift) == known)
        self.name = next(named, "none")
        """The name in `latents.VAES` with this VAE's scaling; `none` if no scaling is known or needed."""

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> float32 moments (B, 2C, h, w), or latents (B, C, h, w) without them."""
        output = self.model.encode(pixels.to(self.model.device, self.model.dtype))
        return (output.latent_dist.parameters if self.has_moments else output.latents).float()

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, h, w) unscaled -> float32 pixels (B, 3, H, W), about [-1, 1]."""
        return self.model.decode(latents.to(self.model.device, self.model.dtype)).sample.float()


def load_vae(vae: str | Path, *, dtype: Dtype = "float32", device: str | torch.device | None = None) -> Autoencoder:
    """An AutoencoderKL or AutoencoderTiny from a folder or the hub, on `device` (default: the accelerator)."""
    with needs("a VAE needs diffusers", "diffusers"):
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
    check_choice(dtype, "dtype", get_args(Dtype))
    classes: dict[str, Any] = {cls.__name__: cls for cls in (AutoencoderKL, AutoencoderTiny)}
    config, subfolder = _find_config(classes["AutoencoderKL"], str(vae))
    name = config.get("_class_name")
    if name not in classes:
        raise ConfigError(f"{vae} is a {name}; the VAE must be an {' or an '.join(classes)}")
    options = {"subfolder": subfolder, "torch_dtype": getattr(torch, dtype), "output_loading_info": True}
    try:
        model, info = classes[name].from_pretrained(str(vae), **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = one_line(error)[:200]
        raise ConfigError(f"the weights of {vae} do not load ({reason}): get or save the VAE again") from error
    folder = Path(vae, subfolder or "")
    check_loaded(model, info, f"the VAE {vae}", folder if folder.is_dir() else None)
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return Autoencoder(model.to(device))


def _find_config(loader: Any, vae: str) -> tuple[dict[str, Any], str | None]:
    """The VAE's config, and the subfolder that holds it."""
    for subfolder in (None, "vae"):
        try:
            return loader.load_config(vae, subfolder=subfolder), subfolder
        except OSError:
            continue
    raise ConfigError(
        f"no autoencoder at {vae}: give a folder that has config.json or vae/config.json, or a hub id in reach"
    )
