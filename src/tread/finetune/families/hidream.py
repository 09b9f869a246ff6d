"""The family HiDream-I1: text to image with two CLIPs, T5 and every layer of Llama.

- Text is 128 tokens of T5, 128 of each layer of Llama, and both CLIPs' pooled vectors, all without a mask: padding is
  read. A caption takes 33 MB of cache in bf16; `tokenizer_max_length` makes it smaller.
- The model predicts x - noise: `predict` reverses the sign. In train mode its output is patches, unpacked here.
- The model pads a non-square grid to its maximum number of tokens, so such a grid may not have more.
- The pipeline draws every image with an area of 1024 x 1024 pixels, and so do previews.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.family import Batch, Text, TuneFamily
from tread.finetune.model.source import Source
from tread.finetune.target import Distance, FlowTarget, Target, is_linear

LLAMA = ("tokenizer_4", "text_encoder_4")
"""Parts that released folders lack for license reasons, and users add."""


class HiDream(TuneFamily):
    """HiDream-I1 full, dev and fast."""

    name = "hidream"
    pipelines = ("HiDreamImagePipeline",)
    text_parts = (
        *("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
        *("tokenizer_3", "text_encoder_3", *LLAMA),
    )
    longest_text = 128
    lora_targets = ("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")
    prompt_names: ClassVar = {
        "t5": "prompt_embeds_t5",
        "llama": "prompt_embeds_llama3",
        "pooled": "pooled_prompt_embeds",
    }
    usual_side = 1008  # at 1024, rounding gives some aspect ratios too many tokens
    guidance = 5.0
    steps = 50
    few_steps = (28, 1.0)

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        t5, llama = self.transformer_config["caption_channels"]
        self.check_text_width("text_encoder_3", source.config("text_encoder_3").get("d_model"), t5)
        self.check_text_width("text_encoder_4", self._llama.get("hidden_size"), llama)

    @property
    def distilled(self) -> bool:
        """Dev and fast are sampled by the scheduler of distilled models."""
        return super().distilled or self.source.config("scheduler").get("_class_name") == "FlowMatchLCMScheduler"

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        tokens = width // self.multiple * (height // self.multiple)
        if width == height or tokens <= self._most_tokens:
            return None
        side = math.isqrt(self._most_tokens) * self.multiple
        return (
            f"{width} x {height} pixels are {tokens} tokens and it takes {self._most_tokens} unless the sides are "
            f"equal: set resolution below {side} with resolution_type 'pixel_area', or crop to squares"
        )

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        t5, _, llama, _, pooled, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )  # (B, 128, D), (layers, B, 128, D), (B, P)
        texts = zip(t5, llama.unbind(1), pooled, strict=True)
        return [{"t5": one, "llama": layers.clone(), "pooled": vector} for one, layers, vector in texts]

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        stacked = super().collate_text(texts)
        return stacked | {"llama": stacked["llama"].transpose(0, 1)}  # (layers, B, 128, D)

    def target(self, *, shift: float | None, distance: Distance) -> Target:
        from diffusers.pipelines.hidream_image.pipeline_hidream_image import calculate_shift

        config = self.source.config("scheduler")
        if shift is None and config.get("use_dynamic_shifting"):
            mu = calculate_shift(self._most_tokens)  # one shift for all sizes
            shift = FlowTarget(linear=is_linear(config)).from_mu(mu)
        return super().target(shift=shift, distance=distance)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        (velocity,) = model(
            hidden_states=noisy,
            timesteps=time * 1000,
            encoder_hidden_states_t5=batch["text.t5"],
            encoder_hidden_states_llama3=batch["text.llama"],
            pooled_embeds=batch["text.pooled"],
            return_dict=False,
        )
        return -self._image_of(velocity, noisy)

    def _image_of(self, output: Tensor, like: Tensor) -> Tensor:
        """The model's output as latents; in train mode it is (B, C, S or more, patch * patch)."""
        if output.shape == like.shape:
            return output
        count, channels, height, width = like.shape
        _, size, _ = self.patch
        rows, columns = height // size, width // size
        patches = output[:, :, : rows * columns].reshape(count, channels, rows, columns, size, size)
        return patches.permute(0, 1, 2, 4, 3, 5).reshape(like.shape)  # (B, C, h, w)

    @property
    def _llama(self) -> dict[str, Any]:
        """The config of Llama; refuses a folder without it."""
        try:
            if set(LLAMA) <= set(self.source.parts):
                return self.source.config("text_encoder_4")
        except ConfigError:  # model_index.json may name a part that is missing
            pass
        raise ConfigError(
            f"{self.source.name_or_path!r} lacks {' or '.join(LLAMA)}: HiDream's Llama-3.1-8B-Instruct is a model of "
            "its own. Load the pipeline with it and save both to a folder, as docs/models.md shows."
        )

    @property
    def _most_tokens(self) -> int:
        """The number of tokens that non-square grids are padded to."""
        rows, columns = self.transformer_config["max_resolution"]
        return rows * columns // self.transformer_config["patch_size"] ** 2
