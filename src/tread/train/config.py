"""The settings of a pretraining run: read, composed, checked.

- Hydra composes `configs/config.yaml`, the chosen groups, an optional file of the user's own and the overrides of
  the command line; the dataclasses below type and check the result. `configs/config.yaml` says what each setting
  means and holds its default.
- A resumed run starts from the settings it was saved with; only what the command line names changes.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tread.routing.errors import ConfigError, nearest
from tread.routing.plan import RoutePlan
from tread.train.schema import at_least, parse

CONFIG_FILE = "config.yaml"
GROUPS = ("model", "data", "objective")
GROUP_PREFIXES = tuple(f"{group}=" for group in GROUPS)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A preset, what differs from it, and the routes."""

    name: str
    preset: str
    patch: int | None
    depth: int | None
    width: int | None
    heads: int | None
    mlp_ratio: float | None
    rope: bool | None
    qk_norm: bool | None
    norm: Literal["layer", "rms"] | None
    mlp: Literal["gelu", "swiglu"] | None
    weights: str | None
    tread_config: dict[str, Any] | str | None

    def __post_init__(self) -> None:
        if self.tread_config is not None:
            RoutePlan.from_config(self.tread_config)

    def overrides(self) -> dict[str, Any]:
        """What differs from the preset."""
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None and name not in ("name", "preset", "weights", "tread_config")
        }


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long and on what batches."""

    steps: int
    batch_size: int
    micro_steps: int
    seed: int
    precision: Literal["auto", "bf16", "float32"]
    compile: bool
    checkpointing: bool
    class_dropout: float
    workers: int

    def __post_init__(self) -> None:
        at_least(self, "train", steps=1, batch_size=1, micro_steps=1, seed=0, workers=0)
        if not 0 <= self.class_dropout < 1:
            raise ConfigError(f"train.class_dropout is {self.class_dropout}; allowed is 0 <= value < 1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    learning_rate: float
    schedule: Literal["constant", "cosine"]
    warmup_steps: int
    betas: tuple[float, ...]
    weight_decay: float
    clip: float | None

    def __post_init__(self) -> None:
        at_least(self, "optimizer", learning_rate=0, warmup_steps=0, weight_decay=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {list(self.betas)}; it must be two numbers with 0 <= value < 1.")
        if self.clip is not None and self.clip <= 0:
            raise ConfigError(f"optimizer.clip is {self.clip}; it must be above 0, or null for no clipping.")


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """Moving average of the weights."""

    decay: float
    warmup: int

    def __post_init__(self) -> None:
        at_least(self, "ema", warmup=1)
        if not 0 <= self.decay < 1:
            raise ConfigError(f"ema.decay is {self.decay}; allowed is 0 <= value < 1.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often, and how many."""

    every: int
    keep: int

    def __post_init__(self) -> None:
        at_least(self, "checkpoint", every=1, keep=1)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Dense validation loss."""

    every: int
    samples: int

    def __post_init__(self) -> None:
        at_least(self, "validation", every=0, samples=0)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Sample grids."""

    every: int
    per_class: int
    classes: int
    steps: int
    solver: Literal["euler", "heun"] | None
    guidance: float
    interval: tuple[float, ...] | None
    seed: int

    def __post_init__(self) -> None:
        at_least(self, "sample", every=0, per_class=1, classes=1, steps=1, guidance=0, seed=0)
        if self.interval is not None and len(self.interval) != 2:
            raise ConfigError(f"sample.interval is {list(self.interval)}; it must be two levels, [low, high].")

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval as a pair."""
        return None if self.interval is None else (self.interval[0], self.interval[1])


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Metrics."""

    every: int
    trackers: Literal["auto", "none", "tensorboard", "wandb"]
    project: str

    def __post_init__(self) -> None:
        at_least(self, "log", every=1)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Everything `tread train` reads."""

    model: ModelConfig
    data: dict[str, Any]
    objective: dict[str, Any]
    output_dir: str
    resume: str | None
    train: LoopConfig
    optimizer: OptimizerConfig
    ema: EMAConfig
    checkpoint: CheckpointConfig
    validation: ValidationConfig
    sample: SampleConfig
    log: LogConfig

    def __post_init__(self) -> None:
        for section in ("data", "objective"):
            if not isinstance(getattr(self, section).get("name"), str):
                raise ConfigError(f"{section}.name is missing; choose the group with {section}=NAME.")


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
    file, settings = _split(arguments)
    # first without complaints: a resumed run may have settings that the default groups lack
    located = _hydra(file, [text if text.startswith(("+", *GROUP_PREFIXES)) else f"++{text}" for text in settings])
    if file is not None and (missing := PretrainConfig.__dataclass_fields__.keys() - located):
        raise ConfigError(f"{file} lacks {min(missing)}; begin it with `defaults: [config, _self_]`, as recipes/ do.")
    resume, run = located["resume"], Path(located["output_dir"])
    if isinstance(resume, str) and resume != "latest":
        raw = _resumed(Path(resume), settings, located)
    elif resume == "latest" and (run / CONFIG_FILE).is_file():
        raw = _resumed(run, settings, located)
    else:  # a new run, or nothing to resume yet
        raw = _hydra(file, settings, complete=True)
    return Composed(config=parse(PretrainConfig, raw), raw=raw)


def from_run(folder: Path) -> Composed:
    """The config a run folder was trained with."""
    import yaml
    from omegaconf import OmegaConf

    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} is not the folder of a run: it has no {CONFIG_FILE}.")
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())}); restore it.") from None
    return Composed(config=parse(PretrainConfig, raw), raw=raw)  # pyright: ignore[reportArgumentType]


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, if the first argument is one, and the settings."""
    file, settings = None, list(arguments)
    if settings and settings[0].endswith(".yaml") and "=" not in settings[0]:
        file = Path(settings.pop(0))
        if not file.is_file():
            raise ConfigError(f"the config file {str(file)!r} does not exist.")
    for text in settings:
        if "=" not in text or text.startswith("~"):
            raise ConfigError(
                f"cannot read {text!r}; write setting=value, e.g. train.steps=500, after at most one FILE.yaml."
            )
    # a mapping given for tread_config replaces the whole of it, where Hydra would merge the two
    whole = "model.tread_config="
    return file, [part for text in settings for part in ([f"{whole}null"] * text.startswith(whole) + [text])]


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
        raw = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, settings)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{file} includes itself: rename it, `config` is the name of tread's own.") from None
    return raw  # pyright: ignore[reportReturnType]  (a mapping at the top gives a dict)


