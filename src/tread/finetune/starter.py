"""`tread init FAMILY --model DIR --data DIR`: write a first config that runs as it is, with a comment on each key.

- The model's configs tell its pipeline (pairs, first frames, two experts) and depth; the headers of the data tell size,
  number of samples and masks. If one of them cannot be read, usual values are written.
- Whatever the user must know or change is a warning; the config itself is always complete.
- Comments are the docs of the fields of `FinetuneConfig`, so that there is one wording of them.
"""

import math
import textwrap
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tread.config.fields import fields_of
from tread.config.reference import scalar
from tread.config.schema import parse
from tread.data.captioned.entries import DataConfig, data_configs
from tread.data.captioned.samples import Sample, collect
from tread.errors import ConfigError, DataError
from tread.finetune.families import family_class, open_family
from tread.finetune.model.source import Source
from tread.finetune.settings import FinetuneConfig
from tread.routing.risks import ADAPTER_RATIO

RATIO = 0.25
"""selection_ratio of a first LoRA: fewer dropped tokens than preset 'lora', in the same layers."""
SAMPLES = 100
"""Visits to each sample that the number of steps aims at, between FEWEST and MOST steps."""
FEWEST, MOST = 500, 3000
LARGE = 10e9
"""Bytes of transformer weights at which the base is quantized."""
PAIRED = "FluxKontextPipeline"
"""The pipeline trained on pairs of images."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The facts about a model that a config depends on; the defaults are for a model that cannot be read."""

    pipeline: str = ""
    depth: int = 28
    multiple: int = 16
    frame_factor: int = 4
    experts: int = 1
    takes_image: bool = False
    large: bool = False


