"""The family PRX (Photoroom): text to image with T5Gemma, a model that was itself trained with token routing.

- Captions are cleaned by the pipeline, which needs ftfy. Tokenizers of the family pad on either side; text has no
  positions in the model, and its padding is masked, so it is cut off before it is cached.
- The autoencoder is FLUX's, or DC-AE's with 32 pixels per latent, where one latent is one token.
- Stock diffusers has no LoRA loader for it, so an adapter is a peft folder.
- diffusers adds the class of the text encoder to transformers. The first import of that class replaces the module
  transformers and loses the addition: it is repeated here, and a card imports the class before diffusers.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.ragged_text import MaskedText
from tread.finetune.family import Batch, Text
from tread.finetune.model.source import Source


class PRX(MaskedText):
    """PRX with the autoencoder of FLUX or DC-AE."""

    name = "prx"
    pipelines = ("PRXPipeline",)
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 256
    lora_targets = ("img_qkv_proj", "txt_kv_proj", "to_out.0")
    packages = ("ftfy",)
    imported_first = "transformers.models.t5gemma.modeling_t5gemma"
    guidance = 4.0
    steps = 28
    few_steps = (8, 1.0)

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        from diffusers.pipelines.prx import T5GemmaEncoder, pipeline_prx

        library = sys.modules["transformers"]
        if not hasattr(library, T5GemmaEncoder.__name__):
            setattr(library, T5GemmaEncoder.__name__, T5GemmaEncoder)
        super().__init__(source, text_length or source.config("tokenizer").get("model_max_length"))
        if not hasattr(pipeline_prx, "ftfy"):
            raise ConfigError("PRX's pipeline cleans captions with ftfy, which is not installed: pip install ftfy.")
        encoder = source.config("text_encoder")
        width = encoder.get("encoder", encoder).get("hidden_size")
        self.check_text_width("text_encoder", width, self.transformer_config["context_in_dim"])

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask, *_ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, tokenizer_max_length=self.text_length
        )  # (B, 256, D), (B, 256)
        return [{"embeds": text[given]} for text, given in zip(embeds, mask, strict=True)]

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        batch = super().collate_text(texts)
        return batch | {"mask": batch["mask"].bool()}

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        (velocity,) = model(
            hidden_states=noisy,
            timestep=time,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            attention_mask=batch["text.mask"],
            return_dict=False,
        )
        return velocity

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        # binning changes the size
        return {"use_resolution_binning": False, **super().prompt_arguments(text, negative)}
