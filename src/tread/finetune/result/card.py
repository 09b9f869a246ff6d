"""The model card of a result (README.md), with the Python that loads it; docs and tests use the same lines.

- A result is an ordinary adapter or model: routing leaves no trace in it, so its code does not import this package.
- An adapter is loaded by the pipeline (`load_lora_weights`) or, for LoKr, which pipelines refuse, by the transformer
  (`load_lora_adapter`), or by peft if the pipeline has no loader; lycoris reads its own files.
- The card says what the result was trained from, how to use it, how it was trained and its validation loss.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import yaml

import tread
from tread.finetune.family import TuneFamily
from tread.finetune.model.lora_files import LORA_FILES, has_lora_loader
from tread.finetune.settings import FinetuneConfig

ResultKind = Literal["standard", "lokr", "lycoris", "full"]
"""The adapter's `lora_type`, or `full` for all weights."""
KINDS: dict[ResultKind, str] = {"standard": "LoRA", "lokr": "LoKr", "lycoris": "lycoris", "full": "all weights"}
LYCORIS_FILES = {"transformer": "lycoris.safetensors", "transformer_2": "lycoris_2.safetensors"}
DTYPE = "torch_dtype=torch.bfloat16"
HELPERS = (("diffusers.utils", "load_image"), ("lycoris", "create_lycoris_from_weights"), ("peft", "PeftModel"))
ROUTED = (
    "[TREAD](https://arxiv.org/abs/2501.04765) token routing was used in training, and in training alone: nothing of "
    "it is needed here."
)


class Facts(TypedDict, total=False):
    """Facts about a run that its config does not have; a checkpoint's manifest stores them."""

    step: int
    """Optimizer steps so far."""
    id: str
    """Identifies the checkpoint among those saved at the same step."""
    tread_config: Mapping[str, Any] | None
    """The plan; None: dense."""
    val_loss: float
    """The dense validation loss."""
    tokens_kept: float
    """The fraction of tokens kept in routed layers, outside warm-up and cool-down."""
    speedup: float
    """FLOPs of a dense step over those of a routed step."""
    size: tuple[int, int, int]
    """Width, height and frames of a typical sample."""
    references: int
    """The largest number of reference images of a sample, if samples have any."""
    merged: str
    """Name of the adapter type that was merged into the weights, if one was."""
    previews: Sequence[tuple[str, str]]
    """Prompts with the paths of their previews, relative to the folder."""


def kind_of(config: FinetuneConfig) -> ResultKind:
    """The `ResultKind` that a config trains."""
    return config.lora_type if config.adapts else "full"


def called(config: FinetuneConfig) -> str:
    """The name of what a config trains, for the card, e.g. "DoRA"."""
    return "DoRA" if config.use_dora else KINDS[kind_of(config)]


def loading_lines(pipeline_name: str, kind: ResultKind, parts: Sequence[str] = ("transformer",)) -> list[str]:
    """Lines of Python that load an adapter from `folder` into a stock `pipeline`."""
    has_loader = has_lora_loader(pipeline_name)
    lines = []
    for part in parts:
        file = LORA_FILES[part]
        if kind == "lycoris":
            given = f'1.0, f"{{folder}}/{LYCORIS_FILES[part]}", pipeline.{part}'
            lines.append(f"network, _ = create_lycoris_from_weights({given})")
            lines.append("network.apply_to()")
            lines.append("network.to(pipeline.device)")
        elif not has_loader:
            lines.append(f"PeftModel.from_pretrained(pipeline.{part}, folder)")
        elif kind == "lokr":
            lines.append(f'pipeline.{part}.load_lora_adapter(folder, weight_name="{file}")')
        else:
            second = ", load_into_transformer_2=True" if part == "transformer_2" else ""
            lines.append(f'pipeline.load_lora_weights(folder, weight_name="{file}"{second})')
    return lines


