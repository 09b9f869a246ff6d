"""The family Cosmos 3: text to image and to video, and a video drawn from its given first frame.

- The transformer is a language model and a generator in one: each layer has weights for text, which reads itself
  causally, and weights for video, which reads both. The text weights stay frozen; a LoRA is on the video's attention.
- There is no text encoder. The model reads the tokens of the caption and of two sentences about the sample's size and
  length, which the pipeline appends: captions are cached as UTF-8 text, and tokenized with their sample when a batch is
  collated (`collated`), by the stock pipeline's own method.
- The batch size is 1. Its positions follow those of the text, and are in seconds: they depend on the frame rate.
- A given first frame is clean and has no time. Sound and actions are not drawn, as in the pipeline's plain call.
- The stock forward mixes dtypes if its weights are float32 under autocast (`one_dtype`).
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.cosmos import no_guardrail
from tread.finetune.families.first_frame import FirstFrame, with_first
from tread.finetune.families.tokens import Patch
from tread.finetune.family import Batch, Text
from tread.finetune.model.source import Source

PIPELINE = "Cosmos3OmniPipeline"


class Cosmos3(FirstFrame):
    """Cosmos 3."""

    name = "cosmos3"
    pipelines = (PIPELINE,)
    image_pipelines: ClassVar[dict[str, str]] = {PIPELINE: PIPELINE}
    text_parts = ()
    pixel_parts = ("vae", "text_tokenizer")  # both required by the stock pipeline's constructor
    needed_parts = pixel_parts
    drawing_parts = ("safety_checker",)
    longest_text = 1024
    whole_texts = True
    texts_differ = True
    one_length = True
    one_sample = True
    one_dtype = True
    lora_targets = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    video = True
    frame_rate = 24
    guidance = 6.0
    steps = 35
    result_name = "video"
    result_alone = True

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        super().__init__(source, text_length)
        if self._guarded:
            self.packages = ("cosmos_guardrail",)

    @property
    def _guarded(self) -> bool:
        """Whether the stock pipeline insists on NVIDIA's guardrail, as that of `cosmos` does."""
        return self.source.index.get("enable_safety_checker", True)

    def stand_ins(self) -> dict[str, Any]:
        return no_guardrail() if self._guarded else {}

    @property
    def patch(self) -> Patch:
        side = self.transformer_config["latent_patch_size"]
        return Patch(1, side, side)

    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        """The captions themselves, in UTF-8."""
        return [{"caption": torch.tensor(list(caption.encode()), dtype=torch.uint8)} for caption in captions]

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        (text,) = texts
        return {name: value[None] for name, value in text.items()}

    def collated(self, batch: Batch) -> Batch:
        frames, rows, columns = batch["mean"].shape[2:]
        ids, _ = self._tokenizing.tokenize_prompt(
            _caption(batch["text.caption"][0]),
            num_frames=1 + (frames - 1) * self.frame_factor,
            height=rows * self.factor,
            width=columns * self.factor,
            fps=self.frame_rate,
        )
        rest = {name: value for name, value in batch.items() if name != "text.caption"}
        return rest | {"text.ids": torch.tensor([ids])}  # (1, T)

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        return encode_videos(pipeline.vae, pixels)

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        (ids,), grid = batch["text.ids"], tuple(noisy.shape[2:])
        clean = self.starts_clean(noisy)
        if clean:
            noisy = with_first(noisy, batch["mean"])
        config = self.transformer_config
        rules = tuple((name, config[name]) for name in _RULES)
        fixed = _layout(len(ids), grid, clean, rules, self.frame_factor, float(self.frame_rate), noisy.device)
        (velocity,), _, _ = model(
            input_ids=ids,
            vision_tokens=[noisy],
            vision_timesteps=(time * 1000).expand(len(fixed["vision_mse_loss_indexes"])),
            **fixed,
            return_dict=False,
        )
        return velocity  # (1, C, f, h, w)

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        arguments = {"prompt": _caption(text["caption"])}
        return arguments if negative is None else arguments | {"negative_prompt": _caption(negative["caption"])}

    @cached_property
    def _tokenizing(self) -> Any:
        """The stock pipeline with its tokenizer and without weights."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
        from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import Cosmos3OmniPipeline

        with torch.device("meta"):
            vae = AutoencoderKLWan.from_config(self.source.config("vae"))
        tokenizer = self.source.part("text_tokenizer")
        system = self.source.index.get("default_use_system_prompt", True)
        given: Any = {"transformer": None, "scheduler": None, "vae": vae, "default_use_system_prompt": system}
        return Cosmos3OmniPipeline(text_tokenizer=tokenizer, enable_safety_checker=False, **given)


_RULES = (
    *("latent_patch_size", "enable_fps_modulation", "base_fps"),
    *("unified_3d_mrope_reset_spatial_ids", "unified_3d_mrope_temporal_modality_margin"),
)
"""Keys of the transformer's config that determine the sequence layout."""
_LAYOUT = (
    *("text_indexes", "und_len", "vision_token_shapes", "vision_sequence_indexes", "vision_mse_loss_indexes"),
    "vision_noisy_frame_indexes",
)


@lru_cache(maxsize=256)
def _layout(
    text: int,
    grid: tuple[int, ...],
    clean: bool,
    rules: tuple[tuple[str, Any], ...],
    frame_factor: int,
    frame_rate: float,
    device: torch.device,
) -> dict[str, Any]:
    """The model's arguments for the joint sequence of text and video, from the stock pipeline's own methods.

    Cached, because the stock methods copy numbers to the device, which synchronises; do not modify the tensors.
    """
    from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import Cosmos3OmniPipeline as Stock

    stock: Any = SimpleNamespace(
        transformer=SimpleNamespace(config=SimpleNamespace(**dict(rules))), vae_scale_factor_temporal=frame_factor
    )
    words = Stock._prepare_text_segment(stock, [0] * text, "cpu")
    video = Stock._prepare_vision_segment(
        stock,
        torch.empty(1, 1, *grid, device="meta"),
        has_image_condition=clean,
        mrope_offset=words["vision_start_temporal_offset"],
        vision_fps=frame_rate,
        curr=text,
        device="cpu",
    )
    both = words | video
    found = {name: both[name] for name in _LAYOUT}
    found["position_ids"] = torch.cat([both["text_mrope_ids"], both["vision_mrope_ids"]], dim=1)  # (3, T + S)
    found["sequence_length"] = text + both["num_vision_tokens"]
    return {name: _moved(value, device) for name, value in found.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(one, device) for one in value]
    return value.to(device) if isinstance(value, Tensor) else value


def _caption(text: Tensor) -> str:
    return bytes(text.tolist()).decode()
