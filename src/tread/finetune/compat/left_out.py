"""Options that a config of the existing trainer leaves out: defaults that differ from ours, and its family's model."""

from collections.abc import Mapping
from typing import Any

from tread.finetune.compat.defaults import DEFAULTS
from tread.finetune.compat.models import ASSISTED, MODELS
from tread.finetune.compat.rules import is_theirs, there

ALWAYS = ("model_type", "optimizer", "learning_rate", "train_batch_size", "max_grad_norm", "vae_dtype")
"""Options whose default changes what is trained, whatever else the config says."""
OTHER_LAYERS = ("flux", "sd3")
"""Families whose default lora_targets differ from the existing trainer's."""


def left_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """The omitted options of a config of the existing trainer whose defaults differ from ours, with those defaults.

    >>> left_out({"data_backend_config": [], "model_family": "sd3", "model_type": "lora"})["learning_rate"]
    4e-07
    """
    if not is_theirs(config):
        return {}
    family = str(config.get("model_family"))
    needed = {
        "lora_dropout": _adds_lora(config),
        "flow_schedule_shift": family != "pixart_sigma",
        "ema_decay": bool(config.get("use_ema")),
        "num_train_epochs": not config.get("max_train_steps"),
    }
    names = [*ALWAYS, *(name for name, is_needed in needed.items() if is_needed)]
    omitted = {name: DEFAULTS[name] for name in names if config.get(name) is None}
    unnamed = config.get("pretrained_model_name_or_path") is None and config.get("model_flavour") is None
    if unnamed and family in MODELS and family != "wan":
        omitted["model_flavour"] = next(iter(ASSISTED.get(family, MODELS[family])))
    return omitted


def left_out_of_entry(entry: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The caption strategy of an entry that sets none: the config's, or the existing trainer's default."""
    named = entry.get("caption_strategy") is not None or entry.get("only_instance_prompt")
    if named or entry.get("dataset_type") == "conditioning":
        return {}
    if config.get("caption_strategy") is None and (entry.get("type") == "huggingface" or entry.get("metadata_file")):
        return {}
    return {"caption_strategy": there(config, "caption_strategy")}


def has_other_layers(config: Mapping[str, Any]) -> bool:
    """Whether a config of the existing trainer, by default, puts its LoRA on other layers there than here."""
    named = any(config.get(key) for key in ("lora_targets", "peft_lora_target_modules", "flux_lora_target"))
    return is_theirs(config) and config.get("model_family") in OTHER_LAYERS and _adds_lora(config) and not named


def _adds_lora(config: Mapping[str, Any]) -> bool:
    return there(config, "model_type") == "lora" and there(config, "lora_type") == "standard"
