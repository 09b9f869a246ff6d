"""The families that can be fine-tuned: one file each, one line here."""

import importlib
from typing import TYPE_CHECKING

from tread.errors import ConfigError, nearest
from tread.finetune.source import Source

if TYPE_CHECKING:  # family.py imports from this folder
    from tread.finetune.family import TuneFamily

TUNE_FAMILIES: dict[str, str] = {
    "auraflow": "AuraFlow",
    "flux": "Flux",
    "lumina2": "Lumina2",
    "pixart_sigma": "PixArtSigma",
    "qwen_image": "QwenImage",
    "sd3": "SD3",
    "wan": "Wan",
}
"""`model_family` (the module's name too) -> the class."""


def family_class(name: str) -> "type[TuneFamily]":
    """The class of a `model_family`."""
    if name not in TUNE_FAMILIES:
        raise ConfigError(
            f"model_family is {name!r}; it must be one of {', '.join(TUNE_FAMILIES)}"
            f"{nearest(name, list(TUNE_FAMILIES))}"
        )
    return getattr(importlib.import_module(f"{__name__}.{name}"), TUNE_FAMILIES[name])


def open_family(name: str, source: Source, text_length: int | None = None) -> "TuneFamily":
    """The family of a source, or an error that says which family the source is.

    `text_length` is how many tokens of a caption are read; None: as many as the stock pipeline does.
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
