"""The family LTX-Video: text to video, and image to video with a given first frame; 0.9.0 to 0.9.7, not distilled.

- The model reads packed latents, a text mask, and the positions of tokens in seconds and pixels: they depend on the
  frame rate. LTXConditionPipeline (0.9.5 and later) counts the first latent frame as one pixel frame, the older
  pipelines as eight.
- A given first frame has time 0, so times are per token. LTXConditionPipeline draws from text or from a frame.
- The text encoder reads padding too, so texts are encoded at full length and cached without it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.first_frame import FirstFrame, after_first, with_first
from tread.finetune.families.ragged_text import MaskedText, cut
from tread.finetune.family import Batch, Text
from tread.finetune.model.source import Source

CONDITION = "LTXConditionPipeline"
CONDITION_TEXT = 256
"""The most tokens of a caption that LTXConditionPipeline reads."""


class LTXVideo(FirstFrame, MaskedText):
    """LTX-Video."""

    name = "ltxvideo"
    pipelines = ("LTXPipeline", "LTXImageToVideoPipeline", CONDITION)
    image_pipelines: ClassVar[dict[str, str]] = {"LTXPipeline": "LTXImageToVideoPipeline", CONDITION: CONDITION}
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 128
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    video = True
    frame_rate = 25
    guidance = 3.0
    steps = 50

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length or (CONDITION_TEXT if source.pipeline_name == CONDITION else None))
        if source.config("scheduler").get("stochastic_sampling"):
            raise ConfigError(
                f"{source.name_or_path!r} is a distilled LTX-Video (stochastic_sampling of its scheduler is true), "
                "which training would teach to need many steps: set pretrained_model_name_or_path to a dev or base "
                "model."
            )

    @property
    def factor(self) -> int:
        config = self.source.config("vae")
        return config.get("spatial_compression_ratio") or config["patch_size"] * self._halvings

    @property
    def frame_factor(self) -> int:
        config = self.source.config("vae")
        return config.get("temporal_compression_ratio") or config["patch_size_t"] * self._halvings

    @property
    def multiple(self) -> int:
        return max(32, super().multiple)  # pipelines refuse sides that are not multiples of 32

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )  # (B, L, D), (B, L)
        return [{"embeds": text} for text in cut(embeds, mask)]

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_videos(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline as stock

        timestep = time * 1000
        if self.starts_clean(noisy):
            noisy = with_first(noisy, batch["mean"])
            timestep = timestep[:, None] * self.patch.any_in_token(after_first(noisy))  # (B, S)
        frames, rows, columns = noisy.shape[2:]
        patch_t, patch, _ = self.patch
        velocity = model(
            hidden_states=stock._pack_latents(noisy, patch, patch_t),  # (B, S, D)
            timestep=timestep,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_attention_mask=batch["text.mask"],
            **self._positions(noisy),
            return_dict=False,
        )[0]
        return stock._unpack_latents(velocity, frames, rows, columns, patch, patch_t)  # (B, C, f, h, w)

    @property
    def _halvings(self) -> int:
        return 2 ** sum(self.source.config("vae")["spatio_temporal_scaling"])

    def _positions(self, noisy: Tensor) -> dict[str, Any]:
        frames, rows, columns = noisy.shape[2:]
        if self.source.pipeline_name == CONDITION:
            grid = (frames, rows, columns)
            coords = _coords(grid, self.patch, self.factor, self.frame_factor, self.frame_rate, noisy.device)
            return {"video_coords": coords.expand(len(noisy), -1, -1)}  # (B, 3, S)
        scale = (self.frame_factor / self.frame_rate, self.factor, self.factor)
        return {"num_frames": frames, "height": rows, "width": columns, "rope_interpolation_scale": scale}


@lru_cache
def _coords(
    grid: tuple[int, int, int],
    patch: tuple[int, int, int],
    factor: int,
    frame_factor: int,
    frame_rate: float,
    device: torch.device,
) -> Tensor:
    """Seconds, row and column of each token in pixels, (1, 3, S); cached, so do not modify it."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXConditionPipeline as stock

    ids = stock._prepare_video_ids(1, *grid, patch_size=patch[1], patch_size_t=patch[0], device=device)
    coords = stock._scale_video_ids(ids, factor, frame_factor, frame_index=0, device=device).float()
    coords[:, 0] /= frame_rate
    return coords