def card(family: TuneFamily, parts: Sequence[str], config: FinetuneConfig, facts: Facts) -> str:
    """The text of a result's README.md: front matter for the hub, how to load it, how it was trained."""
    kind, base = kind_of(config), config.pretrained_model_name_or_path
    front = yaml.safe_dump(_front_matter(family, kind, config, facts), sort_keys=False, allow_unicode=True)
    what = "Fine-tuned weights" if kind == "full" else f"A {called(config)}"
    if "merged" in facts:
        what = f"Weights with a {facts['merged']} merged into them,"
    if config.init == "scratch":
        what = "A transformer trained from scratch, with the autoencoder and the text encoders of the pipeline,"
    sections = [
        f"---\n{front}---",
        f"# {Path(config.output_dir).name}",
        f"{what} for `{base}`. {ROUTED if facts.get('tread_config') else ''}".strip(),
        f"## Use\n\n`pip install {' '.join(_packages(family, kind))}`",
        f"```python\n{example(family, parts, config, facts)}\n```",
        f"## Training\n\n{_table(config, kind, facts)}",
    ]
    pictures = [f"![{prompt}]({path})\n\n{prompt}" for prompt, path in facts.get("previews", ())]
    if pictures:
        sections.append("## Samples\n\n" + "\n\n".join(pictures))
    return "\n\n".join(sections) + "\n"


def example(family: TuneFamily, parts: Sequence[str], config: FinetuneConfig, facts: Facts) -> str:
    """A program that draws one sample with the result, to be run in the result's folder."""
    import diffusers

    kind, name, base = kind_of(config), family.source.pipeline_name, config.pretrained_model_name_or_path
    call = inspect.signature(getattr(diffusers, name).__call__).parameters
    models = {part: family.source.index[part][1] for part in parts} if kind == "full" else {}
    given = [_literal(str(Path(base).resolve()) if Path(base).is_dir() else base)]
    given += [f"{part}={part}" for part in models]
    given += [f"{key}={_literal(getattr(config, key))}" for key in ("revision", "variant") if getattr(config, key)]
    body = [
        *(f'{p} = {cls}.from_pretrained(folder, subfolder="{p}", {DTYPE})' for p, cls in models.items()),
        f"pipeline = {name}.from_pretrained({', '.join(given)}, {DTYPE})",
        'pipeline.to("cuda" if torch.cuda.is_available() else "cpu")',
        *([] if kind == "full" else loading_lines(name, kind, parts)),
        *_drawing(family, config, facts, call),
    ]
    imports = ["import torch", f"from diffusers import {', '.join(sorted({name, *models.values()}))}"]
    if family.imported_first is not None:
        imports.insert(1, f"import {family.imported_first}  # before diffusers")
    used = "\n".join(body)
    imports += [f"from {module} import {word}" for module, word in HELPERS if word in used]
    where = 'folder = "."' if kind == "lycoris" else 'folder = "."  # or its id on the hub'
    return "\n".join([*imports, "", where, *body])


def _drawing(family: TuneFamily, config: FinetuneConfig, facts: Facts, call: Mapping[str, Any]) -> list[str]:
    width, height, frames = facts.get("size", (None, None, None))
    width, height = config.validation_size or (width, height)
    guidance = family.guidance if config.validation_guidance is None else config.validation_guidance
    by_prompt = family.guidance_argument == "true_cfg_scale"  # Qwen-Image guides only with a negative prompt
    by_part = family.guidance_argument == "guider"
    before = [f"pipeline.guider = pipeline.guider.new(guidance_scale={guidance})"] if by_part else []
    arguments = {
        "image": _images(family, facts.get("references", 1)) if _from_image(family, config) else None,
        "last_image": _Code('load_image("last.png")') if family.takes_last_image else None,
        "prompt": config.prompts[0] if config.prompts else "your prompt",
        "negative_prompt": config.validation_negative_prompt or " " if by_prompt else None,
        "width": width if "width" in call else None,
        "height": height if "height" in call else None,
        "num_frames": config.validation_num_video_frames or frames if family.video else None,
        **family.call_arguments(),
        **({"layers": facts.get("references", family.layers)} if family.layered else {}),
        "resolution": family.exact_size(width, height)["resolution"] if family.layered and width and height else None,
        "num_inference_steps": config.validation_num_inference_steps or family.steps,
        family.guidance_argument: None if by_part else guidance,
        # PixArt bins the resolution by default, and Kontext rescales to max_area
        "use_resolution_binning": False if "use_resolution_binning" in call else None,
        "max_area": width * height if "max_area" in call and width and height else None,
        "output_type": "pil" if family.video else None,
    }
    lines = [f"    {name}={_literal(value)}," for name, value in arguments.items() if value is not None]
    name = family.result_name or ("frames" if family.video else "images")
    drawn = f").{name}{'' if family.result_alone else '[0]'}"
    if family.layered:
        saving = ["for number, layer in enumerate(layers):", '    layer.save(f"layer-{number}.png")']
        return [*before, "layers = pipeline(", *lines, drawn, *saving]
    if not family.video:
        return [*before, "image = pipeline(", *lines, drawn, 'image.save("sample.png")']
    duration = round(1000 / family.frame_rate)
    saving = f'frames[0].save("sample.webp", save_all=True, append_images=frames[1:], duration={duration}, loop=0)'
    return [*before, "frames = pipeline(", *lines, drawn, saving]


