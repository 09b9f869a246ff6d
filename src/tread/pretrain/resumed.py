"""Settings that a resume cannot change: they decide what the weights of the run's checkpoints mean.

A run has one config for all its checkpoints, so a change would make `tread sample` read the earlier ones by it too.
Names and shapes of the weights are compared where they are loaded; these settings would pass there.
"""

from collections.abc import Iterator
from typing import Any

from tread.config.fields import fields_of
from tread.errors import ConfigError, shown
from tread.files import is_file
from tread.models import DiT, model_size
from tread.pretrain.config import from_run
from tread.pretrain.settings import ModelConfig, PretrainConfig
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.job import CONFIG_FILE

FIXED = {"objective": ("name", "sigma_data"), "data": ("vae", "scaled")}
"""Section -> its settings that decide what the network predicts and how its input is scaled."""


def check_resumed(config: PretrainConfig) -> None:
    """Refuse to resume a run whose weights were trained for another input, prediction or architecture."""
    folder = config.resumed
    if folder is None or not is_file(folder / CONFIG_FILE) or not list_checkpoints(folder / CHECKPOINTS):
        return
    for name, now, before in _changes(config, from_run(folder)):
        raise ConfigError(
            f"{name} is {shown(now)}, but the weights in {folder} were trained with {shown(before)}: set it back, or "
            "begin a run in another output_dir, without resume."
        )


def _changes(now: PretrainConfig, before: PretrainConfig) -> Iterator[tuple[str, Any, Any]]:
    for section, names in FIXED.items():
        new, old = getattr(now, section), getattr(before, section)
        for name in names:
            if name in new and name in old and new[name] != old[name]:
                yield f"{section}.{name}", new[name], old[name]
    new, old = _architecture(now.model), _architecture(before.model)
    changed = [name for name in new if new[name] != old[name]]
    if changed and now.model.size != before.model.size:
        yield "model.size", now.model.size, before.model.size
    for name in changed:
        yield f"model.{name}", new[name], old[name]


def _architecture(model: ModelConfig) -> dict[str, Any]:
    """The arguments of the network that the section `model` sets, named by a size or one by one."""
    settings = vars(model).keys()
    usual = {name: field.default for name, field in fields_of(DiT).items() if name in settings}
    return usual | model_size(model.size) | model.overrides()
