"""The settings of `tread train`: types, defaults and documentation of every field.

`configs/config.yaml`, `tread train --help` and docs/settings.md are generated from here. Checks that need the model or
the data are made where those are built.
"""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tread.config.schema import at_least
from tread.errors import ConfigError
from tread.kernels.checkpointing import Checkpointing
from tread.kernels.float8 import Float8
from tread.objectives import OBJECTIVES
from tread.routing.plan import RoutePlan
from tread.sampling.guidance import Branches
from tread.sampling.guidance.fields import check_interval
from tread.sampling.solvers import churn_of
from tread.training.settings import CheckpointConfig, EMAConfig, JobConfig, LogConfig, LoopConfig, OptimizerConfig

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A class-conditional diffusion transformer; with routes (model=tread) or all tokens in all layers (model=dit)."""

    name: Literal["tread", "dit"] = "tread"
    """tread (half the tokens skip layers 2..-4, the paper's best placement) | dit (dense)"""
    size: str = "tiny"
    """tiny | S/2 ... XL/8 | modern-<any of them>; each setting below changes one thing about it"""
    patch: int | None = None
    """pixels or latents on a side of a token"""
    depth: int | None = None
    """layers"""
    width: int | None = None
    """size of a token"""
    heads: int | None = None
    """attention heads"""
    mlp_ratio: float | None = None
    """width of the MLP over that of the token"""
    rope: bool | None = None
    """rotary positions beside the fixed ones"""
    qk_norm: bool | None = None
    """normalise queries and keys"""
    norm: Literal["layer", "rms"] | None = None
    """layer | rms"""
    mlp: Literal["gelu", "swiglu"] | None = None
    """gelu | swiglu"""
    weights: str | None = None
    """facebookresearch/DiT's weights to start from: .safetensors, .pt, or a checkpoint of its train.py"""
    tread_config: dict[str, Any] | str | None = None
    """the routes: a mapping, a preset such as paper, or a JSON or YAML file; null: dense"""

    def __post_init__(self) -> None:
        if self.tread_config is not None:
            RoutePlan.from_config(self.tread_config)

    def overrides(self) -> dict[str, Any]:
        """The settings that differ from those of the size."""
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None and name not in ("name", "size", "weights", "tread_config")
        }


MODELS: dict[str, dict[str, Any]] = {
    "tread": {
        "tread_config": {
            "routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}],
            "selector": "random",
            "importance": None,
            "seed": None,
            "schedule": None,
        }
    },
    "dit": {"tread_config": None},
}
"""The defaults of `model=NAME`, beside those of the fields."""
ROUTE_DOCS = {
    "selection_ratio": "the fraction dropped",
    "start_layer_idx": "inclusive, from 0",
    "end_layer_idx": "inclusive, negative from the end",
    "selector": "random (the paper) | l1 (prefer tokens with a large L1 norm)",
    "importance": "with l1: 0 (all chance) .. 1 (all importance); null: 0.5",
    "seed": "of the selections, together with train.seed; null: 42",
    "schedule": "{warmup_steps: 500, cooldown_fraction: 0.1, levels: 4}",
}
"""Key of a tread_config -> its description in the reference of settings."""


