"""The config of a run: composed from files and the command line, kept in the run's folder, changed on resume.

- Hydra composes `configs/config.yaml`, the chosen groups, an optional file of the user's own and the overrides of
  the command line; `settings.py` types and checks the result.
- A resumed run starts from the settings it was saved with; only what the command line names changes.
- Whatever Hydra or OmegaConf complain about leaves here as one sentence about the setting.
"""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread.config.schema import parse
from tread.errors import ConfigError, nearest
from tread.pretrain.settings import PretrainConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIG_FILE = "config.yaml"
GROUPS = ("model", "data", "objective")


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A config with the plain mapping it was read from, which a run keeps on disk."""

    config: PretrainConfig
    raw: dict[str, Any]


def config_folder() -> Path:
    """`configs/`: inside the installed package, or at the root of a clone."""
    package = Path(importlib.import_module("tread").__path__[0])
    for folder in (package / "configs", package.parents[1] / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("tread's configs/ folder is missing from this installation; install tread-diffusion again.")


def compose(arguments: Sequence[str]) -> Composed:
    """The config of `tread train [FILE.yaml] [setting=value ...]`."""
    file, rest = _split(arguments)
    overrides = _parse(rest)
    settings = [override.input_line or "" for override in overrides]
    # first without complaints: a resumed run may have settings that the default groups lack
    loose = [text if text.startswith(("+", *_group_prefixes())) else f"++{text}" for text in settings]
    located = _hydra(file, loose)
    if missing := PretrainConfig.__dataclass_fields__.keys() - located:
        raise ConfigError(f"{file} lacks {min(missing)}: begin it with `defaults: [config, _self_]`, as recipes/ do.")
    resume, run = located["resume"], Path(str(located["output_dir"]))
    if isinstance(resume, str) and resume != "latest":
        raw = _resumed(Path(resume), overrides, located)
    elif resume == "latest" and (run / CONFIG_FILE).is_file():
        raw = _resumed(run, overrides, located)
    else:  # a new run, or nothing to resume yet
        raw = _hydra(file, settings, complete=True)
    return Composed(config=parse(PretrainConfig, raw), raw=raw)


def compose_file(file: Path) -> dict[str, Any]:
    """The mapping of a file whose `defaults` name others; "???" where a value is still to be given."""
    return _hydra(file, [])


def from_run(folder: Path) -> Composed:
    """The config a run folder was trained with."""
    raw = read_saved(folder)
    return Composed(config=parse(PretrainConfig, raw), raw=raw)


def read_saved(folder: Path) -> dict[str, Any]:
    """The settings that a run folder keeps, as they were written."""
    import yaml
    from omegaconf import OmegaConf

    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} is not the folder of a run: it has no {CONFIG_FILE}.")
    try:
        raw: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({_one_line(error)}); restore it.") from None
    return raw


def flatten(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings by dotted name; those in a list of mappings, such as routes, by their place in it."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(place): item for place, item in enumerate(value)}
        flat |= flatten(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return flat


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which two configs differ, as "train.steps: 100 -> 200"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, if the first argument is one, and the settings."""
    if not arguments or not arguments[0].endswith(".yaml") or "=" in arguments[0]:
        return None, list(arguments)
    file = Path(arguments[0])
    if not file.is_file():
        raise ConfigError(f"the config file {str(file)!r} does not exist.")
    return file, list(arguments[1:])


