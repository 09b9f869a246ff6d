"""The family Cosmos Predict 2, video to world: a clip is drawn from its given first frame.

The first latent frame is given clean, at the small time that the pipeline calls sigma_conditioning, with a mask channel
that marks it. Times are per latent frame, and positions depend on the frame rate.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.cosmos import Cosmos
from tread.finetune.families.first_frame import NEEDS_CLIPS, after_first, with_first
from tread.finetune.family import Batch

SIGMA_GIVEN = 0.0001
"""The noise level of given frames, as in the pipeline."""


class CosmosVideo(Cosmos):
    """Cosmos Predict 2, video to world."""

    name = "cosmos_video"
    pipelines = ("Cosmos2VideoToWorldPipeline",)
    video = True

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        return NEEDS_CLIPS if frames == 1 else None

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_videos(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        later = after_first(noisy)  # (B, 1, f, h, w)
        times = time.view(-1, 1, 1, 1, 1) * later[..., :1, :1]  # (B, 1, f, 1, 1)
        times = torch.where(later[..., :1, :1] == 0, SIGMA_GIVEN / (SIGMA_GIVEN + 1), times)
        more = {"fps": self.frame_rate, "condition_mask": 1 - later}
        return self._call(model, with_first(noisy, batch["mean"]), times, batch, **more)

    def weight(self, batch: Batch) -> Tensor | None:
        return after_first(batch["mean"])
