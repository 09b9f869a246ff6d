"""The family FLUX.1: dev, schnell and Kontext.

- Text is CLIP's pooled vector and 512 tokens of T5, padding included: the model has no text mask.
- The model reads latents as 2 x 2 patches, each with the ids (image, row, column).
- Guidance is an input of dev. It is 1 in training, so that guidance 1 reproduces the data; previews have their own.
- Kontext appends the patches of the source image, with image id 1; the prediction is cut to the target's patches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.patches import ids_of, packed, unpacked
from tread.finetune.families.tokens import Patch
from tread.finetune.family import JOINT_ATTENTION, JOINT_FEED_FORWARD, Batch, Text, TuneFamily


class Flux(TuneFamily):
    """FLUX.1 dev, schnell and Kontext."""

    name = "flux"
    pipelines = ("FluxPipeline", "FluxKontextPipeline")
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    longest_text = 512
    lora_targets = (*JOINT_ATTENTION, *JOINT_FEED_FORWARD)
    guidance = 3.5
    steps = 28

    @property
    def patch(self) -> Patch:
        return Patch(1, 2, 2)  # latents are packed before the transformer, whose own patch_size is 1

    @property
    def reference_counts(self) -> range:
        return range(1, 2) if self.source.pipeline_name == "FluxKontextPipeline" else range(1)

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, pooled, _ = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)
        return [{"embeds": e, "pooled": p} for e, p in zip(embeds, pooled, strict=True)]  # (512, D), (P,)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        stream, ids = packed(noisy), ids_of(noisy)  # (B, S, 4 C), (S, 3)
        count = stream.shape[1]
        if "reference.mean" in batch:
            source = batch["reference.mean"].to(noisy.dtype)
            stream = torch.cat([stream, packed(source)], dim=1)  # (B, S + R, 4 C)
            ids = torch.cat([ids, ids_of(source, image=1)])  # (S + R, 3)
        text = batch["text.embeds"]
        guided = self.transformer_config.get("guidance_embeds", False)
        (prediction,) = model(
            hidden_states=stream,
            timestep=time,
            guidance=torch.ones_like(time) if guided else None,
            pooled_projections=batch["text.pooled"],
            encoder_hidden_states=text,
            txt_ids=ids.new_zeros(text.shape[1], 3),
            img_ids=ids,
            return_dict=False,
        )
        return unpacked(prediction[:, :count], *noisy.shape[2:])  # (B, C, H, W)

    def exact_size(self, width: int, height: int) -> dict[str, Any]:
        return {"max_area": width * height, "_auto_resize": False} if self.takes_references else {}
