"""The family FLUX.2: dev and klein, with or without reference images.

- Text is 512 tokens, padding included: hidden states of three layers of Mistral (dev) or Qwen3 (klein), concatenated.
- Latents here are 2 x 2 patches of the autoencoder's latents, standardised by its batch-norm statistics: one latent is
  one token, as in the pipeline.
- A token has the ids (time, row, column, position in the text). Reference images follow the target, at times 10, 20
  and so on.
- Guidance is an input of dev, 1 in training as for FLUX.1; klein is guided by the empty prompt instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.tokens import Patch
from tread.finetune.family import JOINT_ATTENTION, Batch, Text, TuneFamily, references
from tread.finetune.model.source import Source
from tread.finetune.target import Distance, FlowTarget, Target, is_linear

APART = 10
"""Difference between the time ids of consecutive images."""
MOST_REFERENCES = 10
"""The largest number of reference images that the authors document."""
PROCESSOR = ["transformers", "PixtralProcessor"]
"""The entry of dev's tokenizer in model_index.json."""
TEXT_LAYERS = 3
"""Layers of the text encoder whose hidden states form a token's embedding."""


@dataclass(frozen=True, kw_only=True)
class EmpiricalShift(FlowTarget):
    """Times shifted as in FLUX.2's pipeline, which fits the shift to the numbers of tokens and solver steps."""

    steps: int

    def shift_of(self, tokens: int) -> float:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return self.from_mu(compute_empirical_mu(image_seq_len=tokens, num_steps=self.steps))


class Flux2(TuneFamily):
    """FLUX.2 dev and klein."""

    name = "flux2"
    pipelines = ("Flux2Pipeline", "Flux2KleinPipeline")
    text_parts = ("tokenizer", "text_encoder")
    longest_text = 512
    lora_targets = (
        *JOINT_ATTENTION,
        *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
        *("attn.to_qkv_mlp_proj", "attn.to_out"),  # single-stream layers, with image and text in one sequence
    )
    packages = ("torchvision",)  # the processor of dev's text encoder
    guidance = 4.0
    steps = 50
    few_steps = (4, 1.0)

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        if source.index.get("tokenizer") == PROCESSOR and find_spec("torchvision") is None:
            raise ConfigError(
                "FLUX.2 dev reads text with a PixtralProcessor, which needs torchvision: install the build that fits "
                f"torch {torch.__version__}."
            )
        encoder = source.config("text_encoder")
        width = encoder.get("text_config", encoder).get("hidden_size")
        needed = self.transformer_config["joint_attention_dim"]
        self.check_text_width("text_encoder", width and TEXT_LAYERS * width, needed)

    @property
    def factor(self) -> int:
        return 2 * super().factor

    @property
    def patch(self) -> Patch:
        return Patch(1, 1, 1)

    @property
    def reference_counts(self) -> range:
        return range(MOST_REFERENCES + 1)

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, _ = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_length)  # (B, 512, 3 D)
        return [{"embeds": text} for text in embeds]

    @torch.no_grad()
    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        vae = pipeline.vae
        moments = vae.encode(pixels.squeeze(2).to(vae.device, vae.dtype)).latent_dist
        mean, std = (pipeline._patchify_latents(values.float()) for values in (moments.mean, moments.std))
        center = vae.bn.running_mean.float().view(1, -1, 1, 1)
        spread = (vae.bn.running_var.float().view(1, -1, 1, 1) + vae.config.batch_norm_eps).sqrt()
        return {"mean": (mean - center) / spread, "std": std / spread}  # (B, 4 C, h / 2, w / 2)

    def target(self, *, shift: float | None, distance: Distance) -> Target:
        config = self.source.config("scheduler")
        if shift is None and config.get("use_dynamic_shifting"):
            return EmpiricalShift(steps=self.steps, linear=is_linear(config), distance=distance)
        return super().target(shift=shift, distance=distance)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        images = [noisy, *(reference.to(noisy.dtype) for reference in references(batch))]
        ids = [_image_ids(*image.shape[2:], APART * i, noisy.device) for i, image in enumerate(images)]
        text = batch["text.embeds"]
        (prediction,) = model(
            hidden_states=torch.cat([image.flatten(2).transpose(1, 2) for image in images], dim=1),  # (B, S + R, C)
            timestep=time,
            guidance=None if self._klein else torch.ones_like(time),
            encoder_hidden_states=text,
            txt_ids=_text_ids(text.shape[1], noisy.device).expand(len(noisy), -1, -1),  # (B, L, 4)
            img_ids=torch.cat(ids).expand(len(noisy), -1, -1),  # (B, S + R, 4)
            return_dict=False,
        )
        return prediction[:, : self.tokens(noisy)].transpose(1, 2).reshape(noisy.shape)  # (B, C, H, W)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        return super().prompt_arguments(text, negative if self._klein else None)

    @property
    def _klein(self) -> bool:
        return self.source.pipeline_name == "Flux2KleinPipeline"


@lru_cache
def _image_ids(rows: int, columns: int, time: int, device: torch.device) -> Tensor:
    """The ids of a grid of tokens, (S, 4); cached, because copying them to the device would synchronise."""
    ids = torch.cartesian_prod(*(torch.arange(size) for size in (1, rows, columns, 1)))
    ids[:, 0] = time
    return ids.to(device)


@lru_cache
def _text_ids(length: int, device: torch.device) -> Tensor:
    """The ids of a text, (L, 4)."""
    return torch.cartesian_prod(*(torch.arange(size) for size in (1, 1, 1, length))).to(device)
