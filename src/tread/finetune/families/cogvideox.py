"""The family CogVideoX, 1.0 (2b, 5b) and 1.5: text to video, and image to video with latents of a first frame.

- The model predicts v of a discrete diffusion. Its latents are (B, frames, channels, h, w).
- Text is T5 at the transformer's own number of tokens, padding included: there is no text mask.
- A token of 1.5 covers two latent frames. For an odd number, the first latent frame is repeated in front, as in the
  pipeline, which discards it.
- Image to video appends channels: the latents of the first frame encoded alone, then zeros. 1.5 divides these by the
  autoencoder's scaling_factor instead of multiplying (`invert_scale_latents`).
- 5b-I2V of 1.0 has learned positional embeddings and takes only the width and height it was trained at.
"""

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.first_frame import NEEDS_CLIPS
from tread.finetune.family import Batch, Text, TuneFamily
from tread.finetune.model.source import Source
from tread.finetune.target import VelocityTarget

IMAGE = "CogVideoXImageToVideoPipeline"


class CogVideoX(TuneFamily):
    """CogVideoX 1.0 and 1.5."""

    name = "cogvideox"
    pipelines = ("CogVideoXPipeline", IMAGE)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 226
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    target_class = VelocityTarget
    video = True
    guidance = 6.0
    steps = 50

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        length = source.config("transformer").get("max_text_seq_length") or self.longest_text
        super().__init__(source, text_length or length)
        if text_length not in (None, length) and not self._rotated:
            raise ConfigError(
                f"tokenizer_max_length is {text_length}, but the positions of {source.name_or_path!r} are for texts of "
                f"{length} tokens: leave it out."
            )
        self.frame_rate = 8 if self.transformer_config.get("patch_size_t") is None else 16

    @property
    def encoding(self) -> tuple[object, ...]:
        return (self.patch[0],)

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        if self._conditioned and frames == 1:
            return NEEDS_CLIPS
        own = tuple(self.transformer_config[name] * self.factor for name in ("sample_width", "sample_height"))
        if self.transformer_config.get("use_learned_positional_embeddings") and (width, height) != own:
            return (
                f"its learned positions are for {own[0]}x{own[1]} pixels and the sample would be {width}x{height}: "
                "crop the clips to that shape and set resolution to fit"
            )
        return None

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )  # (B, L, D)
        return [{"embeds": text.clone()} for text in embeds]

    @torch.no_grad()
    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        batch = {name: self._even(values) for name, values in encode_videos(pipeline.vae, pixels).items()}
        if self._conditioned:
            first = encode_videos(pipeline.vae, pixels[:, :, :1])["mean"]  # (B, C, 1, h, w)
            config = pipeline.vae.config
            batch["condition"] = first / config.scaling_factor**2 if config.invert_scale_latents else first
        return batch

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        inputs = noisy
        if self._conditioned:
            known = torch.zeros_like(noisy)
            known[:, :, :1] = batch["condition"].to(noisy.dtype)
            inputs = torch.cat([noisy, known], dim=1)
        offset = {"ofs": noisy.new_full((1,), 2.0)} if self.transformer_config.get("ofs_embed_dim") is not None else {}
        return model(
            hidden_states=inputs.transpose(1, 2),  # (B, f, C, h, w)
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            timestep=time,
            image_rotary_emb=self._rotations(noisy) if self._rotated else None,
            **offset,
            return_dict=False,
        )[0].transpose(1, 2)  # (B, C, f, h, w)

    def call_arguments(self) -> dict[str, Any]:
        return {**super().call_arguments(), "max_sequence_length": self.text_length}

    @property
    def _conditioned(self) -> bool:
        """Whether the first frame is an input beside the noisy latents."""
        return self.source.pipeline_name == IMAGE

    @property
    def _rotated(self) -> bool:
        return bool(self.transformer_config.get("use_rotary_positional_embeddings"))

    def _even(self, latents: Tensor) -> Tensor:
        """Latents padded to whole tokens along frames, by repeating the first frame."""
        more = -latents.shape[2] % self.patch[0]
        return torch.cat([latents[:, :, :1]] * more + [latents], dim=2)  # (B, C, f, h, w)

    def _rotations(self, noisy: Tensor) -> tuple[Tensor, Tensor]:
        names = ("patch_size", "patch_size_t", "sample_width", "sample_height", "attention_head_dim")
        sizes = tuple((name, self.transformer_config.get(name)) for name in names)
        return _tables(sizes, noisy.shape[2:], noisy.device)


@lru_cache
def _tables(
    sizes: tuple[tuple[str, Any], ...], grid: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rotary tables of latents (f, h, w), each (S, D), as the pipeline makes them; cached, so never written to."""
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline as stock

    frames, rows, columns = grid
    pipeline: Any = SimpleNamespace(
        vae_scale_factor_spatial=1, transformer=SimpleNamespace(config=SimpleNamespace(**dict(sizes)))
    )
    return stock._prepare_rotary_positional_embeddings(pipeline, rows, columns, frames, device)
