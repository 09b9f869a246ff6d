"""Autoencoders of every class that pipelines use, with random weights; and AutoencoderTiny with its real ones."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny.weights import randomised

WAN_NEW_CHANNELS = 48
"""Channels of the latents of Wan 2.2's TI2V."""


def tiny_autoencoder(*, channels: int, stages: int = 4, **config: Any) -> Any:
    """AutoencoderTiny with 2 ** (stages - 1) pixels per latent."""
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    widths, blocks = (8,) * stages, (1,) * stages
    model = AutoencoderTiny(
        latent_channels=channels,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        num_encoder_blocks=blocks,
        num_decoder_blocks=blocks,
        **config,
    )
    randomised(model.encoder, scale=1.4)  # latents of unit size, as the real ones are
    randomised(model.decoder, scale=1.0)
    last: Any = model.decoder.layers[-1]
    torch.nn.init.constant_(last.bias, 0.5)  # grey: pixels are in [0, 1] there
    return model.eval()


def real_autoencoder(folder: Path, name: str) -> Any:
    """AutoencoderTiny with the weights of `taesd`, `taesd3` or `taef1` in a folder."""
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    weights = {f"encoder.layers.{key}": v for key, v in load_file(folder / f"{name}_encoder.safetensors").items()}
    for key, value in load_file(folder / f"{name}_decoder.safetensors").items():
        layer, _, rest = key.partition(".")
        weights[f"decoder.layers.{int(layer) - 1}.{rest}"] = value  # their layer 0 is a clamp without weights
    model = AutoencoderTiny(latent_channels=4 if name == "taesd" else 16)
    model.load_state_dict(weights)
    return model.float()


def kl_autoencoder(*, channels: int, stages: int = 4, width: int = 8, seed: int = 0, **config: Any) -> Any:
    """AutoencoderKL with 2 ** (stages - 1) pixels per latent."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    layers: dict[str, Any] = {
        "block_out_channels": (width,) * stages,
        "down_block_types": ("DownEncoderBlock2D",) * stages,
        "up_block_types": ("UpDecoderBlock2D",) * stages,
        "layers_per_block": 1,
        "norm_num_groups": width // 2,
    }
    torch.manual_seed(seed)
    model = AutoencoderKL(latent_channels=channels, **layers, **config)
    if model.quant_conv is not None:  # normalised latents of about unit size, as the real ones are
        model.quant_conv.weight.data[:channels] *= 4 / config.get("scaling_factor", 1)
    return model


def wan_autoencoder(*, new: bool = False) -> Any:
    """AutoencoderKLWan of Wan 2.1, or the `new` one of TI2V: 16 pixels per latent, patches, other statistics."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    spread = torch.linspace(-1, 1, WAN_NEW_CHANNELS)
    second = {
        "z_dim": WAN_NEW_CHANNELS,
        "latents_mean": spread.tolist(),
        "latents_std": (1.5 + spread / 2).tolist(),
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    }
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **(second if new else {}))


def hunyuan_autoencoder() -> Any:
    """AutoencoderKLHunyuanVideo: 8 pixels and 4 frames per latent."""
    from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo

    sizes: Any = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    return randomised(AutoencoderKLHunyuanVideo(**sizes, mid_block_add_attention=False), scale=1.0)


def qwen_autoencoder(**config: Any) -> Any:
    """AutoencoderKLQwenImage."""
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

    torch.manual_seed(0)
    return AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **config)


def qwen21_autoencoder() -> Any:
    """AutoencoderKLQwenImage21: 16 pixels per latent, a channel for transparency."""
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21

    spread = torch.linspace(-1, 1, 8)
    statistics: Any = {"latents_mean": (spread / 4).tolist(), "latents_std": (1.0 + spread / 2).tolist()}
    sizes: dict[str, Any] = {"base_dim": 4, "decoder_base_dim": 4, "z_dim": 8, "dim_mult": [1] * 5, "num_res_blocks": 1}
    return randomised(AutoencoderKLQwenImage21(**sizes, **statistics), scale=1.0)


