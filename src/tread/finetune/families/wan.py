"""The family Wan, 2.1 and 2.2: text to video, given first and last frames, A14B's two experts, TI2V's per-token times.

- Text is padded with zeros to 512 tokens, which the model reads without a mask: cached unpadded, padded in a batch.
- Image to video has two forms. 2.1 and A14B take the first frame's latents as extra channels (`condition`) with a mask,
  and 2.1 also CLIP's embedding of it (`image_embeds`). TI2V takes a clean first latent frame, whose tokens have time 0.
- First-and-last-frame models take the last frame in the same channels, and CLIP's embeddings of both.
- TI2V's pipeline passes a time per token even if all are equal. One time per sample gives the same result and saves
  the modulation of every token in every layer, so times are per token only when a first frame is given.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.first_frame import NEEDS_CLIPS, after_first, first_images, with_first
from tread.finetune.families.ragged_text import FilledText, cut
from tread.finetune.family import Batch, Text
from tread.finetune.model.source import Source


class Wan(FilledText):
    """Wan 2.1 and 2.2."""

    name = "wan"
    pipelines = ("WanPipeline", "WanImageToVideoPipeline")
    image_pipelines: ClassVar[dict[str, str]] = {"WanPipeline": "WanImageToVideoPipeline"}
    text_parts = ("tokenizer", "text_encoder")
    pixel_parts = ("vae", "image_encoder", "image_processor")
    longest_text = 512
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    packages = ("ftfy",)  # the image-to-video pipeline cleans prompts with it
    video = True
    guidance = 5.0
    steps = 50

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        if self._conditioned and self.transformer_config["in_channels"] == self.transformer_config["out_channels"]:
            raise ConfigError(
                f"{source.name_or_path!r} draws from text alone and has no inputs for a first frame: leave "
                "first_frame out, or set pretrained_model_name_or_path to an image-to-video model or to Wan 2.2 TI2V."
            )

    @property
    def experts(self) -> tuple[tuple[str, float, float], ...]:
        boundary = self.source.index.get("boundary_ratio")
        if boundary is None:
            return super().experts
        both = (("transformer", boundary, 1.0), ("transformer_2", 0.0, boundary))
        return tuple(expert for expert in both if expert[0] in self.source.parts)

    @property
    def takes_last_image(self) -> bool:
        return self._conditioned and self.transformer_config.get("pos_embed_seq_len") is not None

    @property
    def encoding(self) -> tuple[object, ...]:
        return ("last frame",) if self.takes_last_image else ()

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        return NEEDS_CLIPS if self._conditioned and frames == 1 else None

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        from diffusers.pipelines.wan.pipeline_wan import WanPipeline

        # the image-to-video pipeline's own function needs ftfy
        encode = WanPipeline._get_t5_prompt_embeds
        embeds = encode(pipeline, list(captions), max_sequence_length=self.text_length)  # (B, 512, D)
        return [{"embeds": text} for text in cut(embeds, embeds.ne(0).any(-1))]

    @torch.no_grad()
    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        batch = encode_videos(pipeline.vae, pixels)
        if not self._conditioned:
            return batch
        known = torch.zeros_like(pixels)
        for frame in (0, -1) if self.takes_last_image else (0,):
            known[:, :, frame] = pixels[:, :, frame]
        batch["condition"] = encode_videos(pipeline.vae, known)["mean"]
        if self.transformer_config.get("image_dim") is not None:
            ends = (pixels[:, :, :1], pixels[:, :, -1:]) if self.takes_last_image else (pixels,)
            seen = [pipeline.encode_image(first_images(end), device=pipeline.vae.device) for end in ends]
            batch["image_embeds"] = torch.stack(seen, dim=1)  # (B, given frames, I, D)
        return batch

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        timestep = time * 1000
        inputs = noisy
        if self._conditioned:
            known = torch.zeros_like(noisy[:, : self.frame_factor])
            known[:, :, 0] = 1
            if self.takes_last_image:
                known[:, -1, -1] = 1  # the last pixel frame of the last latent frame
            inputs = torch.cat([noisy, known, batch["condition"].to(noisy.dtype)], dim=1)
        elif self._starts_clean(noisy):
            inputs = with_first(noisy, batch["mean"])
            timestep = timestep[:, None] * self.patch.any_in_token(after_first(noisy))  # (B, S)
        images = {"encoder_hidden_states_image": batch["image_embeds"].flatten(0, 1)} if "image_embeds" in batch else {}
        return model(
            hidden_states=inputs,
            timestep=timestep,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            **images,
            return_dict=False,
        )[0]

    def weight(self, batch: Batch) -> Tensor | None:
        return after_first(batch["mean"]) if self._starts_clean(batch["mean"]) else None

    @property
    def _image_to_video(self) -> bool:
        return self.source.pipeline_name == "WanImageToVideoPipeline"

    @property
    def _conditioned(self) -> bool:
        """Whether the first frame is an input beside the noisy latents."""
        return self._image_to_video and not self.source.index.get("expand_timesteps")

    def _starts_clean(self, latents: Tensor) -> bool:
        """Whether the clean first frame replaces its noisy latents; a single image is drawn from text."""
        return self._image_to_video and not self._conditioned and latents.shape[2] > 1