def _explain(error: Exception, settings: list[str]) -> str:
    """Hydra's errors in our words: which setting, and what would do."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue

    cause = error.__cause__ or error
    setting = getattr(cause, "full_key", None)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}; quote values that hold spaces, commas or brackets."
    if isinstance(cause, MissingMandatoryValue):
        return f"{setting} is missing; give it as {setting}=VALUE."
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and setting:
        return _no_setting(setting, _hydra(None, [text for text in settings if text.startswith(GROUP_PREFIXES)]))
    found = re.search(
        r"Could not find '(\w+)/(.*?)'\s+Available options in '\w+':\s+(.*?)\s*Config search", str(error), re.S
    )
    if found:
        group, name, options = found.groups()
        return f"there is no {group}={name}; choose one of: {', '.join(options.split())}."
    return " ".join(str(cause).split())


def _no_setting(setting: str, known: Mapping[str, Any]) -> str:
    close = nearest(setting, [*known, *flatten(known)])
    return f"there is no setting {setting}{close} `tread train --help` lists them all."


def flatten(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return flat


def _resumed(run: Path, settings: list[str], located: dict[str, Any]) -> dict[str, Any]:
    """The saved settings of the run that is resumed, with what the command line set on top."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    saved = from_run(run).raw
    resumed = OmegaConf.create(saved)
    overrides = [(text.key_or_group, text.value()) for text in OverridesParser.create().parse_overrides(settings)]
    for name, value in overrides:
        if name in GROUPS and isinstance(value, str):
            resumed[name] = located[name]
    OmegaConf.set_struct(resumed, True)
    for name, value in overrides:
        if name not in GROUPS:
            try:
                OmegaConf.update(resumed, name, value)
            except OmegaConfBaseException as error:
                raise ConfigError(_no_setting(name, saved) if name not in flatten(saved) else str(error)) from None
    # it goes on in its own folder, wherever that was moved to
    resumed.output_dir = located["output_dir"] if "output_dir" in dict(overrides) else str(run)
    resumed.resume = located["resume"]
    try:
        return OmegaConf.to_container(resumed, throw_on_missing=True)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, settings)) from None


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which two configs differ, as "train.steps: 100 -> 200"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
