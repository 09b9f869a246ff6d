"""Clips whose first latent frame is given: the model sees it clean at time 0, and it carries no loss.

Its tokens are forced, because `TuneFamily.weight` is 0 there. The given latents are the posterior's mean, so that
a clip's condition is the same at every visit. `FirstFrame` is the base class of families that draw from text too.
"""

import torch
from PIL import Image
from torch import Tensor

from tread.finetune.family import Batch, TuneFamily

NEEDS_CLIPS = (
    "the first frame is given, and of a sample of one frame nothing is left to draw: leave images and short clips out "
    "of data (video.min_frames), or train a text-to-video model"
)
"""Why an image-to-video model is not trained on images."""


def after_first(latents: Tensor) -> Tensor:
    """Mask that is 0 in the first latent frame and 1 after it: (B, C, f, h, w) -> (B, 1, f, h, w)."""
    later = torch.ones_like(latents[:, :1])
    later[:, :, 0] = 0
    return later


def with_first(noisy: Tensor, clean: Tensor) -> Tensor:
    """Noisy latents with the first frame replaced by the clean one, (B, C, f, h, w)."""
    return torch.cat([clean[:, :, :1].to(noisy.dtype), noisy[:, :, 1:]], dim=2)


def first_images(pixels: Tensor) -> list[Image.Image]:
    """The first frames of pixels (B, 3, F, H, W) in [-1, 1], as PIL images for a pipeline."""
    frames = (pixels[:, :, 0].float() * 127.5 + 127.5).round().clamp(0, 255).byte()  # (B, 3, H, W)
    return [Image.fromarray(frame.permute(1, 2, 0).cpu().numpy()) for frame in frames]


class FirstFrame(TuneFamily):
    """Base class of families that draw from text, or from a given first frame if `first_frame` is set."""

    @property
    def takes_image(self) -> bool:
        return self.first_frame

    def starts_clean(self, latents: Tensor) -> bool:
        """Whether the first frame is given; a single image is drawn from text."""
        return self.first_frame and latents.shape[2] > 1

    def weight(self, batch: Batch) -> Tensor | None:
        return after_first(batch["mean"]) if self.starts_clean(batch["mean"]) else None
