"""Translate environment files (`.env`) of the existing trainer into keys of a config."""

import shlex
from collections.abc import Mapping
from typing import Any

from tread.config.documents import Plain
from tread.errors import ConfigError

NAMES = {
    "MODEL_NAME": "pretrained_model_name_or_path",
    "DATALOADER_CONFIG": "data_backend_config",
    "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs",
    "LR_SCHEDULE": "lr_scheduler",
    "TRAINING_SEED": "seed",
    "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "RESUME_CHECKPOINT": "resume_from_checkpoint",
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "MINIMUM_RESOLUTION": "minimum_image_size",
    "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}
"""Variable -> key, if the key is not the variable in lower case."""
FAMILIES = {
    "FLUX": "flux",
    "STABLE_DIFFUSION_3": "sd3",
    "PIXART_SIGMA": "pixart_sigma",
    "KOLORS": "kolors",
    "STABLE_DIFFUSION_LEGACY": "sd1x",
}
"""Variable that is true for one family -> `model_family`."""
ARGUMENTS = "TRAINER_EXTRA_ARGS"
"""The variable that holds further options, as a command line."""


def from_environment(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config from the variables of an environment file.

    >>> from_environment({"MAX_NUM_STEPS": "50", "FLUX": "true", "TRAINER_EXTRA_ARGS": "--lora_rank=8 --use_dora"})
    {'max_train_steps': '50', 'model_family': 'flux', 'lora_rank': '8', 'use_dora': True}
    """
    config: dict[str, Any] = {}
    for name, value in variables.items():
        if name == ARGUMENTS:
            config |= _arguments(value or "")
        elif name not in FAMILIES:
            config[NAMES.get(name, name.lower())] = value
        elif str(value).lower() in ("true", "1"):
            config["model_family"] = FAMILIES[name]
    return config


def _arguments(line: str) -> dict[str, Any]:
    """The options of a command line: `--name=value`, `--name value`, or `--name` for true."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{ARGUMENTS} is {line[:60]!r}, which is no command line ({error}).") from None
    options: dict[str, Any] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last, equals, value = word.removeprefix("--").partition("=")
            options[last] = Plain(value) if equals else True
        elif options.get(last) is True:
            options[last] = Plain(word)
        else:
            raise ConfigError(f"{ARGUMENTS} has {word[:60]!r}, which belongs to no option; write --name=value.")
    return options
