"""The family Krea 2: text to image with Qwen3-VL and Qwen-Image's autoencoder.

- A token of text is a stack of hidden states, (12, D), that the model fuses itself. The pipeline pads between the
  caption and the end of its template; the model masks padding out and gives text no positions, so it is cut off before
  it is cached and texts are padded at their end again: 12 states of 512 tokens would take 30 MB per caption.
- The pipeline guides at any scale above 0, by prediction + scale * (prediction - negative); scale 0 turns guidance off.
- The distilled model is sampled with one shift for all sizes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_stills
from tread.finetune.families.patches import ids_of, packed, unpacked
from tread.finetune.families.ragged_text import padded
from tread.finetune.family import Batch, Text, TuneFamily
from tread.finetune.model.source import Source
from tread.finetune.target import Distance, FlowTarget, Target

DISTILLED_SHIFT = math.exp(1.15)
"""The shift that the pipeline samples a distilled model with."""


class Krea2(TuneFamily):
    """Krea 2 raw and turbo."""

    name = "krea2"
    pipelines = ("Krea2Pipeline",)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 512
    texts_differ = True
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    guidance = 4.5
    unguided = 0.0
    steps = 28
    few_steps = (8, 0.0)

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        width = source.config("text_encoder").get("text_config", {}).get("hidden_size")
        self.check_text_width("text_encoder", width, self.transformer_config["text_hidden_dim"])

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)
        return [{"embeds": text[given]} for text, given in zip(embeds, mask, strict=True)]  # (l, 12, D)

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        embeds, mask = padded([text["embeds"] for text in texts], self.text_multiple)
        return {"embeds": embeds, "mask": mask.bool()}  # (B, L, 12, D), (B, L)

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_stills(pipeline.vae, pixels)

    def target(self, *, shift: float | None, distance: Distance) -> Target:
        if shift is None and self.source.index.get("is_distilled"):
            return FlowTarget(shift=DISTILLED_SHIFT, distance=distance)
        return super().target(shift=shift, distance=distance)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        text, ids = batch["text.embeds"].to(noisy.dtype), ids_of(noisy)  # (B, L, 12, D), (S, 3)
        (velocity,) = model(
            hidden_states=packed(noisy),  # (B, S, 4 C)
            encoder_hidden_states=text,
            timestep=time,
            position_ids=torch.cat([ids.new_zeros(text.shape[1], 3), ids]),  # (L + S, 3)
            encoder_attention_mask=batch["text.mask"],
            return_dict=False,
        )
        return unpacked(velocity, *noisy.shape[2:])  # (B, C, h, w)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        # padded together: the pipeline has one table of positions for both
        given = [text] if negative is None else [text, negative]
        batch = self.collate_text(given)
        arguments = {"prompt_embeds": batch["embeds"][:1], "prompt_embeds_mask": batch["mask"][:1]}
        if negative is not None:
            arguments |= {
                "negative_prompt_embeds": batch["embeds"][1:],
                "negative_prompt_embeds_mask": batch["mask"][1:],
            }
        return arguments
