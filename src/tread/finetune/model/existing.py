"""`init_lora`: start a fine-tune from an existing adapter, of this package or another trainer.

- It is a safetensors file, a folder with one, or an id on the hub; for a model with two transformers, a folder like
  a result's. Names may be those of diffusers, of peft, of ComfyUI or kohya (`layouts`), or of any other trainer that
  the stock pipeline's loader converts.
- The rank must be `lora_rank`, and every linear of the file one that `lora_targets` names. Linears that the file lacks
  start with a zero update. The run's alpha may differ: `lora_B` is rescaled, so that the initial update is the
  adapter's.
- Files are read twice: as a check before anything is encoded, and when the model is loaded.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tread.errors import ConfigError, TreadWarning, shown
from tread.finetune.family import TuneFamily
from tread.finetune.model.adapters import adapter_scale, adapter_state, find_linears
from tread.finetune.model.layouts import from_layout, has_layout
from tread.finetune.model.lora_files import LORA_FILES, PEFT_CONFIG, PEFT_FILE, PEFT_PREFIX, has_lora_loader
from tread.finetune.model.original_names import NAMES
from tread.finetune.settings import FinetuneConfig

MAGNITUDE = "lora_magnitude_vector"
SCALED = (".lora_B.weight", ".lokr_w1", ".lokr_w1_b")
"""The one factor of each update that is multiplied by (scale of the file) / (scale of the run)."""


def is_local(name_or_path: str) -> bool:
    """Whether an adapter is a local path, of a file that may be missing, instead of an id on the hub."""
    path = Path(name_or_path)
    return path.exists() or path.is_absolute() or name_or_path.startswith((".", "~"))


@dataclass(frozen=True)
class Existing:
    """An adapter that was read from a file."""

    tensors: dict[str, Tensor]
    """Its tensors under peft's names."""
    scales: dict[str, float]
    """The factor of each linear's update."""


def read_adapter(config: FinetuneConfig, family: TuneFamily, part: str, model: nn.Module) -> Existing:
    """Read the adapter that `init_lora` names, for the transformer `part`.

    `model` has no adapter yet, and may be on the meta device.
    """
    path = _find(str(config.init_lora), part)
    try:
        adapter = _load(path, family, model, config.lora_rank)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(f"init_lora: {path} is no adapter that can be read ({error}); get it again.") from error
    if config.lora_type == "standard":
        _check(adapter.tensors, find_linears(model, config.lora_targets or family.lora_targets), config)
    return adapter


@torch.no_grad()
def put_in(model: nn.Module, existing: Existing, given: str) -> None:
    """Copy an existing adapter into the model's own, rescaled to its alpha."""
    own, scale = adapter_state(model), adapter_scale(model)
    linears = {_linear(name) for name in own}
    if new := linears - {_linear(name) for name in existing.tensors}:
        told = f"init_lora {shown(given)} has nothing for {len(new)} of {len(linears)} linears, which start as nothing"
        warnings.warn(f"{told}, {min(new)} among them; name fewer lora_targets to leave them out.", TreadWarning, 2)
    for name, tensor in existing.tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            shape = tuple(own[name].shape) if name in own else "absent"
            raise ConfigError(
                f"init_lora {shown(given)} has {name} as {tuple(tensor.shape)}, which is {shape} here: set lora_type, "
                "lora_rank, lokr_factor and lora_targets as that adapter was trained."
            )
        ratio = existing.scales[_linear(name)] / scale if name.endswith(SCALED) else 1.0
        own[name].copy_(tensor.float() * ratio)


def _find(given: str, part: str) -> Path:
    """The file of an adapter for one transformer."""
    path, file = Path(given), LORA_FILES[part]
    if not path.exists():
        path = _download(given)
    if path.is_file():
        if part != "transformer":
            raise ConfigError(
                f"init_lora is the file {shown(given)}, but two transformers are trained: name a folder with {file} "
                "beside pytorch_lora_weights.safetensors, or train one of the experts."
            )
        return path
    for name in (file, PEFT_FILE):
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.safetensors"))
    if part == "transformer" and len(files) == 1:
        return files[0]
    names = ", ".join(one.name for one in files) or "none"
    raise ConfigError(
        f"init_lora {shown(given)} has no {file}; its safetensors files are: {names}. Name the file itself."
    )


