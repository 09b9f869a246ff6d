"""`tread init FAMILY --model DIR --data DIR`: write a first config that runs as it is, with a comment on each key.

- The model's config files give its pipeline (pairs, first frames, two experts) and depth; the headers of the data give
  size, number of samples and masks. If one of them cannot be read, typical values are written.
- Whatever the user must know or change is a warning; the config itself is always complete.
- Comments are the field docstrings of `FinetuneConfig`.
"""

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tread.config.fields import fields_of
from tread.config.reference import scalar
from tread.config.schema import parse
from tread.data.captioned.entries import DataConfig, data_configs
from tread.data.captioned.pixels import is_clip, is_image
from tread.data.captioned.samples import Sample, collect
from tread.errors import ConfigError, DataError, TreadWarning
from tread.files import files_below
from tread.finetune.families import distilled_risks, family_class, open_family
from tread.finetune.model.scratch import depth_keys
from tread.finetune.model.source import Source
from tread.finetune.settings import FinetuneConfig
from tread.routing.risks import ADAPTER_RATIO, warn_once

RATIO = 0.25
"""selection_ratio of a first LoRA: in the layers of preset 'lora', with fewer dropped tokens."""
SAMPLES = 100
"""Visits to each sample that the number of steps aims at, between FEWEST and MOST steps."""
FEWEST, MOST = 500, 3000
SCRATCH_RATIO, SCRATCH_STEPS = 0.5, 100_000
"""selection_ratio and steps of a first run from scratch."""
LARGE = 10e9
"""Bytes of transformer weights at which the base is quantized."""
LARGE_FAMILIES = (
    *("chroma", "cogvideox", "flux", "flux2", "hidream", "hunyuanvideo", "hunyuanvideo1", "krea2", "ltxvideo2"),
    *("qwen_image", "qwen_image21", "qwen_layered", "cosmos3"),
)
"""Families whose usual model is LARGE, for a model that is not on this disk."""

NO_PREVIEWS = "# Previews of this model begin with an image: set validation_prompt and validation_image to see some."


