"""The settings that the training loop reads, the same for every job.

- `JobConfig` is the loop's view of a job. `tread train` extends it; `tread finetune` fills it from its flat keys.
- Each field holds its type, its default and its documentation; bounds are checked here.
- Messages name settings as the user of the job knows them: `JobConfig.called`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch

from tread.config.schema import at_least
from tread.errors import ConfigError
from tread.kernels.attention.kernel import Attention
from tread.kernels.compiling import Switch

Parallel = Literal["ddp", "fsdp", "hsdp"]
OptimizerName = Literal[
    "adamw", "adamw-8bit", "adamw-bf16", "adamw-schedule-free", "lion", "lion-8bit", "prodigy", "muon", "adafactor"
]
ScheduleName = Literal["constant", "linear", "cosine", "polynomial", "cosine_with_restarts"]
LONGEST_WAIT = 7 * 24 * 60
"""Largest timeout, in minutes, for which a process may wait for the others."""
LEAST_PRODIGY = 0.01
"""Smallest allowed factor on Prodigy's estimate; learning rates of other optimizers are far below it."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, on which batches, and how a step is computed."""

    steps: int = 2000
    """optimizer steps"""
    batch_size: int = 32
    """samples per optimizer step, over all processes and micro-steps together"""
    micro_steps: int = 1
    """gradient accumulation: forwards and backwards per optimizer step"""
    seed: int = 0
    """weights, data order, noise and selections are pure functions of it"""
    precision: Literal["auto", "bf16", "bf16-stream", "float32"] = "auto"
    """auto (bf16 on a GPU, float32 on a CPU) | bf16 | bf16-stream (tokens between layers too) | float32"""
    compile: Switch = "auto"
    """auto (on a GPU) | true | false: compile each block, which takes a minute at the start"""
    attention: Attention = "auto"
    """the kernel: auto (the fastest that fits) | flash | cudnn | efficient | math | default (torch's choice)"""
    graphs: bool = False
    """run the network as CUDA graphs, for steps that are bound by the host; needs exactly one GPU"""
    parallel: Parallel = "ddp"
    """ddp (each process has the whole model) | fsdp (a shard of weights, average and moments) | hsdp (in groups)"""
    shard_size: int | None = None
    """hsdp: processes that share one copy of the weights; null: those of one machine"""
    cpu_offload: bool = False
    """fsdp, hsdp: shards live in host memory and are copied to the GPU layer by layer, much slower"""
    timeout_minutes: float = 30.0
    """how long a process waits for the others, at the start and in a step, before it ends with an error"""

    def __post_init__(self) -> None:
        at_least(self, "train", steps=1, batch_size=1, micro_steps=1, seed=0, shard_size=1)
        check_timeout(self.timeout_minutes, "train.timeout_minutes")

    @property
    def bf16(self) -> bool:
        """Whether forwards run under bf16 autocast on this machine."""
        return torch.cuda.is_available() if self.precision == "auto" else self.precision != "float32"

    @property
    def sharded(self) -> bool:
        """Whether each process holds a shard of the weights alone."""
        return self.parallel != "ddp"

    @property
    def timeout(self) -> timedelta:
        """How long a process waits for the others."""
        return timedelta(minutes=self.timeout_minutes)


