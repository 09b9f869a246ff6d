"""The config of `tread train [FILE] [name=value ...]`: composed in layers, kept in the run's folder, changed on resume.

- The layers, each over the one before: the defaults of the fields, `configs/config.yaml`, the chosen groups
  (`configs/model/tread.yaml`, ...), a file of the user's own, `name=value`. A wheel needs no `configs/`: the defaults
  of the fields are the same.
- A group is chosen by its name: `model=dit` on the command line, `model: dit` or `model: {name: dit}` in a file.
- A resumed run starts from the settings it was saved with; only what the command line names changes.
- Files with Hydra's `defaults:` list are read: it chooses groups.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tread.config.documents import YAML_SUFFIXES, find_recipe, read_document, settled
from tread.config.fields import MISSING, fields_of
from tread.config.jobs import job_of
from tread.config.layers import Settings, assigned, check_names, merged, settings_of, split_assignment
from tread.config.schema import arguments, parse
from tread.data import DATASETS
from tread.errors import ConfigError, shortened, shown
from tread.files import is_file
from tread.objectives import OBJECTIVES
from tread.pretrain.settings import AUTO, MODELS, ModelConfig, PretrainConfig
from tread.training.checkpoint import moved_run
from tread.training.job import CONFIG_FILE, saved_settings

COMMAND = "tread train"
GROUPS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "model": ("tread", dict.fromkeys(MODELS, ModelConfig)),
    "data": ("digits", DATASETS),
    "objective": ("flow", OBJECTIVES),
}
"""Group -> its default option, and its options, each with the class whose parameters are the option's settings."""
RENAMED = {"model.preset": "model.size"}
"""Old name of a setting -> its current name; saved configs and users' files may still have the old one."""
ALIASES = {**RENAMED, "data.changed": "checkpoint.data_changed"}
"""Other names of settings on the command line."""


def config_folder() -> Path | None:
    """The `configs/` folder: TREAD_CONFIGS of the environment, else that of the clone; None in an installed wheel."""
    folder = Path(os.environ.get("TREAD_CONFIGS") or Path(__file__).resolve().parents[3] / "configs")
    return folder if (folder / CONFIG_FILE).is_file() else None


def compose(given: Sequence[str], folder: Path | None = None) -> PretrainConfig:
    """The config of `tread train`; `folder` is a `configs/` to read, by default that of the clone."""
    return typed(layered(given, folder))


def layered(given: Sequence[str], folder: Path | None = None) -> dict[str, Any]:
    """All layers of a config in one mapping, names checked; values may be missing and have no types yet."""
    file, texts = _split(given)
    texts = [_normalised(text) for text in texts]
    names = dict(split_assignment(text) for text in texts)
    layer = {} if file is None else _steps_or_epochs(read_layer(file), f"{file}: ")
    resume = names.get("resume", layer.get("resume"))
    if resume not in (None, "null", "latest"):
        return _resumed(Path(str(resume)), texts)
    folder = folder or config_folder()
    base = {} if folder is None else _steps_or_epochs(read_layer(folder / CONFIG_FILE), f"{folder / CONFIG_FILE}: ")
    chosen = {
        group: _check_option(group, names.get(f"{group}.name") or _name(layer, group) or _name(base, group) or usual)
        for group, (usual, _) in GROUPS.items()
    }
    config = merged(base, {group: _group(group, name, folder) for group, name in chosen.items()})
    config = merged(merged(config, layer), {group: {"name": name} for group, name in chosen.items()})
    run = Path(str(_output_dir({**config, **names}, chosen)))
    if resume == "latest" and file is not None and "output_dir" not in names:
        run = moved_run(file, run) or run
    if resume == "latest" and is_file(run / CONFIG_FILE):  # else there is nothing to resume yet
        return _resumed(run, texts)
    return _assigned(config, texts, "" if file is None else str(file))


def from_run(folder: Path) -> PretrainConfig:
    """The config that a run folder was trained with."""
    return typed(saved(folder))


