"""The family Lumina-Image 2.0: text to image with Gemma.

- The model's time runs from noise at 0 to data at 1, and its velocity is x - noise: `predict` reverses both.
- A caption follows the pipeline's system prompt. The empty caption is encoded without it, as the pipeline encodes
  negative prompts.
- The model cuts each caption at its mask, so texts are cached without padding. Its forward reads the lengths from the
  device, a synchronisation that callers cannot avoid.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.ragged_text import MaskedText, cut
from tread.finetune.family import Batch, Text


class Lumina2(MaskedText):
    """Lumina-Image 2.0."""

    name = "lumina2"
    pipelines = ("Lumina2Pipeline",)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 256
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    guidance = 4.0
    steps = 30

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        prompts = [f"{pipeline.system_prompt} <Prompt Start> {caption}" if caption else "" for caption in captions]
        embeds, mask = pipeline._get_gemma_prompt_embeds(prompts, max_sequence_length=self.text_length)
        return [{"embeds": text} for text in cut(embeds, mask)]

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        return -model(
            hidden_states=noisy,
            timestep=1 - time,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_attention_mask=batch["text.mask"],
            return_dict=False,
        )[0]
