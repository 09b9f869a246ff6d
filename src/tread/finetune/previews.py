"""Previews: samples for the validation prompts, drawn by the stock pipeline, without routing, during training.

- The prompts were encoded with the captions, so no text encoder is loaded; the autoencoder is loaded for the previews
  and freed afterwards.
- An expert that is not trained is loaded too. Its layers stay on the CPU and move to the device one at a time (group
  offload), so that it needs only one layer of GPU memory beside the expert in training.
- The initial noise is the same at every step, so that previews of different steps can be compared.
- An image is saved as PNG, a video as an animated WebP and a strip of its frames, sound that is trained as WAV.
"""

import gc
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

from tread.data.images import upright_rgb
from tread.errors import ConfigError
from tread.files import writing
from tread.finetune.data.prepare import Prepared
from tread.finetune.family import Text, TuneFamily
from tread.finetune.settings import FinetuneConfig
from tread.training.metrics import track_image

STRIP = 8
"""Frames in the strip of a video, at most."""


@dataclass(frozen=True, kw_only=True)
class Previews:
    """The settings of previews; `draw` writes them to FOLDER/previews and to the trackers."""

    config: FinetuneConfig
    folder: Path
    family: TuneFamily
    prompts: Sequence[tuple[str, Text]]
    negative: Text
    width: int
    height: int
    frames: int
    steps: int
    guidance: float
    accelerator: Accelerator
    dtype: torch.dtype

    @torch.no_grad()
    def draw(self, models: Mapping[str, nn.Module], step: int) -> list[tuple[str, str]]:
        """Draw one preview per prompt; returns the prompts with the paths of their previews, relative to the folder.

        On several ranks rank 0 writes them, and the others return nothing.
        """
        device = self.accelerator.device
        needed = (*self.family.pixel_parts, *self.family.drawing_parts)
        parts = [part for part in needed if part in self.family.source.parts]
        experts = [part for part in ("transformer", "transformer_2") if part in self.family.source.parts]
        untrained = [part for part in experts if part not in models]
        pipeline = self.family.source.pipeline(*parts, *untrained, dtype=self.dtype, given=models)
        self.family.complete(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        for part in parts:
            if isinstance(model := getattr(pipeline, part), nn.Module):  # processors and tokenizers have no device
                model.to(device)
        if self.config.vae_enable_tiling:
            pipeline.vae.enable_tiling()
        for part in untrained:
            getattr(pipeline, part).enable_group_offload(device, num_blocks_per_group=1)
        drawn: list[tuple[str, str]] = []
        with writing(self.folder / "previews"):
            (self.folder / "previews").mkdir(exist_ok=True)
        for index, (prompt, text) in enumerate(self.prompts):
            picture, sound = self._call(pipeline, text, device)
            stem = self.folder / "previews" / f"step-{step:08d}-{index}"
            if self.accelerator.is_main_process:
                with writing(stem):
                    path = _save(picture, stem, self.family.frame_rate)
                    if sound is not None:
                        _save_sound(sound, pipeline.vocoder.config.output_sampling_rate, stem.with_suffix(".wav"))
                drawn.append((prompt, path.relative_to(self.folder).as_posix()))
                track_image(self.accelerator, f"preview {index}: {prompt[:60]}", path, step)
        del pipeline
        if untrained:
            gc.collect()  # the expert and its hooks form a reference cycle, which keeps it in memory
        return drawn

    def _call(self, pipeline: Any, text: Text, device: torch.device) -> tuple[Any, torch.Tensor | None]:
        """The image, or the frames, drawn for a prompt, and the sound (channels, N) if that is trained."""

        def moved(entry: Text) -> Text:
            return {name: tensor.to(device) for name, tensor in entry.items()}

        family = self.family
        arguments = family.prompt_arguments(
            moved(text), moved(self.negative) if self.guidance > family.unguided else None
        )
        arguments |= family.call_arguments()
        size = {"width": self.width, "height": self.height, **family.exact_size(self.width, self.height)}
        arguments |= {name: value for name, value in size.items() if name in family.call_parameters}
        arguments |= {"num_inference_steps": self.steps, **family.guide(pipeline, self.guidance)}
        arguments |= {"generator": torch.Generator("cpu").manual_seed(self.config.validation_seed)}
        if family.video:
            arguments["num_frames"] = self.frames
        if self.config.validation_images:
            images = [_opened(path) for path in self.config.validation_images]
            arguments |= family.image_arguments(images, self.width, self.height)
        if (last := self.config.validation_last_image) is not None:
            arguments["last_image"] = _opened(last).resize((self.width, self.height))
        output = pipeline(**arguments, output_type="pil")
        drawn = getattr(output, family.result_name or ("frames" if family.video else "images"))
        sound = None if family.sound_rate is None else output.audio[0]
        return drawn if family.result_alone else drawn[0], sound


def make_previews(
    config: FinetuneConfig, family: TuneFamily, data: Prepared, folder: Path, accelerator: Accelerator
) -> Previews:
    """The previews of a config, in the most frequent size of the data unless validation_resolution is set."""
    width, height = config.validation_size or (data.bucket.width, data.bucket.height)
    width, height = (max(1, round(side / family.multiple)) * family.multiple for side in (width, height))
    if config.prompts and config.validation_size not in (None, (width, height)):
        accelerator.print(
            f"validation_resolution is {config.validation_resolution}; previews are drawn at {width}x{height}, because "
            f"sides are multiples of {family.multiple}."
        )
    longest = max(entry.bucket.frames for entry in data.train.entries)
    check_image(config, family)
    return Previews(
        config=config,
        folder=folder,
        family=family,
        prompts=[(prompt, data.texts.of(prompt, data.previews_see)) for prompt in config.prompts],
        negative=data.texts.of(config.validation_negative_prompt, data.previews_see) if config.prompts else {},
        width=width,
        height=height,
        frames=config.validation_num_video_frames or longest,
        steps=config.validation_num_inference_steps or family.steps,
        guidance=family.guidance if config.validation_guidance is None else config.validation_guidance,
        accelerator=accelerator,
        dtype=torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32,
    )


def check_image(config: FinetuneConfig, family: TuneFamily) -> None:
    """Refuse preview images that do not exist or that the model cannot take, and missing ones that it needs."""
    pipeline = family.source.pipeline_name
    most = 1 if family.layered else max(1, family.reference_counts.stop - 1)
    last = config.validation_last_image
    for name, argument, images, taken, needed in (
        ("validation_image", "image", config.validation_images, family.takes_image, family.needs_image),
        ("validation_last_image", "last_image", () if last is None else (last,), *[family.takes_last_image] * 2),
    ):
        for image in images:
            if not Path(image).is_file():
                raise ConfigError(f"{name} is {image!r}, which does not exist; name an image file.")
        if images and not taken:
            raise ConfigError(f"{name} is {images[0]!r}, but a {pipeline} takes no {argument}; leave it out.")
        if len(images) > most:
            raise ConfigError(f"{name} has {len(images)} images, but a {pipeline} takes {most}; name as many.")
        if not images and needed and config.prompts:
            raise ConfigError(
                f"a {pipeline} needs its {argument} for previews: set {name}, or leave validation_prompt out."
            )


def _opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        return upright_rgb(image)


def check_frames(config: FinetuneConfig, family: TuneFamily) -> None:
    """Refuse a number of preview frames that the family cannot draw; pipelines would round it or fail."""
    frames, factor = config.validation_num_video_frames, family.frame_factor
    if frames is None:
        return
    if not family.video and frames > 1:
        raise ConfigError(f"validation_num_video_frames is {frames}, but {family.name} draws images; leave it out.")
    if (frames - 1) % factor:
        below = 1 + (frames - 1) // factor * factor
        raise ConfigError(
            f"validation_num_video_frames is {frames}, but {family.name} draws 1 + a multiple of {factor} frames: set "
            f"it to {below} or {below + factor}."
        )


def _save(picture: Any, stem: Path, frame_rate: float) -> Path:
    """Save an image, or the frames of a video, under names that begin with `stem`; returns the path of the PNG."""
    still = stem.with_suffix(".png")
    if isinstance(picture, Image.Image):
        picture.save(still)
        return still
    frames: list[Image.Image] = list(picture)
    moving = stem.with_suffix(".webp")
    frames[0].save(moving, save_all=True, append_images=frames[1:], duration=round(1000 / frame_rate), loop=0)
    chosen = [frames[round(i)] for i in np.linspace(0, len(frames) - 1, min(STRIP, len(frames)))]
    strip = Image.new("RGB", (sum(frame.width for frame in chosen), chosen[0].height))
    left = 0
    for frame in chosen:
        strip.paste(upright_rgb(frame), (left, 0))
        left += frame.width
    strip.save(still)
    return still


def _save_sound(sound: torch.Tensor, rate: int, path: Path) -> None:
    """Save sound (channels, N) in [-1, 1] as 16-bit samples."""
    samples = (sound.float().clamp(-1, 1) * 32767).round().to(torch.int16).T.contiguous().cpu().numpy()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(sound.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
