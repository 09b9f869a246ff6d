"""The family Cosmos Predict 2.5: text to image and to video, and a video drawn from its given first frame.

- One pipeline draws from text or from a frame, with a mask channel for what is given; `first_frame` trains the second.
- Text is Qwen2.5-VL's states of all layers at 512 tokens, padding included, which the model reads without a mask.
- A given first frame is clean, at the small time that the pipeline calls conditional_frame_timestep, and times are per
  frame. The pipeline passes a time per frame even if all are equal; one time per sample gives the same result and saves
  the modulation of every token in every layer.
- Guardrail and padding mask are those of `cosmos`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.cosmos import Cosmos
from tread.finetune.families.first_frame import FirstFrame, after_first, with_first
from tread.finetune.family import Batch, Text

PIPELINE = "Cosmos2_5_PredictBasePipeline"
TIME_GIVEN = 0.0001
"""The time of given frames, as in the pipeline."""


class Cosmos25(FirstFrame, Cosmos):
    """Cosmos Predict 2.5."""

    name = "cosmos25"
    pipelines = (PIPELINE,)
    image_pipelines: ClassVar[dict[str, str]] = {PIPELINE: PIPELINE}
    needed_parts = ("vae",)
    video = True
    steps = 36

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds = pipeline._get_prompt_embeds(
            list(captions), max_sequence_length=self.text_length, device=pipeline.text_encoder.device
        )  # (B, 512, layers D)
        return [{"embeds": text} for text in embeds]

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_videos(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        given = torch.zeros_like(noisy[:, :1])  # (B, 1, f, h, w)
        if self.starts_clean(noisy):
            noisy, given = with_first(noisy, batch["mean"]), 1 - after_first(noisy)
            time = torch.where(given[..., :1, :1] == 1, TIME_GIVEN, time.view(-1, 1, 1, 1, 1))  # (B, 1, f, 1, 1)
        return self._call(model, noisy, time, batch, condition_mask=given)
