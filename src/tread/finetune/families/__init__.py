"""The model families that can be fine-tuned.

One module per family, each with a subclass of `finetune.family.TuneFamily` and a line in `TUNE_FAMILIES` below. Beside
them are `autoencoders` (pixels to latents), `ragged_text` (texts of different lengths) and `kandinsky5`, which several
families share. A family knows its stock pipeline and nothing of runs: modules here may import `finetune.family`,
`finetune.source` and `finetune.target`, no other part of fine-tuning. This file imports none of them, so that reading
a config loads neither torch nor diffusers.
"""

import importlib
from typing import TYPE_CHECKING

from tread.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tread.finetune.family import TuneFamily
    from tread.finetune.model.source import Source

TUNE_FAMILIES: dict[str, str] = {
    "auraflow": "AuraFlow",
    "flux": "Flux",
    "kandinsky5_image": "Kandinsky5Image",
    "kandinsky5_video": "Kandinsky5Video",
    "lumina2": "Lumina2",
    "pixart_sigma": "PixArtSigma",
    "qwen_image": "QwenImage",
    "sd3": "SD3",
    "wan": "Wan",
}
"""`model_family`, which is also the name of the module -> the class in it."""


def family_class(name: str) -> "type[TuneFamily]":
    """The class of a `model_family`; its module is imported here."""
    if name not in TUNE_FAMILIES:
        raise ConfigError(
            f"model_family is {name!r}; it must be one of {', '.join(TUNE_FAMILIES)}"
            f"{nearest(name, list(TUNE_FAMILIES))}"
        )
    return getattr(importlib.import_module(f"{__name__}.{name}"), TUNE_FAMILIES[name])


def open_family(name: str, source: "Source", text_length: int | None = None) -> "TuneFamily":
    """The family `name` for the model at `source`; an error names the family that the model really is.

    `text_length` is the number of tokens read of a caption; None: as many as the stock pipeline reads.
    """
    cls = family_class(name)
    if source.pipeline_name not in cls.pipelines:
        fits = next((other for other in TUNE_FAMILIES if source.pipeline_name in family_class(other).pipelines), None)
        advice = f"set model_family to {fits!r}" if fits else "no family of tread finetune fits it (tread.attach may)"
        raise ConfigError(
            f"model_family is {name!r}, but {source.place!r} is a {source.pipeline_name}: {advice}, or name a model of "
            f"that family ({', '.join(cls.pipelines)})."
        )
    return cls(source, text_length)
