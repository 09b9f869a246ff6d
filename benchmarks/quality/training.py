"""One timed run: the product's task and session, evaluated at its stops.

- The product's `Pretraining` with two changes: images are on the device, and the test images are held out.
- Only training counts as time. Compilation happens before the first step, on gradients that are discarded; validation
  and sampling stop the clock. The device is synchronised every `check_steps` steps and nowhere else.
- Memory is measured in the first chunk, before sampling reserves any.
- Stops are times and steps; the chunk before one is cut so that it ends there.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from benchmarks.common.steps import WARM_STEPS
from tread.data import DATASETS, Order, Readable, StepSampler
from tread.data.readable import SKIPPED_FILE
from tread.kernels.fast import Fast
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Batch, Pretraining
from tread.training.session import Session

from .arms import Scale
from .images import Cifar10, centred


class Trial(Pretraining):
    """The pretraining task with its images on the device."""

    dataset: Cifar10

    def __init__(self, config: PretrainConfig, accelerator: Accelerator, folder: Path, scale: Scale) -> None:
        DATASETS["cifar10"] = Cifar10  # registered temporarily: it is not a dataset of the product
        try:
            super().__init__(config, accelerator, folder)
        finally:
            del DATASETS["cifar10"]
        trained, held_out = self.dataset.trained, min(self.dataset.held_out, scale.validated)
        self.train_set, self.held_out = (
            Readable(self.dataset, part, folder / SKIPPED_FILE)
            for part in (range(trained), range(trained, trained + held_out))
        )
        self.pixels = self.dataset.pixels[:trained].to(accelerator.device)  # (N, 3, H, W)
        self.labels = self.dataset.classes_of[:trained].to(accelerator.device)  # (N,)

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Batches in the product's order."""
        train = self.config.train
        sampler = StepSampler(
            Order(len(self.train_set), train.seed),
            batch=train.batch_size,
            micro_steps=train.micro_steps,
            rank=0,
            world=1,
            start_step=start_step,
            steps=train.steps,
        )
        for visits in sampler:
            chosen, positions = torch.tensor(visits).T.to(self.pixels.device, non_blocking=True)  # (B,) each
            yield Batch(centred(self.pixels[chosen]), self.labels[chosen], positions)

    def loss_by_time(self) -> list[float]:
        """The mean validation loss in each quarter of the times, from the least noise to the most."""
        parts = list(self.validation_losses())
        u, losses = (torch.cat(part).double() for part in zip(*parts, strict=True))  # (N,)
        return [float(losses[(4 * u).long() == quarter].mean()) for quarter in range(4)]


@dataclass
class Clock:
    """Seconds of training, the steps done in them, and the most memory that the first of them took."""

    device: torch.device
    seconds: float = 0.0
    step: int = 0
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    """The mean loss of each chunk."""

    def train(
        self, session: Session, batches: Iterator[Any], count: int, rate: Callable[[int], float] | None = None
    ) -> float:
        """Run `count` steps, at the learning rate of each step or at the session's; returns the seconds of one."""
        cuda, first = self.device.type == "cuda", self.step == 0
        if cuda and first:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        steps = range(self.step, self.step + count)
        losses = [session.step(step, batches, rate=rate and rate(step))["loss"] for step in steps]
        if cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        self.seconds, self.step = self.seconds + took, self.step + count
        if cuda and first:
            self.peak_bytes = torch.cuda.max_memory_reserved()  # the pools of CUDA graphs are not counted as allocated
        self.losses.append(float(torch.stack(losses).mean()))
        return took / count


@dataclass(frozen=True, kw_only=True)
class Stops:
    """When a run is evaluated: `seconds` or `steps` end it, the other stops come before."""

    seconds: float
    steps: int | None
    """Replaces `seconds` if a run must know its end in advance."""
    marks: tuple[float, ...]
    """Seconds."""
    equal_steps: int | None
    """The final step of the dense run."""


Look = Callable[[str, float | None], None]
"""Called with the clock stopped: with `mark`, `equal-steps`, `end` or `annealed`, and the seconds that were due."""


def race(session: Session, clock: Clock, stops: Stops, scale: Scale, look: Look, validate: Callable[[], None]) -> None:
    """Train to the end of a run, calling `look` at each of its stops."""
    batches = session.task.batches(0)
    marks, validations, per_step = sorted(stops.marks), 0, 0.0
    equal = stops.equal_steps
    while not _ended(clock, stops, per_step):
        next_validation = (validations + 1) * scale.validate_seconds
        ahead = [next_validation, *marks[:1]] + ([] if stops.steps is not None else [stops.seconds])
        count = scale.check_steps if per_step else min(scale.check_steps, 10)
        if per_step:
            count = min(count, *(max(1, round((at - clock.seconds) / per_step)) for at in ahead))
        count = min([count, *(at - clock.step for at in (stops.steps, equal) if at is not None and at > clock.step)])
        per_step = clock.train(session, batches, count)
        half = per_step / 2
        if clock.seconds + half >= next_validation:
            validations = int((clock.seconds + half) // scale.validate_seconds)
            validate()
        if marks and clock.seconds + half >= marks[0] and not _ended(clock, stops, per_step):
            look("mark", marks.pop(0))
        if clock.step == equal and not _ended(clock, stops, per_step):
            look("equal-steps", None)
    look("end", stops.seconds)


def anneal(session: Session, clock: Clock, seconds: float, scale: Scale) -> None:
    """Train on, for as many steps as took `seconds` so far, while the rate falls linearly to zero.

    The moving average ends here: it would lag behind weights that settle by themselves.
    """
    session.ema = None
    first, full = clock.step, session.config.optimizer.learning_rate
    steps = max(1, round(seconds * clock.step / clock.seconds))
    batches = session.task.batches(first)
    while left := first + steps - clock.step:
        count = min(scale.check_steps, left)
        clock.train(session, batches, count, lambda step: full * (first + steps - step) / steps)


def _ended(clock: Clock, stops: Stops, per_step: float) -> bool:
    if stops.steps is not None:
        return clock.step >= stops.steps
    return clock.step > 0 and clock.seconds + per_step / 2 >= stops.seconds


def warm_up(session: Session, task: Trial) -> float:
    """Compile and allocate for a training step, routed and dense, and capture its graphs; nothing is learned.

    Returns the seconds taken.
    """
    start = time.perf_counter()
    batches = task.batches(0)
    kinds: list[Callable[[], AbstractContextManager[Any]]] = [nullcontext]
    if task.handle is not None and task.handle.plan.schedule is not None:
        kinds.append(task.handle.dense)
    for kind in kinds:
        for _ in range(WARM_STEPS):
            for handle in task.routing:
                handle.set_step(0)
            batch = next(batches)
            with session.accelerator.autocast(), kind():
                loss = task.loss(session.model, batch)
            session.accelerator.backward(loss)
            del loss
            session.optimizer.zero_grad(set_to_none=True)
    if task.pixels.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def check_fast(fast: Sequence[Fast]) -> None:
    """Raise if compilation or capture failed: the product falls back to eager, but a timing must not."""
    if any(one.failed for one in fast):
        raise RuntimeError("compiling or capturing failed (see above): a run without it compares with none")


def save_average(session: Session, path: Path) -> None:
    """Save the averaged weights, for guidance later."""
    assert session.ema is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in session.ema.averages.items()}, path)
