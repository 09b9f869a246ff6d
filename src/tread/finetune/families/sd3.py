"""The family Stable Diffusion 3: versions 3 and 3.5.

- Text is 77 tokens of two CLIPs, concatenated along channels, then 256 tokens of T5, and both CLIPs' pooled vectors.
  The model has no text mask.
- A model folder may lack T5: zeros take its place, as in the stock pipeline and in the model's own training.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tread.errors import ConfigError
from tread.finetune.family import JOINT_ATTENTION, Batch, Text, TuneFamily


class SD3(TuneFamily):
    """Stable Diffusion 3 and 3.5."""

    name = "sd3"
    pipelines = ("StableDiffusion3Pipeline",)
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2", "tokenizer_3", "text_encoder_3")
    longest_text = 256
    lora_targets = JOINT_ATTENTION
    guidance = 7.0
    steps = 28

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        captions = list(captions)
        for part in ("text_encoder", "text_encoder_2"):
            if getattr(pipeline, part) is None:
                raise ConfigError(
                    f"{self.source.name_or_path!r} has no {part}; only text_encoder_3 may be left out of an SD3 folder."
                )
        # not encode_prompt: without T5 it reads the transformer, which is not loaded yet
        encoded = [pipeline._get_clip_prompt_embeds(captions, clip_model_index=index) for index in (0, 1)]
        clip = torch.cat([embeds for embeds, _ in encoded], dim=-1)  # (B, 77, D1 + D2)
        pooled = torch.cat([vector for _, vector in encoded], dim=-1)  # (B, P)
        width = self.transformer_config["joint_attention_dim"]
        if pipeline.text_encoder_3 is None:
            t5 = clip.new_zeros(len(captions), self.text_length, width)
        else:
            t5 = pipeline._get_t5_prompt_embeds(captions, max_sequence_length=self.text_length)  # (B, 256, D)
        embeds = torch.cat([F.pad(clip, (0, width - clip.shape[-1])), t5], dim=1)  # (B, 333, D)
        return [{"embeds": e, "pooled": p} for e, p in zip(embeds, pooled, strict=True)]

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        (prediction,) = model(
            hidden_states=noisy,
            timestep=time * 1000,
            encoder_hidden_states=batch["text.embeds"],
            pooled_projections=batch["text.pooled"],
            return_dict=False,
        )
        return prediction
