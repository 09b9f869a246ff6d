"""The family HunyuanVideo 1.5: text to video, and image to video. 1.0 is the family `hunyuanvideo1`.

- Text is Qwen2.5-VL's states of the caption in the pipeline's template, and ByT5's of what the caption quotes, both
  with masks. Quoted text is padded to 256 tokens and a missing image is 729 tokens of zeros, as in the pipeline.
- Latents are followed by those of the first frame and a mask in channels of their own, which are zero for text to
  video; SigLIP's embedding of the first frame joins the text.
- The guidance scale belongs to a part of the pipeline, `guider`; it is not an argument of its call.
- The forward of the stock model reads masks from the device, a synchronisation that callers cannot avoid.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.first_frame import NEEDS_CLIPS, first_images
from tread.finetune.families.ragged_text import cut, filled, padded
from tread.finetune.family import JOINT_ATTENTION, Batch, Text, TuneFamily
from tread.finetune.model.source import Source

IMAGE = "HunyuanVideo15ImageToVideoPipeline"
QUOTED = 256
"""Tokens of quoted text."""
NO_IMAGE = 729
"""Tokens of zeros in place of an image."""


class HunyuanVideo(TuneFamily):
    """HunyuanVideo 1.5."""

    name = "hunyuanvideo"
    pipelines = ("HunyuanVideo15Pipeline", IMAGE)
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    pixel_parts = ("vae", "image_encoder", "feature_extractor")
    needed_parts = ("vae",)
    drawing_parts = ("guider",)
    longest_text = 1000
    texts_differ = True
    lora_targets = JOINT_ATTENTION
    prompt_names: ClassVar = {
        "embeds": "prompt_embeds",
        "mask": "prompt_embeds_mask",
        "quoted": "prompt_embeds_2",
        "quoted_mask": "prompt_embeds_mask_2",
    }
    video = True
    frame_rate = 24
    guidance = 6.0
    guidance_argument = "guider"
    steps = 50

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        if self.transformer_config.get("use_meanflow"):
            raise ConfigError(
                f"{source.name_or_path!r} is a step-distilled HunyuanVideo (use_meanflow of its transformer is "
                "true), which is told the end of each step: set pretrained_model_name_or_path to a model that is not "
                "distilled."
            )

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        return NEEDS_CLIPS if self._conditioned and frames == 1 else None

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        given = {"prompt": list(captions), "device": pipeline.text_encoder.device}
        embeds, mask = pipeline._get_mllm_prompt_embeds(
            pipeline.text_encoder,
            pipeline.tokenizer,
            **given,
            tokenizer_max_length=self.text_length,
            system_message=pipeline.system_message,
            crop_start=pipeline.prompt_template_encode_start_idx,
        )
        quoted, quoted_mask = pipeline._get_byt5_prompt_embeds(
            pipeline.tokenizer_2, pipeline.text_encoder_2, **given, tokenizer_max_length=QUOTED
        )
        texts = zip(cut(embeds, mask), cut(quoted, quoted_mask), strict=True)
        return [{"embeds": text, "quoted": quote} for text, quote in texts]  # (l, D), (q, E)

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        quoted = torch.stack([filled(text["quoted"], QUOTED) for text in texts])  # (B, Q, E)
        lengths = torch.tensor([len(text["quoted"]) for text in texts], device=quoted.device)
        quoted_mask = (torch.arange(QUOTED, device=quoted.device) < lengths[:, None]).long()
        embeds, mask = padded([text["embeds"] for text in texts], self.text_multiple)
        return {"embeds": embeds, "mask": mask, "quoted": quoted, "quoted_mask": quoted_mask}

    @torch.no_grad()
    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        pipeline.vae.enable_slicing()  # its attention mask is wrong for several clips at once
        batch = encode_videos(pipeline.vae, pixels)
        if self._conditioned:
            batch["condition"] = encode_videos(pipeline.vae, pixels[:, :, :1])["mean"]  # (B, C, 1, h, w)
            device = pipeline.vae.device
            seen = [
                pipeline._get_image_embeds(pipeline.image_encoder, pipeline.feature_extractor, image, device)
                for image in first_images(pixels)
            ]
            batch["image_embeds"] = torch.cat(seen)  # (B, I, E)
        return batch

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        known, given = torch.zeros_like(noisy), torch.zeros_like(noisy[:, :1])
        if self._conditioned:
            known[:, :, :1] = batch["condition"].to(noisy.dtype)
            given[:, :, 0] = 1
            image = batch["image_embeds"].to(noisy.dtype)
        else:
            image = noisy.new_zeros(len(noisy), NO_IMAGE, self.transformer_config["image_embed_dim"])
        return model(
            hidden_states=torch.cat([noisy, known, given], dim=1),  # (B, 2 C + 1, f, h, w)
            timestep=time * 1000,
            encoder_hidden_states=batch["text.embeds"].to(noisy.dtype),
            encoder_attention_mask=batch["text.mask"],
            encoder_hidden_states_2=batch["text.quoted"].to(noisy.dtype),
            encoder_attention_mask_2=batch["text.quoted_mask"],
            image_embeds=image,
            return_dict=False,
        )[0]

    @property
    def _conditioned(self) -> bool:
        """Whether the first frame is an input beside the noisy latents."""
        return self.source.pipeline_name == IMAGE
