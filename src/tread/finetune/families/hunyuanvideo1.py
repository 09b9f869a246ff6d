"""The family HunyuanVideo 1.0: text to video and image to video with Llama and CLIP. 1.5 is the family `hunyuanvideo`.

- Text is Llama's states of the caption in the pipeline's template, with a mask, and CLIP's pooled vector.
- Guidance is an input. It is 1 in training, so that guidance 1 reproduces the data; previews have their own.
- The released model is guidance-distilled, so previews use no negative prompt.
- Image to video is given its first frame as latents of that frame alone, because the autoencoder's norms mix frames.
  The transformer's config says how: they replace the first latent frame, which the model modulates as clean
  (`token_replace`), or they are channels beside the noisy latents (`latent_concat`, the model of 33 channels).
- The text encoder of image to video is LLaVA, which sees the first frame too, so a caption is encoded once per clip.
"""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from tread.errors import ConfigError, shown
from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.first_frame import NEEDS_CLIPS, after_first, with_first
from tread.finetune.families.ragged_text import MaskedText, cut
from tread.finetune.family import JOINT_ATTENTION, Batch, Text
from tread.finetune.model.source import Source

IMAGE = "HunyuanVideoImageToVideoPipeline"
EVERY = {"latent_concat": 2, "token_replace": 4}
"""Conditioning type -> stride at which the pipeline reads LLaVA's image tokens."""


class HunyuanVideo1(MaskedText):
    """HunyuanVideo 1.0."""

    name = "hunyuanvideo1"
    pipelines = ("HunyuanVideoPipeline", IMAGE)
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    longest_text = 256
    lora_targets = JOINT_ATTENTION
    video = True
    frame_rate = 24
    guidance = 6.0
    steps = 50

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        if source.pipeline_name == IMAGE:
            if self._given not in EVERY:
                raise ConfigError(
                    f"image_condition_type of the transformer of {source.name_or_path!r} is {shown(self._given)}, "
                    f"but a {IMAGE} needs {' or '.join(EVERY)}: set pretrained_model_name_or_path to an image-to-video "
                    "model."
                )
            self.sees_first_frame = True
            self.text_parts = (*self.text_parts, "image_processor")

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        return NEEDS_CLIPS if self._given is not None and frames == 1 else None

    @property
    def encoding(self) -> tuple[object, ...]:
        return () if self._given is None else (self._given,)

    @property
    def text_encoding(self) -> tuple[object, ...]:
        return self.encoding

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        return self._texts(*pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length))

    @torch.no_grad()
    def encode_seen(self, pipeline: Any, caption: str, images: Sequence[Image]) -> Text:
        every = EVERY[str(self._given)]
        encoded = pipeline.encode_prompt(
            images[0], caption, max_sequence_length=self.text_length, image_embed_interleave=every
        )
        return self._texts(*encoded)[0]

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        return super().collate_text(texts) | {"pooled": torch.stack([text["pooled"] for text in texts])}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        batch = encode_videos(pipeline.vae, pixels)
        if self._given is not None:
            alone = encode_videos(pipeline.vae, pixels[:, :, :1])  # (B, C, 1, h, w)
            if self._given == "latent_concat":
                batch["condition"] = alone["mean"]
            else:
                batch = {name: with_first(values, alone[name]) for name, values in batch.items()}
        return batch

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        inputs = noisy
        if self._given == "token_replace":
            inputs = with_first(noisy, batch["mean"])
        elif self._given == "latent_concat":
            known = with_first(torch.zeros_like(noisy), batch["condition"])
            inputs = torch.cat([noisy, known, 1 - after_first(noisy)], dim=1)  # (B, 2 C + 1, f, h, w)
        return model(
            hidden_states=inputs,
            timestep=time * 1000,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_attention_mask=batch["text.mask"],
            pooled_projections=batch["text.pooled"].to(noisy.dtype),
            guidance=torch.full_like(time, 1000.0) if self.transformer_config.get("guidance_embeds") else None,
            return_dict=False,
        )[0]

    def weight(self, batch: Batch) -> Tensor | None:
        return after_first(batch["mean"]) if self._given == "token_replace" else None

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        return super().prompt_arguments(text, None) | {"pooled_prompt_embeds": text["pooled"][None]}

    def image_arguments(self, images: Sequence[Image], width: int, height: int) -> dict[str, Any]:
        """The unscaled image: LLaVA was given it like that, and the stock pipeline scales it for the autoencoder."""
        return {"image": images[0]}

    @property
    def _given(self) -> str | None:
        """The conditioning type for the first frame; None: the model draws from text alone."""
        return self.transformer_config.get("image_condition_type") if self.source.pipeline_name == IMAGE else None

    def _texts(self, embeds: Tensor, pooled: Tensor, mask: Tensor) -> list[Text]:
        """Embeddings (B, L, D) and pooled vectors (B, P) of captions, without the padding that the mask hides."""
        return [{"embeds": e, "pooled": p} for e, p in zip(cut(embeds, mask), pooled, strict=True)]  # (l, D), (P,)
