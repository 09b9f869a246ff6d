"""A trial of a task: predictions compared, then a dense and a routed step, for `tread doctor`.

- Predictions are compared eager, in eval mode, on one batch: the stock model, the same model with routing turned off,
  and routed with every token kept in another order. The last one runs the whole machinery of routing (gathered rope
  tables, masks and modulation, restored tokens), and must give the stock prediction up to rounding if all of it follows
  the tokens.
- Steps are those of the training loop: forward, backward, clipping, optimizer and average, compiled as the settings
  say. A step is timed after others like it, so that nothing is compiled in it.
- All steps use one batch, at the first step of the run after the ratio's warm-up. Nothing is written.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from tread.eval_mode import evaluating
from tread.routing.handle import Handle
from tread.training.session import Session
from tread.training.task import Task

TOLERANCE = {"bf16": 1e-2, "no": 1e-4}
"""Largest relative difference of two predictions that should be equal, by the autocast precision."""
WARM_UPS = {"cuda": 3}
"""Steps before the timed one: the first compiles, the third captures a CUDA graph; 1 on other devices."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between a prediction and the stock model's."""

    what: str
    """The mode of the prediction, such as "attached, dense"."""
    beside: str = "stock"
    """The model it is compared with: stock, or quantized where routing is judged on a quantized base."""
    difference: float
    """Norm of the difference over the norm of the other prediction; NaN if either is not finite."""
    limit: float | None
    """The largest difference allowed; None where a difference is expected, as after quantizing."""

    @property
    def fits(self) -> bool:
        """Whether the difference is finite and within its limit."""
        return math.isfinite(self.difference) and (self.limit is None or self.difference <= self.limit)

    @property
    def problem(self) -> str:
        """The end of a sentence about a prediction that does not fit."""
        if not math.isfinite(self.difference):
            return "is not finite"
        return f"differs from the {self.beside} model's by {self.difference:.1e}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures of a few training steps, dense or routed."""

    loss: float
    """Loss of the first step, before the weights changed."""
    gradient_norm: float
    """Gradient norm of the first step."""
    finite: bool
    """Whether loss and gradient norm were finite in every step."""
    seconds: float
    """Time of the last step."""
    peak_bytes: int | None
    """Peak GPU memory of the last step; None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The outcome for one network."""

    part: str
    comparisons: Sequence[Comparison]
    eager_loss: float | None = None
    """Loss of the dense network before it was compiled."""
    dense: Measured | None = None
    """None if a prediction is wrong: then no step is run."""
    routed: Measured | None = None
    """None if the config has no routes, or if a prediction is wrong."""
    tokens: int | None = None
    kept: Sequence[int] = ()
    """Tokens that each route kept in the routed step, of `tokens`."""
    kept_share: float | None = None
    flop_ratio: float | None = None
    """Dense over routed FLOPs of a forward."""

    @property
    def problems(self) -> list[str]:
        """The problems found, one clause each; empty if there are none."""
        problems = [
            f"the {self.part}'s prediction {one.what} {one.problem}" for one in self.comparisons if not one.fits
        ]
        steps = {"dense": self.dense, "routed": self.routed}
        return problems + [
            f"the {name} step of the {self.part} is not finite"
            for name, step in steps.items()
            if step is not None and not step.finite
        ]


class _Recorder(nn.Module):
    """Calls a network and keeps its outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.outputs: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs = self.network(*args, **kwargs)
        return self.outputs


@torch.no_grad()
def predict(task: Task, accelerator: Accelerator, batch: Any) -> tuple[Tensor, float]:
    """The network's outputs for a batch in eval mode, flattened to float32 (N,), and the loss."""
    recorder = _Recorder(task.model)
    with evaluating(task.model), accelerator.autocast():
        loss = task.loss(recorder, batch)
    tensors = [leaf for leaf in pytree.tree_leaves(recorder.outputs) if isinstance(leaf, Tensor)]
    return torch.cat([tensor.float().flatten() for tensor in tensors]), float(loss)


