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
    raw, overridden = _hydra(list(arguments))
    if raw["resume"] is not None:
        raw = _resumed(raw, overridden)
    return Composed(config=parse(PretrainConfig, raw), raw=raw)


def from_run(folder: Path) -> Composed:
    """The config a run folder was trained with."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} is not the folder of a run: it has no {CONFIG_FILE}.")
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(OmegaConf.load(path))
    return Composed(config=parse(PretrainConfig, raw), raw=raw)  # pyright: ignore[reportArgumentType]


def _hydra(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The composed mapping, and the dotted names that the command line set."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder, name, search = config_folder(), "config", []
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        path = Path(arguments.pop(0))
        if not path.is_file():
            raise ConfigError(f"the config file {str(path)!r} does not exist.")
        # the file stands in its own folder; `defaults: [config]` inside it finds the package's
        search = [f"hydra.searchpath=[file://{folder}]"]
        folder, name = path.resolve().parent, path.stem
    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"cannot read {argument!r}; write setting=value, e.g. train.steps=500.")
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            composed = hydra.compose(name, overrides=[*search, *arguments])
        overridden = [override.key_or_group for override in OverridesParser.create().parse_overrides(arguments)]
        raw = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, arguments)) from None
    return raw, overridden  # pyright: ignore[reportReturnType]  (a mapping at the top gives a dict)


def _explain(error: Exception, arguments: list[str]) -> str:
    """Hydra's errors in our words: which setting, and what would do."""
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue

    cause = error.__cause__ or error
    setting = getattr(cause, "full_key", None)
    if isinstance(cause, MissingMandatoryValue):
        return f"{setting} is missing; give it as {setting}=VALUE."
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and setting:
        groups = [argument for argument in arguments if argument.partition("=")[0] in ("model", "data", "objective")]
        known, _ = _hydra([*groups, "data.path=-"] if {"data=latents", "data=images"} & set(groups) else groups)
        return f"there is no setting {setting}{nearest(setting, flatten(known))} `tread train --help` lists them all."
    found = re.search(
        r"Could not find '(\w+)/(.*?)'\s+Available options in '\w+':\s+(.*?)\s*Config search", str(error), re.S
    )
    if found:
        group, name, options = found.groups()
        return f"there is no {group}={name}; choose one of: {', '.join(options.split())}."
    return " ".join(str(cause).split())


def flatten(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return flat


def _resumed(raw: dict[str, Any], overridden: list[str]) -> dict[str, Any]:
    """The saved settings of the run that is resumed, with what the command line set on top."""
    run = Path(raw["output_dir"] if raw["resume"] == "latest" else raw["resume"])
    if raw["resume"] == "latest" and not (run / CONFIG_FILE).is_file():
        return raw  # nothing to resume yet: the run starts
    resumed = from_run(run).raw
    for name in overridden:
        source, target = raw, resumed
        *sections, last = name.split(".")
        for section in sections:
            source, target = source[section], target[section]
        target[last] = source[last]
    here = raw["output_dir"] if "output_dir" in overridden else str(run)  # it goes on in its own folder
    return resumed | {"resume": raw["resume"], "output_dir": here}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which two configs differ, as "train.steps: 100 -> 200"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
