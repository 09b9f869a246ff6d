"""The family Chroma: FLUX.1 with T5 alone, without its guidance input.

- Text is 512 tokens of T5 with a mask that is 1 for each word and for the first token of padding. The pipeline passes
  it as a float mask, which attention adds to the scores: the other padding is not hidden, only weighed down by a factor
  e. So padding is cached and computed like words, and the mask has the dtype of the text, as in the pipeline.
- Stock Chroma drops the mask in its single layers under activation checkpointing, so `checkpoints_whole` is False.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.finetune.families.patches import ids_of, packed, unpacked
from tread.finetune.families.tokens import Patch
from tread.finetune.family import JOINT_ATTENTION, JOINT_FEED_FORWARD, Batch, Text, TuneFamily
from tread.finetune.model.source import Source


class Chroma(TuneFamily):
    """Chroma1 base, HD and flash."""

    name = "chroma"
    pipelines = ("ChromaPipeline",)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 512
    lora_targets = (*JOINT_ATTENTION, *JOINT_FEED_FORWARD)
    prompt_names: ClassVar = {"embeds": "prompt_embeds", "mask": "prompt_attention_mask"}
    guidance = 5.0
    steps = 35
    few_steps = (16, 1.0)
    checkpoints_whole = False

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        width = source.config("text_encoder").get("d_model")
        self.check_text_width("text_encoder", width, self.transformer_config["joint_attention_dim"])

    @property
    def patch(self) -> Patch:
        return Patch(1, 2, 2)  # latents are packed before the transformer, whose own patch_size is 1

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask = pipeline._get_t5_prompt_embeds(list(captions), max_sequence_length=self.text_length)
        return [{"embeds": e, "mask": m} for e, m in zip(embeds, mask, strict=True)]  # (512, D), (512,)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        stream, ids = packed(noisy), ids_of(noisy)  # (B, S, 4 C), (S, 3)
        text, mask = batch["text.embeds"], batch["text.mask"]
        (velocity,) = model(
            hidden_states=stream,
            timestep=time,
            encoder_hidden_states=text,
            txt_ids=ids.new_zeros(text.shape[1], 3),
            img_ids=ids,
            attention_mask=torch.cat([mask, mask.new_ones(stream.shape[:2])], dim=1),  # (B, L + S)
            return_dict=False,
        )
        return unpacked(velocity, *noisy.shape[2:])  # (B, C, H, W)
