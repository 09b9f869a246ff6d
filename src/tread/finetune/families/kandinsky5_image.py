"""The family Kandinsky 5 Image: text to image.

- The autoencoder is FLUX's; the pipeline scales its latents and does not shift them.
- The stock pipeline draws seven sizes of about a megapixel, and takes the nearest of them for any other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.kandinsky5 import Kandinsky5
from tread.finetune.family import Batch


class Kandinsky5Image(Kandinsky5):
    """Kandinsky 5 Image Lite."""

    name = "kandinsky5_image"
    pipelines = ("Kandinsky5T2IPipeline",)
    result_name = "image"
    guidance = 3.5

    @torch.no_grad()
    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        vae = pipeline.vae
        moments = vae.encode(pixels.squeeze(2).to(vae.device, vae.dtype)).latent_dist
        scale = vae.config.scaling_factor
        return {"mean": moments.mean.float() * scale, "std": moments.std.float() * scale}  # (B, C, h, w)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        return self.call(model, noisy[:, :, None], time, batch, [1.0, 1.0, 1.0])[:, :, 0]  # (B, C, h, w)