def starter_config(family: str, model: str, data: str) -> str:
    """The YAML of a first LoRA run."""
    known = family_class(family)
    found = _look_at_model(family, model)
    entry, samples = _look_at_data(data, video=known.video, paired=found.pipeline == PAIRED)
    resolution = _resolution(samples, 480 if known.video else 1024, found.multiple)
    longest = max((sample.frames for sample in samples), default=1)
    if longest > 1:
        entry["video"] = {"num_frames": 1 + (min(longest, 81) - 1) // found.frame_factor * found.frame_factor}
    batch = min(1 if resolution >= 768 else 2 if resolution >= 384 else 4, max(1, len(samples)))
    steps = min(MOST, max(FEWEST, math.ceil(SAMPLES * len(samples) / batch / 100) * 100))
    prompt = samples[0].captions[0] if samples else "a photo"
    image = _first_image(samples, found.pipeline)
    draws = image is not None or not found.takes_image

    sections: list[dict[str, Any]] = [
        {"model_family": family, "pretrained_model_name_or_path": model}
        | ({"experts": "both"} if found.experts > 1 else {}),
        {
            "data": [entry],
            "resolution": resolution,
            "resolution_type": "pixel_area",
            "caption_dropout_probability": 0.1,
            "cache_dir": "cache",
        },
        {"tread_config": {"routes": [_route(found.depth)]}},
        {
            "model_type": "lora",
            "lora_type": "standard",
            "lora_rank": 16,
            "base_model_precision": "int8" if found.large else "no_change",
        },
        {
            "max_train_steps": steps,
            "train_batch_size": batch,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": True,
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "lr_scheduler": "constant",
            "lr_warmup_steps": min(100, steps // 10),
            "seed": 42,
        },
        {
            "output_dir": f"runs/{family.replace('_', '-')}-{Path(data).stem or 'data'}",
            "checkpoint_step_interval": min(500, steps // 2),
            "checkpoints_total_limit": 3,
            "resume_from_checkpoint": "latest",
        },
        {"eval_steps_interval": 100, "validation_prompt": prompt, "validation_steps": min(500, steps // 2)}
        | ({"validation_image": image} if image else {} if draws else {"validation_steps": 0}),
    ]
    title = f"# A LoRA of {model}, trained with routing.  Run: tread finetune THIS_FILE [key=value ...]"
    return "\n\n".join([title, *(_section(section) for section in sections)]) + "\n"


def _look_at_model(family: str, place: str) -> Model:
    try:
        source = Source(place)
        experts = sum(name.startswith("transformer") for name in source.parts)
        found = Model(pipeline=source.pipeline_name, experts=experts)
        found = replace(found, depth=source.depth or found.depth, large=_is_large(family, place))
        opened = open_family(family, source)
        return replace(
            found, multiple=opened.multiple, frame_factor=opened.frame_factor, takes_image=opened.takes_image
        )
    except (ConfigError, ImportError) as error:
        warnings.warn(str(error), stacklevel=2)
        return Model(large=_is_large(family, place))


def _is_large(family: str, place: str) -> bool:
    """Whether the transformer is LARGE, by the files of a local folder or the family of a model on the hub."""
    if not Path(place).is_dir():
        return family in ("cogvideox", "flux", "hunyuanvideo", "hunyuanvideo1", "qwen_image")
    return sum(path.stat().st_size for path in Path(place, "transformer").glob("*.safetensors")) >= LARGE


def _look_at_data(place: str, *, video: bool, paired: bool) -> tuple[dict[str, Any], list[Sample]]:
    """The data entry for a folder or table, and its samples."""
    entry = data_configs(place)[0]
    folder = Path(place)
    if paired:
        pairs = _beside(folder, ("references", "reference", "sources", "source"))
        if pairs is None:
            pairs = folder.with_name(f"{folder.name}-reference")
            message = f"Kontext trains on pairs: put the source images, named as in {place}, into {pairs}."
            warnings.warn(message, stacklevel=2)
        entry |= {"conditioning_data_dir": str(pairs), "conditioning_type": "reference"}
    elif masks := _beside(folder, ("masks", "mask")):
        entry |= {"conditioning_data_dir": str(masks), "conditioning_type": "mask"}
    told: list[str] = []
    for captions in ({}, {"caption_strategy": "filename"}):
        try:
            config = parse(DataConfig, {**entry, **captions})
            samples = collect([config], video=video, say=told.append, progress=False).samples
        except (ConfigError, DataError) as error:
            told.append(str(error))
            continue
        if captions:
            warnings.warn(
                f"{place} has no captions, so file names are used; write a .txt file beside each image.", stacklevel=2
            )
        return entry | captions, samples
    warnings.warn(told[0], stacklevel=2)
    return entry, []


def _beside(folder: Path, words: tuple[str, ...]) -> Path | None:
    """The folder beside `folder` that is named like `photos_masks`, `photos-masks` or `masks`, if there is one."""
    names = [f"{folder.name}{joint}{word}" for word in words for joint in ("_", "-")] + list(words)
    return next((path for name in names if (path := folder.with_name(name)).is_dir()), None)


def _resolution(samples: list[Sample], most: int, multiple: int) -> int:
    """The side of the square that has the median area of the samples, `most` at most, as a multiple of `multiple`."""
    side = median(math.sqrt(width * height) for width, height in (s.size for s in samples)) if samples else most
    return max(multiple, int(min(side, most)) // multiple * multiple)


def _route(depth: int) -> dict[str, float | int]:
    """The route of preset 'lora' with RATIO; a shallow model gets a shorter window."""
    start, end = (3, -4) if depth >= 8 else (2, -2) if depth >= 4 else (0, -1)
    return {"selection_ratio": RATIO, "start_layer_idx": start, "end_layer_idx": end}


def _first_image(samples: list[Sample], pipeline: str) -> str | None:
    """The path of a source image for previews, if the pipeline needs one and the data has it as a file."""
    places = [sample.reference for sample in samples] if pipeline == PAIRED else []
    return next((str(place) for place in places if isinstance(place, Path)), None)


def _section(settings: dict[str, Any]) -> str:
    fields = fields_of(FinetuneConfig)
    lines: list[str] = []
    for name, value in settings.items():
        lines += textwrap.wrap(
            fields[name].doc, 116, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )
        lines += [f"{name}: {scalar(value)}"] if not isinstance(value, list | dict) else [f"{name}:", *_nested(value)]
        if name == "tread_config":
            lines += [
                "  # The ratio climbs over the first steps and the last ones run dense, unless schedule is null here.",
                f"  # For more speed, raise selection_ratio up to the {ADAPTER_RATIO} of preset 'lora'.",
            ]
    return "\n".join(lines)


def _nested(value: list[Any] | dict[str, Any]) -> list[str]:
    import yaml

    return textwrap.indent(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110), "  ").splitlines()
