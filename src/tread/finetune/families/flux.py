"""The family FLUX.1: dev, schnell and Kontext.

- Text is CLIP's pooled vector and 512 tokens of T5, padding included: the model has no text mask.
- The model reads latents as 2 x 2 patches, each with the ids (image, row, column).
- Guidance is an input of dev. It is 1 in training, so that the data is what guidance 1 draws; previews have their own.
- Kontext appends the patches of the source image, with image id 1; the prediction is cut to the target's patches.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.family import JOINT_ATTENTION, Batch, Text, TuneFamily


class Flux(TuneFamily):
    """FLUX.1 dev, schnell and Kontext."""

    name = "flux"
    pipelines = ("FluxPipeline", "FluxKontextPipeline")
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    longest_text = 512
    lora_targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    guidance = 3.5
    steps = 28

    @property
    def reference_counts(self) -> range:
        return range(1, 2) if self.source.pipeline_name == "FluxKontextPipeline" else range(1)

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, pooled, _ = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)
        return [{"embeds": e, "pooled": p} for e, p in zip(embeds, pooled, strict=True)]  # (512, D), (P,)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

        stream, ids = _tokens(noisy, image=0)  # (B, S, 4C), (S, 3)
        count = stream.shape[1]
        if "reference.mean" in batch:
            source, source_ids = _tokens(batch["reference.mean"].to(noisy.dtype), image=1)
            stream, ids = torch.cat([stream, source], dim=1), torch.cat([ids, source_ids])  # (B, S + R, 4C)
        text = batch["text.embeds"]
        guided = self.source.config("transformer").get("guidance_embeds", False)
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
        rows, columns = noisy.shape[2:]
        return FluxPipeline._unpack_latents(prediction[:, :count], rows, columns, vae_scale_factor=1)  # (B, C, H, W)

    def exact_size(self, width: int, height: int) -> dict[str, Any]:
        return {"max_area": width * height, "_auto_resize": False} if self.takes_references else {}


def _tokens(latents: Tensor, *, image: int) -> tuple[Tensor, Tensor]:
    """Latents (B, C, H, W) -> patches (B, S, 4C) and their ids (S, 3)."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    batch, channels, rows, columns = latents.shape
    packed = FluxPipeline._pack_latents(latents, batch, channels, rows, columns)  # (B, S, 4C)
    return packed, _ids(rows // 2, columns // 2, image, latents.device)


@lru_cache
def _ids(rows: int, columns: int, image: int, device: torch.device) -> Tensor:
    """The ids of a grid of patches, (S, 3); cached, so never written to."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    with device:  # the stock function would build them on the host, and the copy would synchronise
        ids = FluxPipeline._prepare_latent_image_ids(1, rows, columns, device, torch.float32)
        ids[:, 0] = image
    return ids
