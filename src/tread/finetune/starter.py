"""`tread init FAMILY --model DIR --data DIR`: a config that runs as it is, each key with a line that explains it.

- The model's own configs say what it is (pairs, first frames, two experts) and how deep; the data's headers say which
  size, how many samples, whether there are masks. Where one of them cannot be read, the usual is written.
- What a person must know or change is a warning; the text itself is always whole.
- Comments are the texts under the fields of `FinetuneConfig`: there is no second wording of them.
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
from tread.finetune.settings import FinetuneConfig
from tread.finetune.source import Source
from tread.routing.risks import ADAPTER_RATIO

RATIO = 0.25
"""The ratio of a first LoRA: the layers of preset 'lora', with fewer dropped tokens."""
SAMPLES = 100
"""Visits to each sample that a first run aims at, within FEWEST and MOST steps."""
FEWEST, MOST = 500, 3000
LARGE = 10e9
"""Bytes of transformer weights from which the base is quantized."""
PAIRED = "FluxKontextPipeline"
FIRST_FRAME = "WanImageToVideoPipeline"


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a config depends on; the defaults are for a model that cannot be looked at."""

    pipeline: str = ""
    depth: int = 28
    multiple: int = 16
    frame_factor: int = 4
    experts: int = 1
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
    draws = image is not None or found.pipeline not in (PAIRED, FIRST_FRAME)

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
        found = Model(
            pipeline=source.pipeline_name, experts=sum(name.startswith("transformer") for name in source.parts)
        )
        found = replace(found, depth=source.depth or found.depth, large=_is_large(family, place))
        opened = open_family(family, source)
        return replace(found, multiple=opened.multiple, frame_factor=opened.frame_factor)
    except (ConfigError, ImportError) as error:
        warnings.warn(str(error), stacklevel=2)
        return Model(large=_is_large(family, place))


def _is_large(family: str, place: str) -> bool:
    """By the files of a local folder; by what the family usually is on the hub."""
    if not Path(place).is_dir():
        return family in ("flux", "qwen_image")
    return sum(path.stat().st_size for path in Path(place, "transformer").glob("*.safetensors")) >= LARGE


def _look_at_data(place: str, *, video: bool, paired: bool) -> tuple[dict[str, Any], list[Sample]]:
    """The entry for a place of data, and what is found there."""
    entry = data_configs(place)[0]
    folder = Path(place)
    if paired:
        pairs = _beside(folder, ("references", "reference", "sources", "source"))
        if pairs is None:
            pairs = folder.with_name(f"{folder.name}-reference")
            message = f"Kontext learns from pairs: put the source images, named as in {place}, into {pairs}."
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
            warnings.warn(f"{place} has no captions: the files' names are taken; write .txt files.", stacklevel=2)
        return entry | captions, samples
    warnings.warn(told[0], stacklevel=2)
    return entry, []


def _beside(folder: Path, words: tuple[str, ...]) -> Path | None:
    """A folder beside the data's, named `photos_masks`, `photos-masks` or just `masks`."""
    names = [f"{folder.name}{joint}{word}" for word in words for joint in ("_", "-")] + list(words)
    return next((path for name in names if (path := folder.with_name(name)).is_dir()), None)


def _resolution(samples: list[Sample], most: int, multiple: int) -> int:
    """The side of the square with the area of the middle sample, as a multiple of what the model needs."""
    side = median(math.sqrt(width * height) for width, height in (s.size for s in samples)) if samples else most
    return max(multiple, int(min(side, most)) // multiple * multiple)


def _route(depth: int) -> dict[str, float | int]:
    """The window of preset 'lora', or as much of it as a shallow model has."""
    start, end = (3, -4) if depth >= 8 else (2, -2) if depth >= 4 else (0, -1)
    return {"selection_ratio": RATIO, "start_layer_idx": start, "end_layer_idx": end}


def _first_image(samples: list[Sample], pipeline: str) -> str | None:
    """What previews of such a pipeline start from, if the data has it as a file."""
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
