"""The family AuraFlow: text to image with UMT5.

- Text is 256 tokens of UMT5. The model has no text mask: it reads padding too, which is zeros and is not cached.
- Time and velocity are as in the other flow models: time 1 is noise, and the model predicts noise - x.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.ragged_text import FilledText
from tread.finetune.family import JOINT_ATTENTION, Batch, Text


class AuraFlow(FilledText):
    """AuraFlow v0.2 and v0.3."""

    name = "auraflow"
    pipelines = ("AuraFlowPipeline",)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 256
    lora_targets = JOINT_ATTENTION
    guidance = 3.5
    steps = 50

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask, *_ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )
        mask = mask.view(embeds.shape)[..., 0].bool()  # (B, 256); the stock mask repeats each token's value D times
        return [{"embeds": e[m]} for e, m in zip(embeds, mask, strict=True)]

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        (prediction,) = model(
            hidden_states=noisy, encoder_hidden_states=batch["text.embeds"], timestep=time, return_dict=False
        )
        return prediction

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        return self._prompt(text, "prompt") | (self._prompt(negative, "negative_prompt") if negative else {})

    def _prompt(self, text: Text, name: str) -> dict[str, Tensor]:
        embeds = self.collate_text([text])["embeds"]  # (1, 256, D)
        given = torch.arange(self.text_length, device=embeds.device) < len(text["embeds"])
        return {f"{name}_embeds": embeds, f"{name}_attention_mask": given[None]}