def _images(family: TuneFamily, count: int) -> "_Code":
    """The code that loads the input images; `count` is the number of references per sample."""
    if family.layered:
        return _Code('load_image("input.png").convert("RGBA")')
    files = ["input.png", *(f"input_{number}.png" for number in range(2, count + 1))]
    loaded = ", ".join(f'load_image("{file}")' for file in files)
    return _Code(f"[{loaded}]" if count > 1 else loaded)


class _Code(str):
    """Text that `_literal` writes without quotes."""


def _literal(value: Any) -> str:
    """A value as a Python literal, formatted like ruff does."""
    if isinstance(value, str) and not isinstance(value, _Code):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _from_image(family: TuneFamily, config: FinetuneConfig) -> bool:
    """Whether the example starts from an image: the pipeline requires one, or it was trained on pairs."""
    paired = any(entry.get("conditioning_type") == "reference" for entry in config.data_entries())
    return family.needs_image or (family.takes_references and paired)


def _packages(family: TuneFamily, kind: ResultKind) -> list[str]:
    """Packages that the example needs."""
    adapter = {"standard": ["peft"], "lokr": ["peft"], "lycoris": ["lycoris-lora"], "full": []}[kind]
    return ["diffusers", "transformers", "accelerate", *adapter, *family.packages]


def _front_matter(family: TuneFamily, kind: ResultKind, config: FinetuneConfig, facts: Facts) -> dict[str, Any]:
    source = "image" if _from_image(family, config) else "text"
    trained = {"standard": "lora", "full": "full-finetune"}.get(kind, kind)
    if config.init == "scratch":
        trained = "from-scratch"
    front: dict[str, Any] = {
        **({} if config.init == "scratch" else {"base_model": config.pretrained_model_name_or_path}),
        "library_name": "diffusers",
        "pipeline_tag": f"{source}-to-{'video' if family.video else 'image'}",
        "tags": ["diffusers", "tread", trained, config.model_family],
    }
    if config.prompts:
        front["instance_prompt"] = config.prompts[0]
    previews = [{"text": prompt, "output": {"url": path}} for prompt, path in facts.get("previews", ())]
    return front | ({"widget": previews} if previews else {})


def _table(config: FinetuneConfig, kind: ResultKind, facts: Facts) -> str:
    """A Markdown table of the training settings, with the dense validation loss."""
    batch = config.train_batch_size * config.gradient_accumulation_steps
    scratch = " from scratch" if config.init == "scratch" else ""
    trained = f"{facts['merged']}, merged into the base" if "merged" in facts else called(config) + scratch
    rows = {"trained": trained, "steps": facts.get("step"), "batch size per process": batch}
    if kind in ("standard", "lokr"):
        rows["rank, alpha"] = f"{config.lora_rank}, {config.lora_alpha or config.lora_rank:g}"
    if config.init_lora is not None:
        rows["started from"] = f"`{config.init_lora}`"
    usual = "bf16" if config.adapts and config.mixed_precision == "bf16" else "fp32"  # trained weights are fp32
    rows |= {
        "optimizer": f"{config.optimizer}, rate {config.learning_rate:g}, {config.lr_scheduler}",
        "precision of the base": config.base_model_precision.replace("no_change", usual),
        "seed": config.seed,
        "routes": _routes(facts.get("tread_config")),
    }
    kept, speedup, loss = facts.get("tokens_kept"), facts.get("speedup"), facts.get("val_loss")
    if kept is not None:
        rows["tokens kept in routed layers"] = f"{kept:.0%}"
    if speedup is not None:
        rows["speed-up over dense by FLOPs"] = f"{speedup:.2f}"
    if loss is not None:
        rows["dense validation loss"] = f"{loss:.4f}"
    rows["tread"] = tread.__version__
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _routes(config: Mapping[str, Any] | None) -> str:
    if not config:
        return "none: dense"
    ranges = [
        f"{route['selection_ratio']:g} dropped in layers {route['start_layer_idx']} to {route['end_layer_idx']}"
        for route in config["routes"]
    ]
    schedule = config.get("schedule")
    return "; ".join(ranges) + (f"; schedule `{json.dumps(schedule)}`" if schedule else "")
