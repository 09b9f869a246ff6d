"""The family Qwen-Image: text to image with Qwen2.5-VL, and Edit with one (Edit) or several references (Edit-Plus).

- The autoencoder is a video autoencoder; an image is one frame, and latents here have no frame axis.
- Texts have no fixed length. A batch of equally long texts has no mask, as in the pipeline: with a mask the stock model
  copies a number to the device in every forward, which synchronises.
- Edit appends the patches of its references to the target's and takes the shapes of all; the prediction is cut to the
  target's patches. 2511 also gives the references time 0, which the stock model does by itself.
- The text encoder of Edit sees the references too, at a size of its own, so a caption is encoded once per sample.
- `true_cfg_scale` is the pipeline's name for the scale of classifier-free guidance.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.autoencoders import encode_stills
from tread.finetune.families.ragged_text import cut, padded
from tread.finetune.family import Batch, Text, TuneFamily, references
from tread.finetune.model.source import Source

EDIT, EDIT_PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
EDIT_AREA = 1024 * 1024
"""Pixels that Edit scales its reference to; Edit-Plus has a constant for it."""


class QwenImage(TuneFamily):
    """Qwen-Image, Qwen-Image-Edit and Qwen-Image-Edit-Plus (2509, 2511)."""

    name = "qwen_image"
    pipelines = ("QwenImagePipeline", EDIT, EDIT_PLUS)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 1024
    texts_differ = True
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    guidance = 4.0
    guidance_argument = "true_cfg_scale"
    steps = 50

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        if source.pipeline_name in (EDIT, EDIT_PLUS):
            if text_length is not None:
                raise ConfigError(
                    f"tokenizer_max_length is {text_length}, but a {source.pipeline_name} reads captions whole, after "
                    "the tokens of its reference images; leave it out."
                )
            self.sees_references = True
            self.text_parts = (*self.text_parts, "processor")
            self.packages = ("torchvision",)

    @property
    def reference_counts(self) -> range:
        most = {EDIT: 1, EDIT_PLUS: sys.maxsize - 1}.get(self.source.pipeline_name, 0)
        return range(1, most + 1) if most else range(1)

    @property
    def reference_shape(self) -> tuple[int, int] | None:
        """The stock pipelines scale references to about a megapixel, sides rounded to 32, whatever they draw."""
        if not self.takes_references:
            return None
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        width, height = _scaled(1.0, EDIT_AREA if self.source.pipeline_name == EDIT else plus.VAE_IMAGE_SIZE)
        return width * height, 32

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)  # (B, L, D), (B, L)
        return [{"embeds": text} for text in (embeds if mask is None else cut(embeds, mask))]

    @torch.no_grad()
    def encode_seen(self, pipeline: Any, caption: str, images: Sequence[Image]) -> Text:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        one = self.source.pipeline_name == EDIT
        seen: list[Image] = []
        for image in images:
            width, height = _scaled(image.width / image.height, EDIT_AREA if one else plus.CONDITION_IMAGE_SIZE)
            seen.append(pipeline.image_processor.resize(image, height, width))
        embeds, _ = pipeline.encode_prompt(caption, image=seen[0] if one else seen)  # (1, L, D)
        return {"embeds": embeds[0]}

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        embeds, mask = padded([text["embeds"] for text in texts], self.text_multiple)
        return {"embeds": embeds} if mask.all() else {"embeds": embeds, "mask": mask}

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        """The prompts without the padding that compiled layers need."""
        away = {} if negative is None else {"negative_prompt_embeds": negative["embeds"][None]}
        return {"prompt_embeds": text["embeds"][None], **away}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_stills(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline as stock

        images = [noisy, *(reference.to(noisy.dtype) for reference in references(batch))]
        stream = torch.cat([stock._pack_latents(image, *image.shape) for image in images], dim=1)  # (B, S + R, 4 C)
        velocity = model(
            hidden_states=stream,
            timestep=time,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_hidden_states_mask=batch.get("text.mask"),
            img_shapes=[[(1, rows // 2, columns // 2) for *_, rows, columns in (i.shape for i in images)]] * len(noisy),
            return_dict=False,
        )[0]
        rows, columns = noisy.shape[2:]
        return stock._unpack_latents(velocity[:, : self.tokens(noisy)], rows, columns, 1)[:, :, 0]  # (B, C, h, w)

    def image_arguments(self, images: Sequence[Image], width: int, height: int) -> dict[str, Any]:
        """The unscaled images: the stock pipelines scale them."""
        return {"image": images[0] if self.source.pipeline_name == EDIT else list(images)}


def _scaled(ratio: float, area: int) -> tuple[int, int]:
    """Width and height of about this area, by the stock pipelines' own function."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    width, height, *_ = plus.calculate_dimensions(area, ratio)
    return width, height
