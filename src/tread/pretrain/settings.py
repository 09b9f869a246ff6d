"""The settings of a run as typed dataclasses: `JobConfig` is what the loop reads, `PretrainConfig` adds its own.

Types and bounds live here; `configs/config.yaml` says what each setting means and holds its default. Checks that need
the model or the data are made where those are built.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tread.config.schema import at_least
from tread.errors import ConfigError
from tread.kernels.attention import Attention
from tread.kernels.checkpointing import Checkpointing
from tread.kernels.compiling import Switch
from tread.kernels.float8 import Float8
from tread.routing.plan import RoutePlan
from tread.sampling.guidance import Branches
from tread.sampling.guidance.fields import check_interval


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
    precision: Literal["auto", "bf16", "bf16-stream", "float32"]
    compile: Switch
    attention: Attention
    graphs: bool

    def __post_init__(self) -> None:
        at_least(self, "train", steps=1, batch_size=1, micro_steps=1, seed=0)


@dataclass(frozen=True, kw_only=True)
class PretrainLoopConfig(LoopConfig):
    """The loop of class-conditional training."""

    float8: Float8 | None
    checkpointing: Checkpointing
    workers: int
    class_dropout: float

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "train", workers=0)
        if not 0 <= self.class_dropout < 1:
            raise ConfigError(f"train.class_dropout is {self.class_dropout}; allowed is 0 <= value < 1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and its learning rate."""

    name: str
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
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
    """Dense validation loss; every 0 steps: never."""

    every: int

    def __post_init__(self) -> None:
        at_least(self, "validation", every=0)


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(ValidationConfig):
    """On so many samples held out of the training data."""

    samples: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "validation", samples=0)


@dataclass(frozen=True, kw_only=True)
class PreviewConfig:
    """Samples drawn while training; every 0 steps: never."""

    every: int


@dataclass(frozen=True, kw_only=True)
class SampleConfig(PreviewConfig):
    """Sample grids."""

    per_class: int
    classes: int
    steps: int
    solver: Literal["euler", "heun"] | None
    guidance: float
    interval: tuple[float, ...] | None
    seed: int
    guidance_kind: Literal["cfg", "sg", "cfg+sg"] = "cfg"
    strong_ratio: float = 0.0
    weak_ratio: float | None = None
    ratio_schedule: Literal["constant", "cosine"] = "constant"
    vae: str | None = None

    def __post_init__(self) -> None:
        at_least(self, "sample", every=0, per_class=1, classes=1, steps=1, guidance=0, seed=0)
        if self.interval is not None and len(self.interval) != 2:
            raise ConfigError(f"sample.interval is {list(self.interval)}; it must be two levels, [low, high].")
        check_interval(self.bounds, "sample.interval")
        _ = self.branches  # refuses ratios that do not go together

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval as a pair."""
        return None if self.interval is None else (self.interval[0], self.interval[1])

    @property
    def branches(self) -> Branches:
        """What guidance compares."""
        return Branches(
            kind=self.guidance_kind,
            strong_ratio=self.strong_ratio,
            weak_ratio=self.weak_ratio,
            schedule=self.ratio_schedule,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Samples against a reference; every 0 steps: never."""

    every: int
    samples: int
    reference: str | None
    features: str
    weights: str | None
    guidance: float
    batch_size: int
    frechet_only: bool

    def __post_init__(self) -> None:
        at_least(self, "evaluate", every=0, samples=2, guidance=0, batch_size=1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Metrics."""

    every: int
    trackers: Literal["auto", "none", "tensorboard", "wandb"]
    project: str
    run: str | None = None

    def __post_init__(self) -> None:
        at_least(self, "log", every=1)


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What every job has; the loop reads nothing else."""

    output_dir: str
    resume: str | None
    train: LoopConfig
    optimizer: OptimizerConfig
    ema: EMAConfig | None
    checkpoint: CheckpointConfig
    validation: ValidationConfig
    sample: PreviewConfig
    log: LogConfig
    evaluate: EvaluateConfig | None = None


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(JobConfig):
    """Everything `tread train` reads."""

    model: ModelConfig
    data: dict[str, Any]
    objective: dict[str, Any]
    train: PretrainLoopConfig
    ema: EMAConfig
    validation: HeldOutConfig
    sample: SampleConfig

    def __post_init__(self) -> None:
        for section in ("data", "objective"):
            if not isinstance(getattr(self, section).get("name"), str):
                raise ConfigError(f"{section}.name is missing; choose the group with {section}=NAME.")
        scales = {"sample.guidance": self.sample.guidance}
        if self.evaluate is not None and self.evaluate.every > 0:
            scales["evaluate.guidance"] = self.evaluate.guidance
        for name, scale in scales.items():
            if scale != 1 and self.train.class_dropout == 0 and self.sample.branches.needs_null_label:
                raise ConfigError(
                    f"{name} is {scale}, but train.class_dropout is 0, so the null class that guidance needs is never "
                    f"trained: set {name}=1, or drop some labels."
                )
        if self.sample.branches.needs_routes and self.model.tread_config is None:
            raise ConfigError(
                f"sample.guidance_kind is {self.sample.guidance_kind!r} with sample.strong_ratio "
                f"{self.sample.strong_ratio}, which drops tokens, but the model has no routes: set "
                "sample.guidance_kind=cfg and sample.strong_ratio=0, or give model.tread_config."
            )
