"""The family Qwen-Image-Layered: decompose an image into transparent layers.

- A sample is an image with the layers that it is made of, which a data entry gives as its references. The model draws
  all of them at once, the image first: latents have a frame for each, and they are stacked when a batch is collated.
- The image's clean latents come after the target's tokens, as a reference does in Edit; routes never drop them.
- Pixels have an alpha channel. The text encoder reads the caption alone, as in Qwen-Image.
- Times are shifted by the tokens of one image, as the stock pipeline does, whatever the number of layers.
- The stock pipeline draws at 640 or 1024 pixels, and reads the dtype of its text encoder even if it is given encoded
  prompts: a stand-in provides it.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_stills
from tread.finetune.families.qwen_image import QwenImage
from tread.finetune.family import Batch, Text, reference_name, references
from tread.finetune.target import Distance, FlowTarget, Target, is_linear

SMALL, LARGE = 640, 1024
"""Sides of the squares with the areas that the stock pipeline draws."""
BASE_TOKENS = 256
"""Tokens of an image at which the shift is e."""


@dataclass(frozen=True, kw_only=True)
class RootShift(FlowTarget):
    """The logarithm of the shift grows with the side of the image, as in the stock pipeline."""

    def shift_of(self, tokens: int) -> float:
        return self.from_mu(math.sqrt(tokens / BASE_TOKENS))


class QwenLayered(QwenImage):
    """Qwen-Image-Layered."""

    name = "qwen_layered"
    pipelines = ("QwenImageLayeredPipeline",)
    packages = ("torchvision",)  # for the processor
    usual_side = SMALL
    alpha = True
    layered = True
    layers = 4
    """Layers of a preview; `prepare` sets it to as many as the samples have."""

    @property
    def multiple(self) -> int:
        return 32  # the stock pipeline rounds sides to it

    @property
    def reference_counts(self) -> range:
        return range(1, sys.maxsize)

    @property
    def reference_shape(self) -> tuple[int, int] | None:
        return None

    @property
    def reference_fills(self) -> bool:
        return True

    def reference_tokens(self, batch: Batch) -> int:
        return self.shifting_tokens(batch["mean"])

    def shifting_tokens(self, latents: Tensor) -> int:
        return self.tokens(latents[:, :, 0])

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        if pixels.shape[1] == 3:
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)  # opaque
        return encode_stills(pipeline.vae, pixels)

    def collated(self, batch: Batch) -> Batch:
        count = len(references(batch))
        names = {f"{reference_name(number)}.{kind}" for number in range(count) for kind in ("mean", "std")}
        stacked = {name: value for name, value in batch.items() if name not in names}
        for kind in ("mean", "std"):
            of_layers = [batch[f"{reference_name(number)}.{kind}"] for number in range(count)]
            stacked[kind] = torch.stack([batch[kind], *of_layers], dim=2)  # (B, C, 1 + layers, h, w)
        if "weight" in batch:
            stacked["weight"] = batch["weight"].unsqueeze(2).expand(-1, -1, 1 + count, -1, -1)
        return stacked

    def target(self, *, shift: float | None, distance: Distance) -> Target:
        config = self.source.config("scheduler")
        if shift is None and config.get("use_dynamic_shifting"):
            return RootShift(linear=is_linear(config), distance=distance)
        return super().target(shift=shift, distance=distance)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_layered import QwenImageLayeredPipeline as stock

        count, channels, frames, rows, columns = noisy.shape

        def packed(latents: Tensor) -> Tensor:
            by_frame = latents.transpose(1, 2).contiguous()  # (B, f, C, h, w)
            return stock._pack_latents(by_frame, count, channels, rows, columns, by_frame.shape[1])

        image = batch["mean"][:, :, :1].to(noisy.dtype)
        velocity = model(
            hidden_states=torch.cat([packed(noisy), packed(image)], dim=1),  # (B, (2 + layers) S, 4 C)
            timestep=time,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_hidden_states_mask=batch.get("text.mask"),
            img_shapes=[[(1, rows // 2, columns // 2)] * (frames + 1)] * count,
            additional_t_cond=torch.zeros(count, dtype=torch.long, device=noisy.device),
            return_dict=False,
        )[0]
        drawn = velocity[:, : self.tokens(noisy)]
        return stock._unpack_latents(drawn, rows, columns, frames - 1, 1)  # (B, C, f, h, w)

    def complete(self, pipeline: Any) -> None:
        pipeline.text_encoder = SimpleNamespace(dtype=pipeline.vae.dtype)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        # without a prompt the stock pipeline would describe the image itself
        return super().prompt_arguments(text, negative) | {"prompt": "encoded"}

    def image_arguments(self, images: Sequence[Image], width: int, height: int) -> dict[str, Any]:
        """The image with an alpha channel; the stock pipeline scales it."""
        return {"image": images[0].convert("RGBA")}

    def call_arguments(self) -> dict[str, Any]:
        return {"layers": self.layers, "max_sequence_length": self.text_length}

    def exact_size(self, width: int, height: int) -> dict[str, Any]:
        """Whichever of the stock pipeline's two resolutions is nearer to the area."""
        return {"resolution": SMALL if abs(width * height - SMALL**2) < abs(width * height - LARGE**2) else LARGE}
