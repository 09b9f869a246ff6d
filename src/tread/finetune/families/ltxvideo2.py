"""The family LTX-2 (2.0, 2.3, 2.5): text to video, and image to video with a given first frame, with or without sound.

- The model draws video and sound in two streams that attend to each other. Clips are trained without their sound, as in
  the pipeline's own call for one modality (`isolate_modalities`): the video's prediction then depends on no audio, and
  the audio's weights and the attention between the streams stay as they are. One token of silence fills the other
  stream.
- Where sound is trained (`train_sound`), both streams run as in the pipeline's usual call. A clip's sound is its
  log-mel spectrogram through the audio autoencoder, 25 latents per second, and adapters are on both streams.
- Text is Gemma's states of all layers, which the pipeline's connectors turn into two sequences, for video and for
  audio; padding becomes registers that the model reads. The connectors' output is cached at full length. In
  previews it replaces the connectors, which the stock pipeline calls even for encoded prompts.
- Positions are in seconds and pixels: they depend on the frame rate. A given first frame has time 0.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.first_frame import after_first, with_first
from tread.finetune.families.ltxvideo import LTXVideo
from tread.finetune.families.mel import log_mel
from tread.finetune.family import Batch, Text
from tread.finetune.model.source import Source

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_VIDEO = ("attn1", "attn2")
_SOUND = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
SHORTER = 4
"""Spectrogram frames, and mel bands, per latent of sound; the first latent covers a single frame."""


def _linears(*attentions: str) -> tuple[str, ...]:
    return tuple(f"{name}.{linear}" for name in attentions for linear in _ATTENTION)


class LTXVideo2(LTXVideo):
    """LTX-2."""

    name = "ltxvideo2"
    pipelines = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")
    image_pipelines: ClassVar[dict[str, str]] = {"LTX2Pipeline": "LTX2ImageToVideoPipeline"}
    text_parts = ("tokenizer", "text_encoder", "connectors")
    drawing_parts = ("audio_vae", "vocoder")
    longest_text = 1024
    texts_differ = False
    lora_targets = _linears(*_VIDEO)
    frame_rate = 24
    steps = 30

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        registers = source.config("connectors").get("video_connector_num_learnable_registers") or 1
        if self.text_length % registers:
            raise ConfigError(
                f"tokenizer_max_length is {self.text_length}, but the connectors of {source.name_or_path!r} fill "
                f"captions up with {registers} registers: set it to a multiple of {registers}, or leave it out."
            )

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        states, mask, _, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )  # (B, L, layers D), (B, L)
        encoded = pipeline.connectors(states, mask, padding_side=pipeline.tokenizer.padding_side)
        return [{"embeds": e, "audio": a, "mask": m} for e, a, m in zip(*encoded, strict=True)]  # (L, D), (L, A), (L,)

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        names = ("embeds", "mask") if self.sound_rate is None else ("embeds", "audio", "mask")
        return {name: torch.stack([text[name] for text in texts]) for name in names}

    def train_sound(self) -> None:
        self.sound_rate = self.source.config("audio_vae")["sample_rate"]
        self.pixel_parts = (*self.pixel_parts, "audio_vae")
        self.lora_targets = _linears(*_VIDEO, *_SOUND)

    @torch.no_grad()
    def encode_sound(self, pipeline: Any, waveform: Tensor) -> Batch:
        vae, config = pipeline.audio_vae, pipeline.audio_vae.config
        rate, hop = config.sample_rate, config.mel_hop_length
        length = round(waveform.shape[-1] / hop / SHORTER)
        mel = log_mel(waveform, rate=rate, hop=hop, bands=config.mel_bins)  # (B, 2, T, bands)
        mel = mel[:, :, : max(1, SHORTER * (length - 1) + 1)]
        moments = vae.encode(mel.to(vae.device, vae.dtype)).latent_dist
        mean, std = (pipeline._pack_audio_latents(x.float()) for x in (moments.mean, moments.std))  # (B, L, D)
        spread = vae.latents_std.float()
        return {"sound.mean": (mean - vae.latents_mean.float()) / spread, "sound.std": std / spread}

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        config = self.transformer_config
        text_width = "caption_channels" if config.get("use_prompt_embeddings", True) else "audio_cross_attention_dim"
        silence = {
            "audio_hidden_states": noisy.new_zeros(len(noisy), 1, config["audio_in_channels"]),
            "audio_encoder_hidden_states": noisy.new_zeros(len(noisy), 1, config[text_width]),
            "audio_num_frames": 1,
            "isolate_modalities": True,
        }
        return self._call(model, noisy, time, batch, silence)[0]

    def predict_with_sound(
        self, model: nn.Module, noisy: Tensor, sound: Tensor, time: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        coords = self._sound_coords(sound.shape[1], noisy.device).expand(len(noisy), -1, -1, -1)
        heard = {
            "audio_hidden_states": sound.to(noisy.dtype),  # (B, L, D)
            "audio_encoder_hidden_states": batch["text.audio"].to(noisy.dtype),
            "audio_encoder_attention_mask": batch["text.mask"],
            "audio_num_frames": sound.shape[1],
            "audio_coords": coords,
            "isolate_modalities": False,
            "use_cross_timestep": True,
        }
        return self._call(model, noisy, time, batch, heard)

    def _call(
        self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch, sound: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline as stock

        sigma = timestep = time * 1000
        if self.starts_clean(noisy):
            noisy = with_first(noisy, batch["mean"])
            timestep = sigma[:, None] * self.patch.any_in_token(after_first(noisy))  # (B, S)
        frames, rows, columns = noisy.shape[2:]
        patch_t, patch, _ = self.patch
        velocity, of_sound = model(
            hidden_states=stock._pack_latents(noisy, patch, patch_t),  # (B, S, D)
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            timestep=timestep,
            audio_timestep=sigma,
            sigma=sigma,
            encoder_attention_mask=batch["text.mask"],
            num_frames=frames,
            height=rows,
            width=columns,
            fps=float(self.frame_rate),
            video_coords=self._coords((frames, rows, columns), noisy.device).expand(len(noisy), -1, -1, -1),
            **sound,
            return_dict=False,
        )
        return stock._unpack_latents(velocity, frames, rows, columns, patch, patch_t), of_sound  # (B, C, f, h, w)

    def complete(self, pipeline: Any) -> None:
        config = self.source.config("connectors")
        heads, size = (config[f"video_connector_{name}"] for name in ("num_attention_heads", "attention_head_dim"))
        pipeline.connectors = _Encoded(heads * size)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for prefix, one in (("", text), ("negative_", negative)):
            if one is not None:
                arguments[f"{prefix}prompt_embeds"] = torch.cat([one["embeds"], one["audio"]], dim=-1)[None]
                arguments[f"{prefix}prompt_attention_mask"] = one["mask"][None]
        return arguments

    def guide(self, pipeline: Any, scale: float) -> dict[str, float]:
        """The guidance scale of the video; the audio's is the pipeline's default, unless guidance is off."""
        return super().guide(pipeline, scale) | ({"audio_guidance_scale": 1.0} if scale <= self.unguided else {})

    def _coords(self, grid: tuple[int, int, int], device: torch.device) -> Tensor:
        config = self.transformer_config
        patch_t, patch, _ = self.patch
        shape = (patch, patch_t, tuple(config["vae_scale_factors"]), config["causal_offset"])
        return _video_coords(grid, *shape, float(self.frame_rate), device)

    def _sound_coords(self, length: int, device: torch.device) -> Tensor:
        config = self.transformer_config
        names = ("audio_sampling_rate", "audio_hop_length", "audio_scale_factor", "causal_offset")
        return _sound_coords(length, *(config[name] for name in names), device)


@lru_cache
def _video_coords(
    grid: tuple[int, int, int],
    patch: int,
    patch_t: int,
    factors: tuple[int, ...],
    offset: int,
    frame_rate: float,
    device: torch.device,
) -> Tensor:
    """First and last second, row and column of each token, (1, 3, S, 2); cached, so do not modify it.

    The stock model would copy numbers to the device for them in every forward, which synchronises.
    """
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed as Stock

    rope = Stock(dim=0, patch_size=patch, patch_size_t=patch_t, scale_factors=factors, causal_offset=offset)
    return rope.prepare_video_coords(1, *grid, device, fps=frame_rate)


@lru_cache
def _sound_coords(length: int, rate: int, hop: int, factor: int, offset: int, device: torch.device) -> Tensor:
    """First and last second of each latent of sound, (1, 1, L, 2); cached, so do not modify it."""
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed as Stock

    grid: Any = {"sampling_rate": rate, "hop_length": hop, "scale_factors": [factor], "causal_offset": offset}
    return Stock(dim=0, modality="audio", **grid).prepare_audio_coords(1, length, device)


class _Encoded:
    """Replaces the connectors of a pipeline: splits prompts into the two cached outputs that they concatenate."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, both: Tensor, mask: Tensor, padding_side: str) -> tuple[Tensor, Tensor, Tensor]:
        return both[..., : self._width], both[..., self._width :], mask
