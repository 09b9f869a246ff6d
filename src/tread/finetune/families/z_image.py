"""The family Z-Image: text to image with Qwen3.

- The model's time runs from noise at 0 to data at 1, and its velocity is x - noise: `predict` reverses both.
- A batch is a list of samples, each with a text of its own length, which the model pads with learned tokens to a
  multiple of 32. So a batch holds one tensor per text: cutting them by a mask would read it from the device.
- The pipeline guides at any scale above 0, by prediction + scale * (prediction - negative); scale 0 turns guidance off.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.family import Batch, Text, TuneFamily
from tread.finetune.model.source import Source


class ZImage(TuneFamily):
    """Z-Image, and Z-Image-Turbo."""

    name = "z_image"
    pipelines = ("ZImagePipeline",)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 512
    texts_differ = True
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    guidance = 5.0
    unguided = 0.0
    steps = 50
    few_steps = (9, 0.0)

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        width = source.config("text_encoder").get("hidden_size")
        self.check_text_width("text_encoder", width, self.transformer_config["cap_feat_dim"])

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        _, rows, columns = self.transformer_config["axes_lens"]
        most_wide, most_high = columns * self.multiple, rows * self.multiple
        if width <= most_wide and height <= most_high:
            return None
        return (
            f"{width} x {height} pixels are more than the {most_wide} x {most_high} that it has positions for: lower "
            "resolution"
        )

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        texts, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )
        return [{"embeds": text} for text in texts]  # (l, D)

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        return {f"embeds.{i}": text["embeds"] for i, text in enumerate(texts)}

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        (velocities,) = model(
            x=list(noisy.unsqueeze(2)),  # (C, 1, h, w) each
            t=1 - time,
            cap_feats=[batch[f"text.embeds.{i}"].to(noisy.dtype) for i in range(len(noisy))],
            return_dict=False,
        )
        return -torch.stack(velocities).squeeze(2)  # (B, C, h, w)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        away = {} if negative is None else {"negative_prompt_embeds": [negative["embeds"]]}
        return {"prompt_embeds": [text["embeds"]], **away}