@dataclass(frozen=True, kw_only=True)
class Model:
    """The facts about a model that a config depends on; the defaults are for a model that cannot be read."""

    takes_references: bool = False
    needs_references: bool = False
    needs_image: bool = False
    depth: int = 28
    multiple: int = 16
    frame_factor: int = 4
    experts: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the transformer that a run from scratch may change."""
    large: bool = False


def starter_config(family: str, model: str, data: str, scratch: bool = False) -> str:
    """The YAML config of a first LoRA run, or of a first run from scratch."""
    known = family_class(family)
    details = _look_at_model(family, model)
    entry, samples = _look_at_data(data, video=known.video, layered=known.layered, model=details)
    resolution = _resolution(samples, 480 if known.video else known.usual_side, details.multiple)
    longest = max((sample.frames for sample in samples), default=1)
    if longest > 1:
        entry["video"] = {"num_frames": 1 + (min(longest, 81) - 1) // details.frame_factor * details.frame_factor}
    fits = 1 if known.one_length or resolution >= 768 else 2 if resolution >= 384 else 4
    batch = min(fits, max(1, len(samples)))
    steps = SCRATCH_STEPS if scratch else min(MOST, max(FEWEST, math.ceil(SAMPLES * len(samples) / batch / 100) * 100))
    every = min(5000 if scratch else 500, steps // 2)
    prompt = samples[0].captions[0] if samples else "a photo"
    image = _first_images(samples, known.layered) if details.takes_references else None
    draws = image is not None or not details.needs_image

    sections: list[dict[str, Any]] = [
        {"model_family": family, "pretrained_model_name_or_path": model}
        | ({"init": "scratch", "transformer": details.sizes or None} if scratch else {})
        | ({"experts": "both"} if details.experts > 1 else {}),
        {
            "data": [entry],
            "resolution": resolution,
            "resolution_type": "pixel_area",
            "caption_dropout_probability": 0.1,
            "cache_dir": "cache",
        },
        {"tread_config": {"routes": [_route(details.depth, SCRATCH_RATIO if scratch else RATIO)]}},
        {"model_type": "full", "routed_loss": "all", "use_ema": True}
        if scratch
        else {
            "model_type": "lora",
            "lora_type": "standard",
            "lora_rank": 16,
            "base_model_precision": "int8" if details.large else "no_change",
        },
        {
            "max_train_steps": steps,
            "train_batch_size": batch,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": True,
            "graphs": False,
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "lr_scheduler": "constant",
            "lr_warmup_steps": min(100, steps // 10),
            "seed": 42,
        },
        {
            "output_dir": f"runs/{family.replace('_', '-')}-{Path(data).stem or 'data'}",
            "checkpoint_step_interval": every,
            "checkpoints_total_limit": 3,
            "resume_from_checkpoint": "latest",
        },
        {"eval_steps_interval": every // 5}
        | ({"validation_prompt": prompt, "validation_steps": every} if draws else {})
        | ({"validation_image": image} if image else {}),
    ]
    return _document(model, sections, scratch) + ("\n" if draws else f"\n{NO_PREVIEWS}\n")


def _document(model: str, sections: list[dict[str, Any]], scratch: bool) -> str:
    """The sections as YAML below a title, with what may be changed in the routes as a comment."""
    routes = [
        "The ratio climbs over the first steps and the last ones run dense, unless schedule is null here.",
        f"For more speed, raise selection_ratio, up to {ADAPTER_RATIO}.",
    ]
    if scratch:
        routes = ["Steps keep this ratio from the first to the last, unless a schedule is written here."]
    what = f"A new transformer for {model}" if scratch else f"A LoRA of {model}"
    title = f"# {what}, trained with routing.  Run: tread finetune THIS_FILE [key=value ...]"
    return "\n\n".join([title, *(_section(section, routes) for section in sections)])


def _look_at_model(family: str, name_or_path: str) -> Model:
    try:
        source = Source(name_or_path)
        experts = sum(name.startswith("transformer") for name in source.parts)
        details = Model(experts=experts, large=_is_large(family, name_or_path))
        details = replace(details, depth=source.depth or details.depth, sizes=depth_keys(source.config("transformer")))
        opened = open_family(family, source)
        warn_once(distilled_risks(opened), set())
        names = ("takes_references", "needs_references", "needs_image", "multiple", "frame_factor")
        return replace(details, **{name: getattr(opened, name) for name in names})
    except (ConfigError, ImportError) as error:
        warnings.warn(str(error), TreadWarning, stacklevel=2)
        return Model(large=_is_large(family, name_or_path))


def _is_large(family: str, name_or_path: str) -> bool:
    """Whether the transformer is LARGE: by file size for a local folder, else by family."""
    if not Path(name_or_path).is_dir():
        return family in LARGE_FAMILIES
    return sum(path.stat().st_size for path in Path(name_or_path, "transformer").glob("*.safetensors")) >= LARGE


def _look_at_data(origin: str, *, video: bool, layered: bool, model: Model) -> tuple[dict[str, Any], list[Sample]]:
    """The data entry for a folder or table, and its samples."""
    entry = data_configs(origin)[0]
    folder = Path(origin)
    pairs: Path | list[Path] | None = None
    if model.takes_references:
        pairs = _beside(folder, ("references", "reference", "sources", "source"))
    if pairs is None and layered:
        pairs = sorted(path for path in folder.parent.glob(f"{folder.name}-layer-*") if path.is_dir())
        if not pairs:
            pairs = [folder.with_name(f"{folder.name}-layer-{number}") for number in (1, 2)]
            message = f"the model trains on images with their layers: put these, named as in {origin}, into folders "
            warnings.warn(f"{message}like {pairs[0]}, from the back to the front.", TreadWarning, stacklevel=2)
    elif pairs is None and model.needs_references:
        pairs = folder.with_name(f"{folder.name}-reference")
        message = f"the model trains on pairs: put the source images, named as in {origin}, into {pairs}."
        warnings.warn(message, TreadWarning, stacklevel=2)
    if pairs is not None:
        folders = [str(path) for path in pairs] if isinstance(pairs, list) else str(pairs)
        entry |= {"conditioning_data_dir": folders, "conditioning_type": "reference"}
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
                f"{origin} has no captions, so file names are used; write a .txt file beside each image.",
                TreadWarning,
                stacklevel=2,
            )
        return entry | captions, samples
    warnings.warn(told[0], TreadWarning, stacklevel=2)
    return entry, []


def _beside(folder: Path, words: tuple[str, ...]) -> Path | None:
    """The folder named like `photos_masks`, `photos-masks` or `masks` beside `folder` that shares names with it."""
    names = [f"{folder.name}{joint}{word}" for word in words for joint in ("_", "-")] + list(words)
    beside = (path for name in names if (path := folder.with_name(name)).is_dir())
    return next((path for path in beside if not folder.is_dir() or _names(folder) & _names(path)), None)


def _names(folder: Path) -> set[Path]:
    """Names of a folder's images and clips without their endings, by which samples are paired."""
    files = (path for path in files_below(folder) if is_image(path) or is_clip(path))
    return {path.relative_to(folder).with_suffix("") for path in files}


def _resolution(samples: list[Sample], most: int, multiple: int) -> int:
    """Side of a square with the samples' median area, at most `most`, rounded down to a multiple of `multiple`."""
    side = median(math.sqrt(width * height) for width, height in (s.size for s in samples)) if samples else most
    return max(multiple, int(min(side, most)) // multiple * multiple)


def _route(depth: int, ratio: float) -> dict[str, float | int]:
    """The route of preset 'lora' with another ratio; a shallow model gets a shorter window."""
    start, end = (3, -4) if depth >= 8 else (2, -3) if depth >= 5 else (0, -1)
    return {"selection_ratio": ratio, "start_layer_idx": start, "end_layer_idx": end}


def _first_images(samples: list[Sample], layered: bool) -> str | list[str] | None:
    """Preview images from the data: the references of a sample if they are files; for layers, the sample's image."""
    if layered:
        return next((str(sample.media) for sample in samples if isinstance(sample.media, Path)), None)
    files = ([str(media) for media in sample.references if isinstance(media, Path)] for sample in samples)
    references = next(filter(None, files), None)
    return references[0] if references is not None and len(references) == 1 else references


def _section(settings: dict[str, Any], routes: Sequence[str]) -> str:
    """Keys and values with their comments; `routes` are the comment lines below tread_config."""
    fields = fields_of(FinetuneConfig)
    lines: list[str] = []
    for name, value in settings.items():
        lines += textwrap.wrap(
            fields[name].doc, 116, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )
        lines += [f"{name}: {scalar(value)}"] if not isinstance(value, list | dict) else [f"{name}:", *_nested(value)]
        if name == "tread_config":
            lines += [f"  # {line}" for line in routes]
    return "\n".join(lines)


def _nested(value: list[Any] | dict[str, Any]) -> list[str]:
    import yaml

    return textwrap.indent(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110), "  ").splitlines()