def saved(folder: Path) -> dict[str, Any]:
    """The settings that a run folder keeps."""
    if "model_family" in saved_settings(folder):
        raise ConfigError(f"{folder} is a fine-tune: {folder / 'README.md'} has the lines that load and draw with it.")
    return read_layer(folder / CONFIG_FILE)


def typed(config: Mapping[str, Any]) -> PretrainConfig:
    """The typed config of a mapping that `layered` or `saved` returned."""
    chosen = _options(config)
    check_names(config, known(chosen), COMMAND)
    settings: dict[str, Any] = {**config}
    for group in ("data", "objective"):
        section = {name: value for name, value in config.get(group, {}).items() if name != "name"}
        settings[group] = {"name": chosen[group], **_filled(GROUPS[group][1][chosen[group]], section, group)}
    settings["output_dir"] = _output_dir(config, chosen)
    return parse(PretrainConfig, settings)


def _output_dir(config: Mapping[str, Any], chosen: Mapping[str, str]) -> Any:
    """The `output_dir` of a config whose groups have the options `chosen`."""
    given = config.get("output_dir", AUTO)
    return f"runs/{chosen['model']}-{chosen['data']}" if given == AUTO else given


def known(chosen: Mapping[str, str]) -> Settings:
    """Every setting by dotted name, given the option that each group has."""
    return settings_of(PretrainConfig, {group: GROUPS[group][1][name] for group, name in chosen.items()})


def read_layer(path: Path) -> dict[str, Any]:
    """The settings of a file, under their current names."""
    layer = _document(path)
    if job_of(layer, path) == "finetune":
        raise ConfigError(f"{path} is a config of `tread finetune`: run `tread finetune {path}`.")
    if "defaults" in layer:
        layer = _without_hydra(layer)
    for group in GROUPS:
        if isinstance(layer.get(group), str):  # `model: dit`
            layer[group] = {"name": str(layer[group])}
    return _with_current_names(layer)


def _document(path: Path) -> dict[str, Any]:
    document = read_document(path)
    if document is not None and not isinstance(document, Mapping):
        raise ConfigError(f"{path} is no mapping of settings; write e.g. `train: {{steps: 500}}`.")
    return {str(name): value for name, value in (document or {}).items()}


def _with_current_names(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with renamed settings under their current names."""
    for old, new in RENAMED.items():
        section, name = old.split(".")
        if isinstance(layer.get(section), Mapping) and name in layer[section]:
            renamed = {name: new.split(".")[1]}
            layer[section] = {renamed.get(key, key): value for key, value in layer[section].items()}
    return layer


def _split(given: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, if the first argument is one, and the settings."""
    if given and "=" not in given[0] and Path(given[0]).suffix.lower() in (*YAML_SUFFIXES, ".json", ".toml"):
        return find_recipe(Path(given[0])), list(given[1:])
    return None, list(given)


def _normalised(text: str) -> str:
    """An argument under its setting's current name; `model=dit` becomes `model.name=dit`."""
    name, value = split_assignment(text)
    name = name.lstrip("+")  # Hydra's prefix for a new key
    name = ALIASES.get(name, name)
    return f"{name}.name={value}" if name in GROUPS else f"{name}={value}"


def _resumed(run: Path, texts: Sequence[str]) -> dict[str, Any]:
    """The saved settings of the run that is resumed, with what the command line sets on top."""
    config, names = saved(run), dict(split_assignment(text) for text in texts)
    for group in GROUPS:
        name = names.get(f"{group}.name")
        if name not in (None, _name(config, group)):  # another option starts from its defaults
            config[group] = {"name": name, **_group(group, _check_option(group, name), config_folder())}
    config["output_dir"] = str(run)  # a run continues in its own folder, even if that was moved
    return _assigned(config, texts)


def _assigned(config: dict[str, Any], texts: Sequence[str], source: str = "") -> dict[str, Any]:
    """A config with the settings of the command line; `source` is the file to name in messages about the config."""
    names = known(_options(config))
    _check_owner(config, [split_assignment(text)[0] for text in texts], source)
    check_names(config, names, COMMAND, source)
    train: dict[str, Any] = {}
    for text in texts:
        config = assigned(config, text, names, COMMAND)
        if text.startswith("train"):
            train = assigned(train, text, names, COMMAND)
    return merged(config, _steps_or_epochs(train))


def _check_owner(config: Mapping[str, Any], names: Sequence[str], source: str) -> None:
    """Refuse a setting that belongs to another option of its group, such as data.path with data=digits."""
    for group, option in _options(config).items():
        section = config.get(group, {})
        given = [f"{group}.{name}" for name in section] if isinstance(section, Mapping) else []
        for name in given + [name for name in names if name.startswith(f"{group}.")]:
            part = name.split(".")[1]
            owners = [f"{group}={other}" for other, owner in GROUPS[group][1].items() if part in fields_of(owner)]
            if owners and f"{group}={option}" not in owners:
                raise ConfigError(
                    f"{source}{': ' * bool(source)}{name} is a setting of {' and of '.join(owners)}, but this run has "
                    f"{group}={option}: add {' or '.join(owners)}, or leave {name} out."
                )


def _steps_or_epochs(layer: dict[str, Any], source: str = "") -> dict[str, Any]:
    """A layer whose `train.steps`, if set, unsets `train.epochs` of earlier layers; refuses a layer that sets both.

    Epochs need no such care: where both are set in the end, epochs decide (`PretrainConfig.with_steps`).
    """
    train = layer.get("train")
    if not isinstance(train, Mapping):
        return layer
    steps, epochs = (settled(train.get(name)) for name in ("steps", "epochs"))
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"{source}train.steps is {shown(steps)} and train.epochs is {shown(epochs)}; one of them says how long to "
            "train: leave the other out."
        )
    return layer if steps is None else {**layer, "train": {**train, "epochs": None}}