@dataclass(frozen=True, kw_only=True)
class PretrainLoopConfig(LoopConfig):
    """How long to train, on which batches, and how a step is computed."""

    epochs: int | None = None
    """passes over the training data, in place of train.steps; null: train.steps"""
    float8: Float8 | None = None
    """rowwise | tensorwise: products of wide linears (sides from 512) in float8; Ada and Hopper GPUs"""
    checkpointing: Checkpointing = False
    """true: recompute activations in backward, less memory for a third more time; selective: only cheap ones; dense: \
all, in steps that drop fewer tokens than tread_config says"""
    class_dropout: float = 0.1
    """share of labels replaced by the null class, for classifier-free guidance"""
    workers: int = 0
    """data-loading processes per training process"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "train", workers=0, epochs=1)
        if not 0 <= self.class_dropout < 1:
            raise ConfigError(f"train.class_dropout is {self.class_dropout}; allowed is 0 <= value < 1.")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """The loss of the averaged weights, all tokens, fixed noise, on data held out from training."""

    every: int = 500
    """steps; 0: never"""
    samples: int = 256
    """samples held out of the training data"""

    def __post_init__(self) -> None:
        at_least(self, "validation", every=0, samples=0)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Grids drawn while training, and the defaults of `tread sample`."""

    every: int = 500
    """steps; 0: never"""
    per_class: int = 4
    """images per class"""
    classes: int = 10
    """grids show at most this many classes"""
    steps: int = 40
    """solver steps"""
    solver: Literal["euler", "heun"] | None = None
    """euler | heun; null: the objective's own"""
    churn: float = 0.0
    """EDM's S_churn: fresh noise added along the way, with objective=edm and heun; 0: none"""
    churn_interval: tuple[float, float] | None = None
    """[S_tmin, S_tmax]: add it only at these levels"""
    churn_noise: float = 1.0
    """EDM's S_noise: standard deviation of the fresh noise"""
    guidance: float = 1.5
    """guidance scale; 1: none"""
    interval: tuple[float, float] | None = None
    """[low, high] in the objective's levels: guide only between them"""
    guidance_kind: Literal["cfg", "sg", "cfg+sg"] = "cfg"
    """what the weak branch lacks: its label (cfg), tokens (sg), both (cfg+sg)"""
    strong_ratio: float = 0.0
    """tokens the strong branch drops"""
    weak_ratio: float | None = None
    """tokens the weak branch drops, with sg; null: 0.7"""
    ratio_schedule: Literal["constant", "cosine"] = "constant"
    """constant, or cosine: both ratios fall to 0 over the solver's steps"""
    vae: str | None = None
    """autoencoder (folder or hub id) of data=latents; null: grids show latent channels"""
    seed: int = 0
    """of the noise"""

    def __post_init__(self) -> None:
        at_least(self, "sample", every=0, per_class=1, classes=1, steps=1, guidance=0, seed=0, churn=0, churn_noise=0)
        check_interval(self.interval, "sample.interval")
        check_interval(self.churn_interval, "sample.churn_interval")
        _ = self.branches  # refuses ratios that do not go together

    @property
    def drawing(self) -> dict[str, Any]:
        """The arguments of `generate` that are settings here, but for the guidance scale."""
        names = ("seed", "steps", "solver", "branches", "interval")
        churn = churn_of(self.churn, self.churn_interval, self.churn_noise)
        return {name: getattr(self, name) for name in names} | {"churn": churn}

    @property
    def branches(self) -> Branches:
        """The two branches that guidance compares."""
        return Branches(
            kind=self.guidance_kind,
            strong_ratio=self.strong_ratio,
            weak_ratio=self.weak_ratio,
            schedule=self.ratio_schedule,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Figures of the averaged weights' samples, as `tread eval` takes them; drawn as `sample` says."""

    every: int = 0
    """steps, and at the last one; 0: never"""
    samples: int = 10000
    """over all processes together; labels and noise are fixed by index"""
    reference: str | None = None
    """a folder, .tar or .npz, as `tread eval --ref`; null: the training data"""
    features: str = "inception"
    """inception (FID) | efflite0 | dinov2"""
    weights: str | None = None
    """the extractor's weights: a file or URL; null: those in the cache folder"""
    guidance: float | tuple[float, ...] = 1.0
    """guidance scale, or a list of them, each drawn and reported on its own; 1: none"""
    batch_size: int = 64
    """images drawn and measured together, on each process"""
    frechet_only: bool = True
    """false: precision, recall and the kernel distance too; keeps every feature in memory"""

    def __post_init__(self) -> None:
        at_least(self, "evaluate", every=0, samples=2, batch_size=1)
        if not self.scales or min(self.scales) < 0 or len({f"{scale:g}" for scale in self.scales}) < len(self.scales):
            given = list(self.guidance) if isinstance(self.guidance, tuple) else self.guidance
            raise ConfigError(
                f"evaluate.guidance is {given}; it must be a scale of at least 0, or a list of different ones."
            )

    @property
    def scales(self) -> tuple[float, ...]:
        """The guidance scales to evaluate at."""
        return self.guidance if isinstance(self.guidance, tuple) else (self.guidance,)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(JobConfig):
    """Everything `tread train` reads; `config.compose` makes it."""

    output_dir: str = AUTO
    """the folder of the run: checkpoints, metrics, grids, settings; auto: runs/MODEL-DATA"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: dict[str, Any]
    """The dataset and the arguments of its class."""
    objective: dict[str, Any]
    """The objective and its fields."""
    train: PretrainLoopConfig = field(default_factory=PretrainLoopConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.output_dir.strip():
            raise ConfigError("output_dir is empty; name a folder, or write '.' for the working directory.")
        scales = [("sample.guidance", self.sample.guidance)]
        if self.evaluate.every > 0:
            scales += [("evaluate.guidance", scale) for scale in self.evaluate.scales]
        for name, scale in scales:
            if scale != 1 and self.train.class_dropout == 0 and self.sample.branches.needs_null_label:
                raise ConfigError(
                    f"{name} is {scale}, but train.class_dropout is 0, so the null class that guidance needs is never "
                    f"trained: set {name}=1, or drop some labels."
                )
        objective = str(self.objective["name"])
        solver = self.sample.solver or OBJECTIVES[objective].default_solver
        if self.sample.churn and (objective, solver) != ("edm", "heun"):
            raise ConfigError(
                f"sample.churn is {self.sample.churn}, but it needs objective=edm with the solver heun, and this run "
                f"has {objective} with {solver}: set sample.churn=0."
            )
        if self.sample.branches.needs_routes and self.model.tread_config is None:
            raise ConfigError(
                f"sample.guidance_kind is {self.sample.guidance_kind!r} with sample.strong_ratio "
                f"{self.sample.strong_ratio}, which drops tokens, but the model has no routes: set "
                "sample.guidance_kind=cfg and sample.strong_ratio=0, or give model.tread_config."
            )

    def with_steps(self, samples: int) -> "PretrainConfig":
        """The config with train.epochs over `samples` training samples converted to train.steps."""
        train = self.train
        if train.epochs is None:
            return self
        # a batch may span two epochs; the last one is filled from the epoch after it
        return replace(self, train=replace(train, steps=-(-train.epochs * samples // train.batch_size), epochs=None))

    @property
    def memory_advice(self) -> str:
        graphs = "Set train.graphs=false, for graphs keep memory of their own. " if self.train.graphs else ""
        return (
            f"{graphs}Raise train.micro_steps (smaller forwards, the same batch), set train.checkpointing=true, lower "
            "train.batch_size, or drop more tokens."
        )

    @property
    def divergence_advice(self) -> str:
        again = "continue with resume=latest" if self.checkpoint.every else "train again"
        return f"Lower optimizer.learning_rate, set optimizer.clip or train.precision=float32, and {again}."

    def called(self, setting: str) -> str:
        return {"checkpoint.data_changed": "data.changed"}.get(setting, setting)

    def resume_command(self, folder: Path) -> str:
        return shlex.join(["tread", "train", f"resume={folder}"])
