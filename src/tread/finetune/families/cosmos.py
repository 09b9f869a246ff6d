"""The family Cosmos Predict 2: text to image. Video to world is the family `cosmos_video`.

- The pipeline samples as EDM does, with noise levels up to 80. Scaled to unit variance its state is the straight path
  of a flow at time sigma / (sigma + 1), which is the model's time input, and its output is the velocity.
- Text is padded with zeros to 512 tokens, which the model reads without a mask: cached unpadded, padded in a batch.
- The stock pipeline insists on NVIDIA's guardrail (pip install cosmos_guardrail). Encoding works without it; previews
  and the result's card need it. Released transformers need torchvision for their padding mask.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.autoencoders import encode_stills
from tread.finetune.families.ragged_text import FilledText, cut
from tread.finetune.family import Batch, Text
from tread.finetune.model.source import Source


class Cosmos(FilledText):
    """Cosmos Predict 2, text to image."""

    name = "cosmos"
    pipelines = ("Cosmos2TextToImagePipeline",)
    text_parts = ("tokenizer", "text_encoder")
    drawing_parts = ("safety_checker",)
    longest_text = 512
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    guidance = 7.0
    steps = 35
    packages = ("cosmos_guardrail", "torchvision")

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        if self.transformer_config.get("concat_padding_mask") and importlib.util.find_spec("torchvision") is None:
            raise ConfigError(
                f"the transformer of {source.name_or_path!r} resizes its padding mask with torchvision, which is not "
                "installed: run pip install torchvision."
            )

    def stand_ins(self) -> dict[str, Any]:
        return no_guardrail()

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds = pipeline._get_t5_prompt_embeds(
            list(captions), max_sequence_length=self.text_length, device=pipeline.text_encoder.device
        )  # (B, 512, D)
        return [{"embeds": text} for text in cut(embeds, embeds.ne(0).any(-1))]

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_stills(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        return self._call(model, noisy[:, :, None], time, batch)[:, :, 0]  # (B, C, h, w)

    def _call(self, model: nn.Module, latents: Tensor, time: Tensor, batch: Batch, **more: Any) -> Tensor:
        rows, columns = (self.factor * size for size in latents.shape[-2:])
        return model(
            hidden_states=latents,
            timestep=time,
            encoder_hidden_states=batch["text.embeds"].to(latents.dtype),
            padding_mask=latents.new_zeros(1, 1, rows, columns),
            **more,
            return_dict=False,
        )[0]  # (B, C, f, h, w)


def no_guardrail() -> dict[str, Any]:
    """A stand-in for NVIDIA's guardrail, without which a stock pipeline of Cosmos cannot be constructed."""
    from diffusers.models.modeling_utils import ModelMixin

    none: Any = type("NoGuardrail", (ModelMixin,), {})()
    none.register_parameter("unused", nn.Parameter(torch.zeros(1)))  # stock code asks every part for its dtype
    return {"safety_checker": none}