def _group(group: str, name: str, folder: Path | None) -> dict[str, Any]:
    """The defaults of one option of a group, where they differ from those of its fields."""
    section = MODELS[name] if group == "model" else {}
    if folder is not None and (folder / group / f"{name}.yaml").is_file():
        section = merged(section, _group_file(folder / group, name))
    return {key: value for key, value in section.items() if key != "name"}


def _group_file(folder: Path, name: str) -> dict[str, Any]:
    """The settings of a file such as configs/model/tread.yaml, over those of the files in its `defaults:` list."""
    section = {key: value for key, value in _document(folder / f"{name}.yaml").items() if value != "???"}
    for other in section.pop("defaults", []):
        if other != "_self_":
            section = merged(_group_file(folder, str(other)), section)
    return _with_current_names({folder.name: section})[folder.name]


def _options(config: Mapping[str, Any]) -> dict[str, str]:
    return {group: _check_option(group, _name(config, group) or usual) for group, (usual, _) in GROUPS.items()}


def _check_option(group: str, name: str) -> str:
    if name not in GROUPS[group][1]:
        raise ConfigError(f"there is no {group}={shortened(name, 120)}; choose one of: {', '.join(GROUPS[group][1])}.")
    return name


def _name(config: Mapping[str, Any], group: str) -> str | None:
    section = config.get(group)
    name = section.get("name") if isinstance(section, Mapping) else None
    return None if name is None else str(name)


def _filled(option: Any, section: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The settings of an option, defaults filled in, each in its type."""
    fields = fields_of(option)
    for name, field in fields.items():
        if field.default is MISSING and section.get(name) is None:
            raise ConfigError(f"{group}.{name} is missing; give it as {group}.{name}=VALUE.")
    values = arguments(option, section, group)
    return {name: values.get(name, field.default) for name, field in fields.items()}


def _without_hydra(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer written for Hydra: its `defaults:` list becomes group names, and its interpolated `output_dir` AUTO."""
    defaults = layer.pop("defaults")
    for entry in defaults if isinstance(defaults, list) else []:
        for key, name in entry.items() if isinstance(entry, Mapping) else ():
            group = str(key).removeprefix("override").strip()
            section = layer.get(group, {})
            if group in GROUPS and isinstance(section, Mapping):
                layer[group] = {"name": str(name), **section}
    if layer.get("output_dir") == "runs/${model.name}-${data.name}":
        layer["output_dir"] = AUTO
    return layer
