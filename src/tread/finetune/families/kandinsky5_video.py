"""The family Kandinsky 5 Video: text to video and image to video.

- Image to video is given a clean first latent frame, which carries no loss; the mask channel marks it, and the
  condition channels are zeros, as in the stock pipeline. It is encoded from the first frame alone: the
  autoencoder's norms mix frames, so it differs from the first latent frame of the clip.
- The positions are scaled by the size of the video, as in the stock pipeline.
- Models with sparse attention (`nabla`, of 10 seconds) group tokens by their position in the grid, so they cannot be
  routed and are refused.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tread.errors import ConfigError, DataError
from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.first_frame import after_first, with_first
from tread.finetune.families.kandinsky5 import Kandinsky5
from tread.finetune.family import Batch
from tread.finetune.model.source import Source


class Kandinsky5Video(Kandinsky5):
    """Kandinsky 5 Video Lite and Pro."""

    name = "kandinsky5_video"
    pipelines = ("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline")
    video = True

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        kind = self.transformer_config.get("attention_type", "regular")
        if kind != "regular":
            raise ConfigError(
                f"{source.name_or_path!r} has sparse attention ({kind}), which cannot be routed: set "
                "pretrained_model_name_or_path to a model of 5 seconds with regular attention, or train it with full "
                "attention (sparse_params=None) in a script of yours with tread.attach (docs/attach.md)."
            )

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        if self._given and pixels.shape[2] == 1:
            raise DataError(
                "the sample is an image, which an image-to-video model would learn to copy: train on videos, or set "
                "pretrained_model_name_or_path to a text-to-video model."
            )
        latents = encode_videos(pipeline.vae, pixels)
        if self._given:
            alone = encode_videos(pipeline.vae, pixels[:, :, :1])
            latents = {name: with_first(value, alone[name]) for name, value in latents.items()}
        return latents

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        from diffusers.pipelines.kandinsky5.pipeline_kandinsky import Kandinsky5T2VPipeline

        height, width = (self.factor * size for size in noisy.shape[-2:])
        stock: Any = Kandinsky5T2VPipeline._get_scale_factor
        inputs = with_first(noisy, batch["mean"]) if self._given else noisy
        if self.transformer_config.get("visual_cond"):
            known = 1 - after_first(noisy) if self._given else torch.zeros_like(noisy[:, :1])
            inputs = torch.cat([inputs, torch.zeros_like(noisy), known], dim=1)  # (B, 2 C + 1, f, h, w)
        return self.call(model, inputs, time, batch, stock(None, height, width))

    def weight(self, batch: Batch) -> Tensor | None:
        return after_first(batch["mean"]) if self._given else None

    @property
    def _given(self) -> bool:
        """Whether the model is conditioned on the first frame."""
        return self.source.pipeline_name == "Kandinsky5I2VPipeline"
