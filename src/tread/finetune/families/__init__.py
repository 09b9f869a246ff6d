"""The model families that can be fine-tuned.

One module per family, each with a subclass of `finetune.family.TuneFamily` and a line in `TUNE_FAMILIES` below. Beside
them are shared modules: `autoencoders` (pixels to latents), `tokens` (the latents of one token), `patches`
(latents to FLUX's tokens), `ragged_text` (texts of different lengths), `first_frame` (clips whose first frame is given)
and `kandinsky5` (the base class of its image and video families). A family knows its stock pipeline and nothing of
runs: modules here may import `finetune.family`, `finetune.model.source` and `finetune.target`, no other part of
fine-tuning. This file imports none of them, so that reading a config loads neither torch nor diffusers.
"""

import importlib
from typing import TYPE_CHECKING

from tread.errors import ConfigError, check_choice

if TYPE_CHECKING:
    from tread.finetune.family import TuneFamily
    from tread.finetune.model.source import Source

TUNE_FAMILIES: dict[str, str] = {
    "auraflow": "AuraFlow",
    "chroma": "Chroma",
    "cogvideox": "CogVideoX",
    "cosmos": "Cosmos",
    "cosmos25": "Cosmos25",
    "cosmos3": "Cosmos3",
    "cosmos_video": "CosmosVideo",
    "flux": "Flux",
    "flux2": "Flux2",
    "hidream": "HiDream",
    "hunyuanvideo": "HunyuanVideo",
    "hunyuanvideo1": "HunyuanVideo1",
    "kandinsky5_image": "Kandinsky5Image",
    "kandinsky5_video": "Kandinsky5Video",
    "krea2": "Krea2",
    "ltxvideo": "LTXVideo",
    "ltxvideo2": "LTXVideo2",
    "lumina2": "Lumina2",
    "pixart_sigma": "PixArtSigma",
    "prx": "PRX",
    "qwen_image": "QwenImage",
    "qwen_image21": "QwenImage21",
    "qwen_layered": "QwenLayered",
    "sd3": "SD3",
    "wan": "Wan",
    "z_image": "ZImage",
}
"""`model_family`, which is also the name of the module -> the class in it."""

UNTUNED: dict[str, str] = {
    "Cosmos2_5_TransferPipeline": "it is a ControlNet",
    "HunyuanVideoFramepackPipeline": "it draws a clip section by section from its own history",
    "LTX2ConditionPipeline": "it is given frames at any position",
    "PRXPixelPipeline": "it has no latents",
    "ZImageOmniPipeline": "its references reach the model through a third encoder",
}
"""Stock pipelines related to those of the families -> why they are not tuned."""


def family_class(name: str) -> "type[TuneFamily]":
    """The class of a `model_family`, imported on demand."""
    check_choice(name, "model_family", TUNE_FAMILIES)
    return getattr(importlib.import_module(f"{__name__}.{name}"), TUNE_FAMILIES[name])


def open_family(
    name: str,
    source: "Source",
    text_length: int | None = None,
    *,
    first_frame: bool = False,
    frame_rate: float | None = None,
    sound: bool = False,
) -> "TuneFamily":
    """The family `name` for the model at `source`; for a model of another family, the error names that one.

    `text_length` is the number of tokens read of a caption; None: as many as the stock pipeline reads. `first_frame`
    conditions a model that also draws from text alone on the first frame. `frame_rate` is that of the clips; None: the
    family's own. `sound` trains the sound of clips too.
    """
    cls = family_class(name)
    if source.pipeline_name not in cls.pipelines:
        fits = next((other for other in TUNE_FAMILIES if source.pipeline_name in family_class(other).pipelines), None)
        advice = f"set model_family to {fits!r}" if fits else _untuned(source.pipeline_name)
        raise ConfigError(
            f"model_family is {name!r}, but {source.name_or_path!r} is a {source.pipeline_name}: {advice}, or name a "
            f"model of that family ({', '.join(cls.pipelines)})."
        )
    if first_frame:
        twin = cls.image_pipelines.get(source.pipeline_name, source.pipeline_name)
        if twin not in cls.image_pipelines.values():
            raise ConfigError(
                f"first_frame is true, but {source.name_or_path!r} is a {source.pipeline_name}, which cannot be "
                "trained on given first frames: leave first_frame out, or name an image-to-video model."
            )
        source = source.drawn_by(twin)
    family = cls(source, text_length)
    both = cls.image_pipelines.get(source.pipeline_name) == source.pipeline_name  # draws from text and from a frame
    family.first_frame = first_frame if both else source.pipeline_name in cls.image_pipelines.values()
    family.frame_rate = frame_rate or family.frame_rate
    if sound:
        family.train_sound()
    return family


def _untuned(pipeline: str) -> str:
    """Advice for a model that no family supports."""
    why = f" ({UNTUNED[pipeline]})" if pipeline in UNTUNED else ""
    return (
        f"tread finetune does not tune it{why}; train it in a script of yours with tread.attach (docs/attach.md), if "
        "docs/families.md lists its transformer"
    )


def distilled_risks(family: "TuneFamily") -> list[str]:
    """A warning if the model was distilled to a few steps."""
    if not family.distilled:
        return []
    return [
        f"{family.source.name_or_path!r} is distilled to a few steps, which training undoes: samples blur, and more "
        "so the longer it trains. Tune the model that it was distilled from, or keep the run short."
    ]
