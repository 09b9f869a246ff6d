"""The family HunyuanVideo 1.0: text to video with Llama and CLIP. 1.5 is the family `hunyuanvideo`.

- Text is Llama's states of the caption in the pipeline's template, with a mask, and CLIP's pooled vector.
- Guidance is an input. It is 1 in training, so that the data is what guidance 1 draws; previews have their own.
- The released model is distilled from guidance. Previews are not guided away from a negative prompt.
- The encoder of the image-to-video model reads caption and first frame together, so it cannot be cached by caption.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.ragged_text import cut, masked_prompt, padded
from tread.finetune.family import JOINT_ATTENTION, Batch, Text, TuneFamily


class HunyuanVideo1(TuneFamily):
    """HunyuanVideo 1.0."""

    name = "hunyuanvideo1"
    pipelines = ("HunyuanVideoPipeline",)
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    longest_text = 256
    texts_differ = True
    lora_targets = JOINT_ATTENTION
    video = True
    frame_rate = 24
    guidance = 6.0
    steps = 50

    @property
    def patch(self) -> tuple[int, int, int]:
        config = self.source.config("transformer")
        return config["patch_size_t"], config["patch_size"], config["patch_size"]

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, pooled, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)
        texts = cut(embeds, mask)  # (l, D) each
        return [{"embeds": text, "pooled": vector} for text, vector in zip(texts, pooled, strict=True)]

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        embeds, mask = padded([text["embeds"] for text in texts], self.text_multiple)
        return {"embeds": embeds, "mask": mask, "pooled": torch.stack([text["pooled"] for text in texts])}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_videos(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        return model(
            hidden_states=noisy,
            timestep=time * 1000,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_attention_mask=batch["text.mask"],
            pooled_projections=batch["text.pooled"].to(noisy.dtype),
            guidance=torch.full_like(time, 1000.0),
            return_dict=False,
        )[0]

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        return masked_prompt(text["embeds"], None) | {"pooled_prompt_embeds": text["pooled"][None]}