def _parse(settings: list[str]) -> "list[Override]":
    """Hydra's reading of "setting=value" texts."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, overrides = OverridesParser.create(), []
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or name.startswith("~"):
            raise ConfigError(
                f"cannot read {text!r}: write setting=value, e.g. train.steps=500, after at most one FILE.yaml."
            )
        if "[" in name or re.search(r"\.routes\.\D", name):
            raise ConfigError(
                f"cannot read {text!r}: write the place in a list as a number, e.g. "
                "model.tread_config.routes.0.selection_ratio=0.5."
            )
        texts = [text]
        if name == "model.tread_config":
            # it replaces the one before, where Hydra would merge the two; Hydra does not read JSON's quoted keys
            texts = [f"{name}=null", f"{name}={_quoted(value)}" if _is_json(value) else text]
        try:
            parsed = parser.parse_overrides(texts)
        except HydraException:
            parsed = []
        if not parsed or parsed[-1].is_sweep_override():
            raise ConfigError(f"cannot read {text!r}: quote a value that holds spaces, commas or brackets.")
        if name in GROUPS and not isinstance(parsed[-1].value(), str):
            raise ConfigError(f"cannot read {text!r}: choose the group by its name, e.g. model=dit.")
        overrides += parsed
    return overrides


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


def _group_prefixes() -> tuple[str, ...]:
    return tuple(f"{group}=" for group in GROUPS)


def _hydra(file: Path | None, settings: list[str], *, complete: bool = False) -> dict[str, Any]:
    """The mapping that Hydra composes; if `complete`, a setting without a value is an error."""
    import hydra
    import yaml
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder, name, search = config_folder(), "config", []
    if file is not None:
        # the file stands in its own folder; `defaults: [config]` inside it finds the package's
        search = [f"hydra.searchpath=[file://{folder}]"]
        folder, name = file.resolve().parent, file.stem
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            composed = hydra.compose(name, overrides=[*search, *settings])
        raw: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, settings)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {_one_line(error)}.") from None
    except RecursionError:
        raise ConfigError(f"the config.yaml beside {file} hides tread's own of that name; rename it.") from None
    return raw


def _explain(error: Exception, settings: list[str]) -> str:
    """Hydra's errors in our words: which setting, and what would do."""
    from omegaconf.errors import ConfigAttributeError, ConfigIndexError, ConfigKeyError, MissingMandatoryValue

    cause = error.__cause__ or error
    setting = getattr(cause, "full_key", None)
    if isinstance(cause, MissingMandatoryValue):
        return f"{setting} is missing; give it as {setting}=VALUE."
    if isinstance(cause, ConfigIndexError):
        return f"there is no {setting}: places in a list count from 0; to make it longer, give the whole list."
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and setting:
        return _no_setting(setting, _hydra(None, [text for text in settings if text.startswith(_group_prefixes())]))
    found = re.search(
        r"Could not find '(\w+)/(.*?)'\s+Available options in '\w+':\s+(.*?)\s*Config search", str(error), re.S
    )
    if found:
        group, name, options = found.groups()
        return f"there is no {group}={name}; choose one of: {', '.join(options.split())}."
    return _one_line(cause)


def _no_setting(setting: str, known: Mapping[str, Any]) -> str:
    setting = re.sub(r"\[(\d+)\]", r".\1", setting)  # OmegaConf's way to write the place in a list
    flat = flatten(known)
    if any(f"{name}.".startswith(f"{setting}.") for name in flat):
        return f"{setting} cannot be set here: another setting has replaced what it is a part of."
    close = nearest(setting, [*known, *flat])
    return f"there is no setting {setting}{close} `tread train --help` lists them all."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _resumed(run: Path, overrides: "list[Override]", located: dict[str, Any]) -> dict[str, Any]:
    """The saved settings of the run that is resumed, with what the command line set on top."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    saved = from_run(run).raw
    resumed = OmegaConf.create(saved)
    given = [(override.key_or_group, override.value()) for override in overrides]
    for name in GROUPS:
        if name in dict(given):
            resumed[name] = located[name]
    OmegaConf.set_struct(resumed, True)
    for name, value in given:
        if name in GROUPS:
            continue
        try:
            OmegaConf.update(resumed, name, value)
        except OmegaConfBaseException:
            raise ConfigError(_no_setting(name, saved)) from None
    # it goes on in its own folder, wherever that was moved to
    resumed.output_dir = located["output_dir"] if "output_dir" in dict(given) else str(run)
    resumed.resume = located["resume"]
    try:
        raw: Any = OmegaConf.to_container(resumed, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, [])) from None
    return raw
