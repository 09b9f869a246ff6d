"""The family Qwen-Image 2.1: text to image with Qwen3-VL.

- Latents are not patched and follow the text in one sequence; each image slot of `img_mask` stands for four latents.
- The autoencoder has an alpha channel; training images are opaque.
- Texts have no limit. The image's positions follow the longest text of a batch, padding included, so the texts of a
  batch must have one length: a caption alone has no padding in the pipeline.
- The stock pipeline draws from condition images too, but takes no encoded prompts beside them: those are not tuned.
- The model is meant to be sampled without guidance. It counts the target's tokens on the device in every forward, a
  synchronisation that callers cannot avoid.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_stills
from tread.finetune.families.ragged_text import check_one_length, cut
from tread.finetune.families.tokens import Patch
from tread.finetune.family import Batch, Text, TuneFamily

SLOT = 4
"""Target tokens of one slot of `img_mask`."""


class QwenImage21(TuneFamily):
    """Qwen-Image 2.1."""

    name = "qwen_image21"
    pipelines = ("QwenImage21Pipeline",)
    text_parts = ("text_encoder",)
    needed_parts = ("processor",)
    pixel_parts = ("vae", "processor")  # both required by the stock pipeline's constructor
    packages = ("torchvision",)
    longest_text = 1024
    whole_texts = True
    texts_differ = True
    one_length = True
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    guidance = 1.0
    guidance_argument = "true_cfg_scale"
    steps = 40

    @property
    def patch(self) -> Patch:
        return Patch(1, 1, 1)

    @property
    def multiple(self) -> int:
        return 2 * self.factor  # a slot is a square of 2 x 2 latents

    @property
    def takes_image(self) -> bool:
        return False

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        embeds, mask, _ = pipeline._get_qwen_prompt_embeds(list(captions))  # (B, L, D), (B, L)
        return [{"embeds": text} for text in cut(embeds, mask)]

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        check_one_length(self.name, [text["embeds"] for text in texts])
        return super().collate_text(texts)

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        opaque = torch.ones_like(pixels[:, :1])
        return encode_stills(pipeline.vae, torch.cat([pixels, opaque], dim=1))

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        text, tokens = batch["text.embeds"].to(noisy.dtype), self.tokens(noisy)
        slots = torch.zeros(len(noisy), text.shape[1] + tokens // SLOT, dtype=torch.bool, device=noisy.device)
        slots[:, text.shape[1] :] = True
        velocity = model(
            hidden_states=noisy.flatten(2).transpose(1, 2),  # (B, S, C)
            timestep=time,
            encoder_hidden_states=text,
            img_shapes=[[(1, *noisy.shape[2:])]] * len(noisy),
            img_mask=slots,
            return_dict=False,
        )[0]
        return velocity[:, -tokens:].transpose(1, 2).reshape(noisy.shape)  # (B, C, h, w)
