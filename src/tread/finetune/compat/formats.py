"""Configs of trainers whose format is not read: they are recognised by their keys and refused by name.

Every one of their keys would be unknown, and a list of unknown keys helps nobody to move.
"""

from collections.abc import Mapping
from pathlib import Path

from tread.errors import ConfigError, shortened

MARKS: dict[str, tuple[str, ...]] = {
    "ai-toolkit": ("job", "process"),
    "sd-scripts or musubi-tuner": (
        *("network_module", "network_dim", "network_alpha", "network_args", "optimizer_type", "max_train_epochs"),
        *("output_name", "save_model_as", "discrete_flow_shift", "train_data_dir", "dataset_config"),
        *("general", "datasets", "enable_bucket"),  # a file of data sets
    ),
    "OneTrainer": ("training_method", "concept_file_name", "workspace_dir", "base_model_name"),
    "diffusion-pipe": (
        *("micro_batch_size_per_gpu", "pipeline_stages", "dataset", "adapter"),
        *("resolutions", "directory", "enable_ar_bucket"),  # a file of data sets
    ),
}
"""Trainer -> keys of its configs that no config of `tread finetune` has; two of them make a config its own."""


def refuse_other_formats(config: Mapping[object, object], path: str | Path) -> None:
    """Raise a ConfigError if the keys of a config, or those of its sections, are another trainer's.

    >>> refuse_other_formats({"model_family": "flux", "network_dim": 16}, "c.toml")  # one slip: judged key by key
    """
    sections = [value for value in config.values() if isinstance(value, Mapping)]
    names = {str(name).lstrip("-") for mapping in (config, *sections) for name in mapping}
    for trainer, marks in MARKS.items():
        if len(names.intersection(marks)) > 1:
            raise ConfigError(
                f"{shortened(str(path), 100)} is a config of {trainer}, a format that is not read: write one with "
                "`tread init FAMILY --model MODEL --data FOLDER`, and set in it what docs/migrate.md gives for "
                "your keys."
            )
