"""The base class of Kandinsky 5's image and video families: two text encoders, and channels-last latents.

- Text is Qwen2.5-VL's tokens without its template, and CLIP's pooled vector. The model has no text mask, and the
  pipelines do not pad a single prompt, so the texts of a batch must have one length.
- Time runs to 1000; the velocity is noise - x.
- A model with `visual_cond` takes, beside the noisy latents, as many condition channels and one for their mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.ragged_text import check_one_length, cut
from tread.finetune.family import Batch, Text, TuneFamily


class Kandinsky5(TuneFamily):
    """The base class of both families."""

    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    packages = ("torchvision",)
    longest_text = 512
    texts_differ = True
    one_length = True
    lora_targets = (
        *(f"self_attention.{name}" for name in ("to_query", "to_key", "to_value", "out_layer")),
        *(f"cross_attention.{name}" for name in ("to_query", "to_key", "to_value", "out_layer")),
        *("feed_forward.in_layer", "feed_forward.out_layer"),
    )
    guidance = 5.0
    steps = 50

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, pooled, ends = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)
        given = torch.arange(embeds.shape[1], device=embeds.device) < ends.diff()[:, None]  # (B, L)
        return [{"embeds": e, "pooled": p} for e, p in zip(cut(embeds, given), pooled, strict=True)]  # (l, D), (P,)

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        check_one_length(self.name, [text["embeds"] for text in texts])
        return super().collate_text(texts)

    def call(self, model: nn.Module, video: Tensor, time: Tensor, batch: Batch, scale: Sequence[float]) -> Tensor:
        """The velocity of latents (B, C, f, h, w), in their shape; `video` may have condition channels after them."""
        text = batch["text.embeds"].to(video.dtype)
        velocity = model(
            hidden_states=video.permute(0, 2, 3, 4, 1),  # (B, f, h, w, C)
            encoder_hidden_states=text,
            pooled_projections=batch["text.pooled"].to(video.dtype),
            timestep=time * 1000,
            visual_rope_pos=[torch.arange(size, device=video.device) for size in self.patch.grid(video)],
            text_rope_pos=torch.arange(text.shape[1], device=video.device),
            scale_factor=scale,
            return_dict=False,
        )
        return velocity.permute(0, 4, 1, 2, 3)  # (B, C, f, h, w)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for prefix, encoded in (("", text), ("negative_", negative)):
            if encoded is not None:
                ends = torch.tensor([0, len(encoded["embeds"])], dtype=torch.int32, device=encoded["embeds"].device)
                arguments[f"{prefix}prompt_embeds_qwen"] = encoded["embeds"][None]
                arguments[f"{prefix}prompt_embeds_clip"] = encoded["pooled"][None]
                arguments[f"{prefix}prompt_cu_seqlens"] = ends
        return arguments