def compare(what: str, prediction: Tensor, other: Tensor, limit: float | None, *, beside: str = "stock") -> Comparison:
    """The relative difference of two predictions (N,); `what` and `beside` are as in `Comparison`."""
    difference = float((prediction - other).norm() / other.norm().clamp(min=1e-12))
    difference = difference if math.isfinite(difference) else math.nan
    return Comparison(what=what, beside=beside, difference=difference, limit=limit)


def compare_routed(
    task: Task, accelerator: Accelerator, batch: Any, other: Tensor, *, beside: str = "stock"
) -> list[Comparison]:
    """The predictions of a task with routes, turned off and with tokens permuted, beside the one without them."""
    limit, handles = TOLERANCE[accelerator.mixed_precision], task.routing
    for handle in handles:
        handle.set_step(full_step(handles))
    with turned(handles, "dense"):
        off, _ = predict(task, accelerator, batch)
    with turned(handles, "permuted"):
        permuted, _ = predict(task, accelerator, batch)
    return [
        compare("attached, dense", off, other, limit, beside=beside),
        compare("routed, tokens permuted", permuted, other, limit, beside=beside),
    ]


def full_step(handles: Sequence[Handle]) -> int:
    """The first step at which no schedule is in its warm-up."""
    schedules = [handle.plan.schedule for handle in handles]
    return max((schedule.warmup_steps for schedule in schedules if schedule is not None), default=0)


@contextmanager
def turned(handles: Sequence[Handle], mode: str) -> Iterator[None]:
    """Inside, forwards are dense, routed, or routed with every token kept in another order (permuted)."""
    with ExitStack() as stack:
        for handle in handles:
            contexts = {"dense": handle.dense, "routed": handle.routed, "permuted": handle.permuted}
            stack.enter_context(contexts[mode]())
        yield


def flop_ratio(handles: Sequence[Handle], forward: Callable[[], object]) -> float:
    """Dense over routed FLOPs of a forward of the eager network at the full ratio; it runs dense, then routed."""
    counts = []
    for mode in ("dense", "routed"):
        for handle in handles:
            handle.set_step(full_step(handles))
        with turned(handles, mode), torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward()
        counts.append(counter.get_total_flops())
    return counts[0] / counts[1]


def eager_figures(task: Task, accelerator: Accelerator, batch: Any) -> tuple[float, float | None]:
    """The loss of the eager network in eval mode, and its `flop_ratio`; None without routes."""

    def forward() -> None:
        with accelerator.autocast():
            task.loss(task.model, batch)

    _, loss = predict(task, accelerator, batch)
    return loss, flop_ratio(task.routing, forward) if task.routing else None


def measure(session: Session, batch: Any, *, dense: bool) -> Measured:
    """Optimizer steps on one batch, the last of them timed."""
    handles, device = session.task.routing, session.accelerator.device
    session.task.model.train()
    figures: list[tuple[float, float]] = []
    seconds, on_gpu = 0.0, device.type == "cuda"
    with ExitStack() as stack:
        if dense:
            stack.enter_context(turned(handles, "dense"))
        for _ in range(WARM_UPS.get(device.type, 1) + 1):
            if on_gpu:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            begin = time.perf_counter()
            values = session.step(full_step(handles), repeat(batch))
            figures.append((float(values["loss"]), float(values["grad_norm"])))  # waits for the device
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begin
    return Measured(
        loss=figures[0][0],
        gradient_norm=figures[0][1],
        finite=all(math.isfinite(value) for pair in figures for value in pair),
        seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )


def try_steps(
    session: Session, batch: Any, part: str, comparisons: Sequence[Comparison], eager_loss: float, flops: float | None
) -> Trial:
    """A dense step, and a routed one if the task has routes."""
    dense = measure(session, batch, dense=True)
    if not session.task.routing:
        return Trial(part=part, comparisons=comparisons, eager_loss=eager_loss, dense=dense)
    routed = measure(session, batch, dense=False)
    handle = session.task.routing[0]  # the handle of the last forward
    return Trial(
        part=part,
        comparisons=comparisons,
        eager_loss=eager_loss,
        dense=dense,
        routed=routed,
        tokens=handle.seen.tokens,
        kept=[selection.shape[1] for selection in handle.selections],
        kept_share=session.kept_share,
        flop_ratio=flops,
    )