def _download(given: str) -> Path:
    """The folder of an adapter on the hub, or one file of it: OWNER/NAME or OWNER/NAME/FILE.safetensors."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError

    words = given.split("/")
    try:
        if len(words) > 2:
            return Path(hf_hub_download("/".join(words[:2]), "/".join(words[2:])))
        return Path(snapshot_download(given, allow_patterns=["*.safetensors", PEFT_CONFIG]))
    except (OSError, ValueError, HFValidationError) as error:
        raise ConfigError(
            f"init_lora is {shown(given)}, which is neither a file nor a folder here, nor an adapter on the hub that "
            f"this machine can reach ({type(error).__name__}). Give the path of a safetensors file or of a run."
        ) from error


def _load(path: Path, family: TuneFamily, model: nn.Module, rank: int) -> Existing:
    try:
        tensors = load_file(path)
        with safe_open(path, framework="pt") as opened:
            header: dict[str, str] = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"init_lora: {path} is no safetensors file ({error}); get it again.") from None
    modules = dict(model.named_modules())
    if has_layout(list(tensors)) and family.name in NAMES:
        sizes = {name: one.out_features for name, one in modules.items() if isinstance(one, nn.Linear)}
        linears = from_layout(tensors, family.name, sizes, rank)
        named = {f"{name}.lora_A.weight": linear.down for name, linear in linears.items()}
        named |= {f"{name}.lora_B.weight": linear.up for name, linear in linears.items()}
        return Existing(named, {name: linear.scale for name, linear in linears.items()})
    if any(name.startswith(PEFT_PREFIX) for name in tensors):
        named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
        return Existing(named, _scales(named, _peft_config(path)))
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    if not any(_linear(name) in modules for name in named) and has_lora_loader(family.source.pipeline_name):
        named = _converted(tensors, family, path)
    metadata = json.loads(header.get("lora_adapter_metadata", "{}"))
    scales = _scales(named, {key.removeprefix("transformer."): value for key, value in metadata.items()})
    return Existing({name: tensor for name, tensor in named.items() if not name.endswith(".alpha")}, scales)


def _converted(tensors: dict[str, Tensor], family: TuneFamily, path: Path) -> dict[str, Tensor]:
    """The tensors under diffusers' names, converted by the stock pipeline's loader."""
    import diffusers

    cls: Any = getattr(diffusers, family.source.pipeline_name)
    try:
        converted = cls.lora_state_dict(dict(tensors))
    except Exception as error:  # converters raise all kinds of errors for unknown names
        raise ConfigError(f"init_lora: {path} has names that no known trainer gives to {family.name}.") from error
    state: dict[str, Tensor] = converted[0] if isinstance(converted, tuple) else converted
    return {name.removeprefix("transformer."): tensor for name, tensor in state.items()}


def _scales(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, float]:
    """The scale of each linear: from its alpha in the file, else from the config that peft and diffusers write."""
    alpha, rank = settings.get("lora_alpha", settings.get("alpha")), settings.get("r")
    common = 1.0 if alpha is None or not rank else alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    ranks = {_linear(name): len(tensor) for name, tensor in tensors.items() if name.endswith(".lora_A.weight")}
    alphas = {_linear(name): float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}
    linears = {_linear(name) for name in tensors}
    return {name: alphas[name] / ranks[name] if name in alphas and name in ranks else common for name in linears}


def _linear(name: str) -> str:
    """The linear that a tensor of an adapter belongs to."""
    for mark in (".lora_", ".lokr_", ".alpha"):
        name = name.partition(mark)[0]
    return name


def _peft_config(path: Path) -> dict[str, Any]:
    beside = path.with_name(PEFT_CONFIG)
    if not beside.is_file():
        raise ConfigError(f"init_lora: {path} has peft's names, but {PEFT_CONFIG} with its alpha is not beside it.")
    try:
        return dict(json.loads(beside.read_bytes()))
    except ValueError as error:
        raise ConfigError(f"init_lora: {beside} is no JSON ({error}); get it again.") from None


def _check(tensors: Mapping[str, Tensor], linears: Mapping[str, nn.Linear], config: FinetuneConfig) -> None:
    """Refuse a LoRA with another rank or other linears, or a DoRA without use_dora (and the reverse)."""
    given = shown(config.init_lora)
    ranks = sorted({len(tensor) for name, tensor in tensors.items() if name.endswith(".lora_A.weight")})
    if not ranks:
        raise ConfigError(f"init_lora {given} holds no LoRA; set lora_type as it was trained, or name another file.")
    if ranks != [config.lora_rank]:
        told = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        fix = f"set lora_rank to {ranks[0]}" if len(ranks) == 1 else "only one rank can be gone on with"
        raise ConfigError(f"init_lora {given} has {told}, but lora_rank is {config.lora_rank}: {fix}.")
    if others := sorted({_linear(name) for name in tensors} - set(linears)):
        raise ConfigError(
            f"init_lora {given} has {len(others)} linears that are not trained here, {others[0]} among them: name them "
            "in lora_targets too, or name another adapter."
        )
    has_magnitudes = any(MAGNITUDE in name for name in tensors)
    if has_magnitudes != config.use_dora:
        kind = "a DoRA" if has_magnitudes else "a LoRA without magnitudes"
        raise ConfigError(f"init_lora {given} is {kind}: set use_dora to {str(has_magnitudes).lower()}.")
    for name, tensor in tensors.items():
        linear, rank = linears[_linear(name)], config.lora_rank
        shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
        expected = next((shape for mark, shape in shapes.items() if f".{mark}." in name), (linear.out_features,))
        if tuple(tensor.shape) != expected:
            raise ConfigError(
                f"init_lora {given} has {name} as {tuple(tensor.shape)}, but it is {expected} in this model: it is an "
                "adapter of another model."
            )
