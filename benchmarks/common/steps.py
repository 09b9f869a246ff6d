"""The product's training step: `Session.step` over a task whose data is on the device.

- The step is that of `tread.training.session`: the schedule, autocast, backward, the gradient norm, fused AdamW, the
  moving average where the work has one. Only reading data and logging are left out.
- Attention's kernel is set for the whole process before anything is compiled, because compiled code keeps the choice.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, KwargsHandler
from torch import Tensor, nn

from benchmarks.common.flops import Flops, count_flops
from benchmarks.common.record import Facts, compared
from benchmarks.common.timing import alternate, clocks, watched
from tread.kernels.attention.kernel import Attention
from tread.kernels.fast import Fast
from tread.kernels.graphs import CALLS
from tread.routing.handle import Handle
from tread.training.loop import settling
from tread.training.session import Session
from tread.training.settings import (
    CheckpointConfig,
    EMAConfig,
    JobConfig,
    LogConfig,
    LoopConfig,
    OptimizerConfig,
    OptimizerName,
)

WARM_STEPS = 2 + CALLS


@dataclass(kw_only=True)
class Work:
    """What the loop trains: `loss_of(model, batch, step)` on batches that lie on the device."""

    model: nn.Module
    handle: Handle
    batch: Any
    loss_of: Callable[[nn.Module, Any, int], Tensor]
    fast: Callable[[], Fast]
    """Compiles the model as the product does."""
    step: int = 0
    """Losses computed so far."""

    @property
    def routing(self) -> list[Handle]:
        return [self.handle]

    def make_fast(self) -> list[Fast]:
        return [self.fast()]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.step += 1
        return self.loss_of(model, batch, self.step)


class BenchmarkJob(JobConfig):
    """A job without advice: what fails in a benchmark is looked into."""

    @property
    def memory_advice(self) -> str:
        return ""

    @property
    def divergence_advice(self) -> str:
        return ""

    def resume_command(self, folder: Path) -> str:
        return ""


def job_config(
    *,
    batch_size: int,
    autocast: bool,
    compiled: bool,
    attention: Attention,
    graphs: bool,
    ema: bool,
    optimizer: OptimizerName = "adamw",
) -> JobConfig:
    """The sections the loop reads."""
    return BenchmarkJob(
        output_dir="runs/benchmark",
        resume=None,
        train=LoopConfig(
            steps=1_000_000,
            batch_size=batch_size,
            micro_steps=1,
            seed=0,
            precision="bf16" if autocast else "float32",
            compile=compiled,
            attention=attention,
            graphs=graphs,
        ),
        optimizer=OptimizerConfig(
            name=optimizer,
            learning_rate=1e-4,
            schedule="constant",
            warmup_steps=0,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            clip=1.0,
        ),
        ema=EMAConfig(decay=0.9999, warmup=10) if ema else None,
        checkpoint=CheckpointConfig(every=1_000_000, keep=1),
        log=LogConfig(every=100, trackers="none", project="benchmark"),
    )


@contextmanager
def stepping(work: Work, config: JobConfig, device: torch.device) -> Iterator["Steps"]:
    """The session of a `Work`; its model is restored afterwards, for another session."""
    reset_accelerate()
    precision = "bf16" if config.train.precision == "bf16" else "no"
    handlers: list[KwargsHandler] = [AutocastKwargs(cache_enabled=False)]  # as the product has it
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision, kwargs_handlers=handlers)
    session = Session(work, config, accelerator)  # pyright: ignore[reportArgumentType]
    try:
        with settling() as settle:
            yield Steps(work, session, settle)
    finally:
        session.optimizer.zero_grad(set_to_none=True)
        for fast in session.fast:
            fast.remove()
        torch._dynamo.reset()
        for name in ("forward", "_original_forward", "_is_accelerate_prepared"):  # accelerate's autocast around forward
            work.model.__dict__.pop(name, None)
        reset_accelerate()


def reset_accelerate() -> None:
    """Reset accelerate's state, so that this process can create an Accelerator of another precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Steps:
    """Dense and routed steps of one session."""

    def __init__(self, work: Work, session: Session, settle: Callable[[], None]) -> None:
        self.work, self.session, self._settle = work, session, settle
        self.device = session.accelerator.device
        self._batches = cycle([work.batch])
        self._done = 0
        self._kinds = {"routed": self.routed, "dense": self.dense}
        self._alone: dict[str, dict[str, float | None]] = {}
        self.flops: dict[str, Flops] = {}
        """FLOPs of `dense` and `routed` steps; filled by `compare`."""

    def routed(self) -> dict[str, Tensor]:
        """One training step, routed."""
        self._done += 1
        return self.session.step(self._done, self._batches)

    def dense(self) -> dict[str, Tensor]:
        """One training step with all tokens in all layers."""
        with self.work.handle.dense():
            return self.routed()

    def warm_up(self, count: int = WARM_STEPS) -> Facts:
        """Compile, choose kernels and allocate; then measure one dense and one routed step with `watched`.

        Routed steps come first: the graphs of dense ones need more memory, and share it.
        """
        start = time.monotonic()
        for name, step in self._kinds.items():
            for _ in range(count):
                step()
            self._alone[name] = watched(step, self.device, graphs=self.session.config.train.graphs)
        if any(fast.failed for fast in self.session.fast):
            raise RuntimeError("compiling or capturing failed (see above): a slower figure would stand for it")
        self._settle()
        return {"warm_up_seconds": round(time.monotonic() - start, 1), "compiler_caches": cache_counts()}

    def compare(
        self, *, seconds: float, warm_steps: int = WARM_STEPS, rounds: int = 3, images: int | None = None
    ) -> Facts:
        """Time dense and routed steps and compare with their FLOPs; with `images`, the batch, also images per second.

        FLOPs are counted on eager steps first, before CUDA graphs hold the memory that those need.
        """
        flops = self.flops = {name: count_flops(step, self.device) for name, step in self._kinds.items()}
        facts = self.warm_up(warm_steps)
        times = alternate(self._kinds, self.device, seconds=seconds, rounds=rounds)
        seen = clocks()
        found: dict[str, Facts] = {}
        for name, timing in times.items():
            found[name] = asdict(timing) | self._alone[name]
            if images is not None:
                found[name]["images_per_second"] = round(images * 1e3 / timing.median_ms, 1)
        return (
            facts
            | {"clocks": seen}
            | compared(found["dense"], found["routed"], flops["dense"].total, flops["routed"].total)
        )


def compile_options(mode: str, device: torch.device) -> dict[str, Any]:
    """Arguments of `compile`; on CPUs `aot_eager`, which traces without code generation, in seconds."""
    if device.type != "cuda":
        return {"backend": "aot_eager"}
    return {} if mode == "default" else {"mode": mode}


def cache_counts() -> dict[str, int]:
    """Hits and misses of the compiler's disk caches in this process."""
    counters = torch._dynamo.utils.counters
    counts = {**counters["aot_autograd"], **counters["inductor"]}
    return {name: count for name, count in counts.items() if name.endswith(("cache_hit", "cache_miss"))}
