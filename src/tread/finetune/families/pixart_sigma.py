"""The family PixArt: sigma, and the earlier alpha, which predict the noise and its variance instead of a velocity.

- Captions are cleaned as the pipeline does by default, if beautifulsoup4 and ftfy are installed.
- Alpha at 1024 pixels is given the size of the image as an input; sigma is not.
- If the model predicts a variance, `predict` returns it after the noise, in twice the channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.ragged_text import MaskedText, cut
from tread.finetune.family import Batch, Text
from tread.finetune.model.source import Source
from tread.finetune.target import EpsilonTarget

ALPHA_TEXT = 120
"""The most tokens of a caption that alpha reads."""


class PixArtSigma(MaskedText):
    """PixArt sigma and alpha."""

    name = "pixart_sigma"
    pipelines = ("PixArtSigmaPipeline", "PixArtAlphaPipeline")
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 300
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
    target_class = EpsilonTarget
    guidance = 4.5
    steps = 20

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        alpha = source.pipeline_name == "PixArtAlphaPipeline"
        super().__init__(source, text_length or (ALPHA_TEXT if alpha else None))

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        from diffusers.utils.import_utils import is_bs4_available, is_ftfy_available

        # without these packages the pipeline would warn at every call
        clean = is_bs4_available() and is_ftfy_available()
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, clean_caption=clean, max_sequence_length=self.text_length
        )  # (B, L, D), (B, L)
        return [{"embeds": text} for text in cut(embeds, mask)]

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        return model(
            noisy,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_attention_mask=batch["text.mask"],
            timestep=time,
            added_cond_kwargs=self._size(noisy),
            return_dict=False,
        )[0]  # (B, C or 2 C, h, w)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        # binning changes the size; the default negative prompt is refused together with embeds
        plain = {"use_resolution_binning": False, "negative_prompt": None}
        return plain | super().prompt_arguments(text, negative)

    def _size(self, noisy: Tensor) -> dict[str, Tensor | None]:
        config = self.transformer_config
        told = config.get("use_additional_conditions")
        if not (config["sample_size"] == 128 if told is None else told):
            return {"resolution": None, "aspect_ratio": None}
        # filled on the device: copying a tensor made of a list would synchronise
        rows, columns = (noisy.new_full((len(noisy), 1), self.factor * size) for size in noisy.shape[-2:])  # (B, 1)
        return {"resolution": torch.cat([rows, columns], dim=1), "aspect_ratio": rows / columns}  # (B, 2), (B, 1)
