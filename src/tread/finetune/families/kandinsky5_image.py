"""The family Kandinsky 5 Image: text to image, and image to image.

- The autoencoder is FLUX's; the pipeline scales its latents and does not shift them.
- The stock pipelines draw seven sizes of about a megapixel, and take the nearest of them for any other.
- Image to image takes its reference as channels beside the noisy latents, so it has their size; the mask channel is
  all ones. Its text encoder sees the reference too, at half of its size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from tread.errors import DataError, shown
from tread.finetune.families.autoencoders import encode_images
from tread.finetune.families.kandinsky5 import Kandinsky5
from tread.finetune.family import Batch, Text, references
from tread.finetune.model.source import Source

EDIT = "Kandinsky5I2IPipeline"
EDIT_TEXT = 1024
"""The most tokens that image to image reads, those of the reference included."""


class Kandinsky5Image(Kandinsky5):
    """Kandinsky 5 Image Lite."""

    name = "kandinsky5_image"
    pipelines = ("Kandinsky5T2IPipeline", EDIT)
    result_name = "image"
    guidance = 3.5

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        edits = source.pipeline_name == EDIT
        super().__init__(source, text_length or (EDIT_TEXT if edits else None))
        self.sees_references = edits

    @property
    def reference_counts(self) -> range:
        return range(1, 2) if self.sees_references else range(1)

    @property
    def reference_fills(self) -> bool:
        return True

    @torch.no_grad()
    def encode_seen(self, pipeline: Any, caption: str, images: Sequence[Image]) -> Text:
        try:
            embeds, pooled, _ = pipeline.encode_prompt([caption], image=images[0], max_sequence_length=self.text_length)
        except ValueError as error:  # truncating a long caption cut into the image's tokens
            raise DataError(
                f"the caption {shown(caption)} and its reference have more tokens than the {self.text_length} that a "
                f"{EDIT} reads: shorten it."
            ) from error
        return {"embeds": embeds[0], "pooled": pooled[0]}  # (L, D), (P,)

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_images(pipeline.vae, pixels, shifted=False)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        given = [reference.to(noisy.dtype) for reference in references(batch)]
        known = [torch.ones_like(noisy[:, :1])] if given else []
        inputs = torch.cat([noisy, *given, *known], dim=1)  # (B, C or 2 C + 1, h, w)
        return self.call(model, inputs[:, :, None], time, batch, [1.0, 1.0, 1.0])[:, :, 0]  # (B, C, h, w)

    def image_arguments(self, images: Sequence[Image], width: int, height: int) -> dict[str, Any]:
        """The unscaled image: the stock pipeline scales it."""
        return {"image": images[0]}