def flux2_autoencoder() -> Any:
    """AutoencoderKLFlux2, with statistics in its batch norm."""
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

    torch.manual_seed(0)
    model = AutoencoderKLFlux2(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
    statistics: Any = model.bn
    statistics.running_mean.copy_(torch.linspace(-0.2, 0.2, 128))
    statistics.running_var.copy_(torch.linspace(0.02, 0.2, 128))
    return model.eval()


def ltx_autoencoder(*, channels: int = 8) -> Any:
    """AutoencoderKLLTXVideo: 32 pixels and 8 frames per latent, statistics of its own."""
    from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo

    sizes: dict[str, Any] = dict.fromkeys(("block_out_channels", "decoder_block_out_channels"), (8, 8, 8, 8))
    sizes |= dict.fromkeys(("layers_per_block", "decoder_layers_per_block"), (1, 1, 1, 1, 1))
    model: Any = randomised(AutoencoderKLLTXVideo(latent_channels=channels, **sizes), scale=1.0)
    model.latents_mean.copy_(torch.linspace(-0.3, 0.3, channels))
    model.latents_std.copy_(torch.linspace(0.5, 1.5, channels))
    almost_certain(model.encoder.conv_out.conv, channels)
    return model


def ltx2_autoencoders() -> dict[str, Any]:
    """AutoencoderKLLTX2Video: 32 pixels and 8 frames per latent; AutoencoderKLLTX2Audio and LTX2Vocoder; by name."""
    from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
    from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    sizes: dict[str, Any] = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8, 8, 8)}
    sizes |= {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4, "upsample_factor": (1, 1, 1)}
    ratios: Any = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    model: Any = randomised(AutoencoderKLLTX2Video(latent_channels=8, **sizes, **ratios), scale=1.0)
    model.latents_mean.copy_(torch.linspace(-0.3, 0.3, 8))
    model.latents_std.copy_(torch.linspace(0.5, 1.5, 8))
    audio = AutoencoderKLLTX2Audio(base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=8)
    sounds: Any = {"upsample_kernel_sizes": [4], "upsample_factors": [2], "resnet_kernel_sizes": [3]}
    vocoder = LTX2Vocoder(in_channels=16, hidden_channels=4, **sounds, resnet_dilations=[[1]])
    return {"vae": model, "audio_vae": randomised(audio), "vocoder": randomised(vocoder)}


def cogvideox_autoencoder(**config: Any) -> Any:
    """AutoencoderKLCogVideoX: 8 pixels and 4 frames per latent."""
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

    sizes: Any = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    model = randomised(AutoencoderKLCogVideoX(**sizes, **config), scale=1.0)
    almost_certain(model.encoder.conv_out.conv, 4)
    return model


def hunyuan15_autoencoder() -> Any:
    """AutoencoderKLHunyuanVideo15: 16 pixels and 4 frames per latent."""
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15

    sizes: Any = {"block_out_channels": (8, 8, 8, 8, 8), "layers_per_block": 1, "latent_channels": 4}
    return randomised(AutoencoderKLHunyuanVideo15(**sizes), scale=1.0)


def almost_certain(last: Any, channels: int) -> None:
    """A posterior without spread, so that a pipeline that samples it draws its mean."""
    last.weight.data[channels:], last.bias.data[channels:] = 0, -40


def dc_autoencoder() -> Any:
    """AutoencoderDC with 32 pixels per latent."""
    from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "encoder_block_out_channels": (8,) * 6,
        "decoder_block_out_channels": (8,) * 6,
        "encoder_layers_per_block": (1,) * 6,
        "decoder_layers_per_block": (1,) * 6,
        "encoder_block_types": "ResBlock",
        "decoder_block_types": "ResBlock",
        "encoder_qkv_multiscales": ((),) * 6,
        "decoder_qkv_multiscales": ((),) * 6,
    }
    return AutoencoderDC(latent_channels=8, **layers, scaling_factor=2.0).eval()
