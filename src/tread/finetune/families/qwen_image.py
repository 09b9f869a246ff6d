"""The family Qwen-Image: text to image with Qwen2.5-VL.

- The autoencoder is a video autoencoder; an image is one frame, and latents here have no frame axis.
- Texts have no fixed length. A batch of equally long texts has no mask, as in the pipeline: with a mask the stock model
  copies a number to the device in every forward, which synchronises.
- `true_cfg_scale` is the pipeline's name for the scale of classifier-free guidance.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_stills
from tread.finetune.families.ragged_text import cut, padded
from tread.finetune.family import Batch, Text, TuneFamily


class QwenImage(TuneFamily):
    """Qwen-Image."""

    name = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 1024
    texts_differ = True
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    guidance = 4.0
    guidance_argument = "true_cfg_scale"
    steps = 50

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)  # (B, L, D), (B, L)
        return [{"embeds": text} for text in (embeds if mask is None else cut(embeds, mask))]

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        embeds, mask = padded([text["embeds"] for text in texts], self.text_multiple)
        return {"embeds": embeds} if mask.all() else {"embeds": embeds, "mask": mask}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_stills(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline as stock

        count, _, rows, columns = noisy.shape
        velocity = model(
            hidden_states=stock._pack_latents(noisy, *noisy.shape),  # (B, S, 4 C)
            timestep=time,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_hidden_states_mask=batch.get("text.mask"),
            img_shapes=[[(1, rows // 2, columns // 2)]] * count,
            return_dict=False,
        )[0]
        return stock._unpack_latents(velocity, rows, columns, 1)[:, :, 0]  # (B, C, h, w)