def check_timeout(minutes: float, called: str) -> None:
    """Refuse a timeout that is not positive, or that torch cannot count in milliseconds."""
    if not 0 < minutes <= LONGEST_WAIT:
        raise ConfigError(f"{called} is {minutes}; it must be above 0 and at most {LONGEST_WAIT} (a week).")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: OptimizerName = "adamw"
    """adamw | adamw-8bit | adamw-bf16 | adamw-schedule-free | lion | lion-8bit | prodigy | muon | adafactor"""
    learning_rate: float = 3e-3
    """for the tiny model on the digits; the paper has 1e-4 for S/2 to XL/2"""
    schedule: ScheduleName = "constant"
    """constant, or down to end_rate after the warm-up: linear | cosine | polynomial | cosine_with_restarts"""
    end_rate: float = 0.0
    """the rate that a schedule ends at"""
    power: float = 1.0
    """polynomial falls with (1 - step / steps) to this power, both counted from the end of the warm-up"""
    cycles: int = 1
    """how often cosine_with_restarts falls, each time from the full rate"""
    warmup_steps: int = 100
    """steps over which the rate climbs linearly from 0"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay of the two moments"""
    eps: float = 1e-8
    """added to the denominator of adamw's and prodigy's updates; lion and adafactor have none"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    clip: float | None = 1.0
    """largest gradient norm; null: no clipping"""

    def __post_init__(self) -> None:
        at_least(self, "optimizer", learning_rate=0, warmup_steps=0, weight_decay=0, end_rate=0, cycles=1)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {list(self.betas)}; it must be two numbers with 0 <= value < 1.")
        check_rates(
            name=self.name,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            end_rate=self.end_rate,
            power=self.power,
            cycles=self.cycles,
            beta1=self.betas[0],
            called={**{name: f"optimizer.{name}" for name in vars(self)}, "beta1": "optimizer.betas[0]"},
        )
        if self.eps <= 0:
            raise ConfigError(f"optimizer.eps is {self.eps}; it must be above 0, or an update divides by 0.")
        if self.clip is not None and self.clip <= 0:
            raise ConfigError(f"optimizer.clip is {self.clip}; it must be above 0, or null for no clipping.")


def check_rates(
    *,
    name: str,
    learning_rate: float,
    schedule: str,
    end_rate: float,
    power: float,
    cycles: int,
    beta1: float,
    called: Mapping[str, str],
) -> None:
    """Refuse settings of an optimizer's rate that contradict each other; `called` has the user's name for each."""
    optimizer, rate, schedule_name = called["name"], called["learning_rate"], called["schedule"]
    if name == "prodigy" and learning_rate < LEAST_PRODIGY:
        raise ConfigError(
            f"{optimizer} is 'prodigy' and {rate} is {learning_rate}, but prodigy estimates the rate by itself and "
            f"multiplies it by {rate}: set {rate} to 1 (it must be at least {LEAST_PRODIGY})."
        )
    if name == "adamw-schedule-free" and schedule != "constant":
        raise ConfigError(
            f"{optimizer} is 'adamw-schedule-free' and {schedule_name} is {schedule!r}, but its average replaces a "
            f"decay: set {schedule_name} to 'constant'."
        )
    if name == "adamw-schedule-free" and beta1 == 0:
        raise ConfigError(
            f"{called['beta1']} is 0, but adamw-schedule-free evaluates by dividing by it: set it above 0, e.g. 0.9."
        )
    if end_rate and schedule == "constant":
        raise ConfigError(
            f"{called['end_rate']} is {end_rate}, but {schedule_name} is 'constant', which does not fall: choose "
            f"another {schedule_name}, or leave {called['end_rate']} out."
        )
    if end_rate > learning_rate:
        raise ConfigError(
            f"{called['end_rate']} is {end_rate}, above {rate} {learning_rate}, but schedules fall: set it to at most "
            f"{rate}."
        )
    if power <= 0:
        raise ConfigError(f"{called['power']} is {power}; it must be above 0.")
    for setting, value, only in (("power", power, "polynomial"), ("cycles", cycles, "cosine_with_restarts")):
        if value != 1 and schedule != only:
            raise ConfigError(
                f"{called[setting]} is {value}, but {schedule_name} is {schedule!r}, and only {only!r} reads it: leave "
                f"it out, or set {schedule_name} to {only!r}."
            )


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """A moving average of the weights."""

    decay: float = 0.9999
    """the ceiling; short runs stay below it through the warm-up"""
    warmup: int = 10
    """the decay at update n is min(decay, (1 + n) / (warmup + n))"""

    def __post_init__(self) -> None:
        at_least(self, "ema", warmup=1)
        if not 0 <= self.decay < 1:
            raise ConfigError(f"ema.decay is {self.decay}; allowed is 0 <= value < 1.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    every: int = 1000
    """steps, and at the last one; 0: never, so the run can be neither resumed nor sampled from"""
    keep: int = 3
    """newest checkpoints kept on disk"""
    keep_best: bool = False
    """keep the one of the lowest validation loss too, of those that were validated at their step"""
    data_changed: Literal["refuse", "accept"] = "refuse"
    """accept (data.changed=accept): resume although the data is not what it was; for one resume, not kept"""

    def __post_init__(self) -> None:
        at_least(self, "checkpoint", every=0, keep=1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Progress bar, metrics and trackers."""

    every: int = 50
    """steps between updates of the progress bar and the metrics"""
    trackers: Literal["auto", "none", "tensorboard", "wandb"] = "auto"
    """auto (TensorBoard, if installed) | none | tensorboard | wandb"""
    project: str = "tread"
    """the wandb project"""
    run: str | None = None
    """the name of the run there; null: that of output_dir"""

    def __post_init__(self) -> None:
        at_least(self, "log", every=1)


@dataclass(frozen=True, kw_only=True)
class JobConfig(ABC):
    """The settings that every job has; the loop reads no others."""

    output_dir: str
    """the folder of the run: checkpoints, metrics, pictures, the settings"""
    resume: str | None = None
    """latest (the newest checkpoint in output_dir) or the folder of a run"""
    train: LoopConfig
    optimizer: OptimizerConfig
    ema: EMAConfig | None
    checkpoint: CheckpointConfig
    log: LogConfig

    @property
    def resumed(self) -> Path | None:
        """The folder of the run to resume; None for a new run."""
        return None if self.resume is None else Path(self.output_dir if self.resume == "latest" else self.resume)

    def called(self, setting: str) -> str:
        """The name under which the user of this job knows a setting of the loop, such as `train.steps`."""
        return setting

    @property
    @abstractmethod
    def memory_advice(self) -> str:
        """The advice in the error about exhausted memory."""

    @property
    @abstractmethod
    def divergence_advice(self) -> str:
        """The advice in the error about a loss that is not finite."""

    @abstractmethod
    def resume_command(self, folder: Path) -> str:
        """The command that continues a stopped run."""
