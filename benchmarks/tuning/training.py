"""The plain loop of the experiment: attach, compile, and train for so many seconds.

- Only training counts as time: compiling, capturing and looking are done with the clock stopped.
- A run with a cool-down must know its steps beforehand. So each level of the ratio is timed first, on gradients that
  are thrown away, and the steps follow from the seconds.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import tread
from benchmarks.common.steps import WARM_STEPS
from benchmarks.quality.images import centred, load
from benchmarks.quality.training import check_fast
from tread.attach.attach import Attachment
from tread.data import Order, StepSampler
from tread.kernels.checkpointing import Checkpointing
from tread.objectives.flow import Flow, path_state
from tread.routing import noise
from tread.routing.plan import RoutePlan

from .arms import CLASSES, TUNED, Arm, Scale
from .model import FluxOfClasses

NOISE, TIME, CAPTION, VALIDATION = 1, 2, 3, 4
DROPPED = 0.1
"""Share of captions that are empty, for classifier-free guidance."""
OBJECTIVE = Flow(time="logit-normal")
ENDLESS = 10**7
Batch = tuple[Tensor, Tensor, Tensor]
"""x (B, 3, H, W), labels (B,) and positions (B,)."""


@dataclass(frozen=True)
class Images:
    """uint8 images (N, 3, H, W) and labels (N,) on the device."""

    pixels: Tensor
    labels: Tensor

    @classmethod
    def of(cls, folder: Path, split: str, *, tuned: bool, scale: Scale, device: torch.device) -> "Images":
        """The images of a split that are, or are not, of the tuned classes."""
        pixels, labels = load(folder, split)
        chosen = np.isin(labels, TUNED) == tuned
        images = torch.from_numpy(pixels[chosen]).permute(0, 3, 1, 2)  # (N, 3, H, W)
        if images.shape[-1] != scale.side:
            images = nn.functional.adaptive_avg_pool2d(images.float(), scale.side).round().byte()
        return cls(images.contiguous().to(device), torch.from_numpy(labels[chosen]).long().to(device))

    def batches(self, batch: int, seed: int, start: int = 0) -> Iterator[Batch]:
        """Those of each step, mirrored by chance."""
        sampler = StepSampler(
            Order(len(self.pixels), seed), batch=batch, micro_steps=1, rank=0, world=1, start_step=start, steps=ENDLESS
        )
        for visits in sampler:
            chosen, where = torch.tensor(visits).T.to(self.pixels.device, non_blocking=True)  # (B,) each
            x = centred(self.pixels[chosen])
            mirrored = (noise.uniform(seed, CAPTION, where, 1) < 0.5)[:, None, None, None]
            yield torch.where(mirrored, x.flip(-1), x), self.labels[chosen], where


def losses(net: nn.Module, x: Tensor, labels: Tensor, where: Tensor, u: Tensor, seed: int) -> Tensor:
    """The squared error of the velocity at each pixel, (B, S)."""
    drawn = noise.per_sample_normal(seed, where, x.shape[1:], NOISE)
    t = OBJECTIVE.level(u)
    found = OBJECTIVE.velocity(net, path_state(x, drawn, t), t, labels)
    return (found - (drawn - x)).square().mean(1).flatten(1)


class Run:
    """A model in training: the loop that a user would write, and its clock."""

    def __init__(
        self,
        net: FluxOfClasses,
        plan: RoutePlan,
        data: Images,
        scale: Scale,
        *,
        dense: bool,
        seed: int,
        checkpointing: Checkpointing = False,
    ) -> None:
        self.net, self.data, self.scale, self.dense, self.seed = net, data, scale, dense, seed
        self.device = data.pixels.device
        self.handle: Attachment = tread.attach(net.transformer, plan, seed=seed)
        if scale.compile:
            self.handle.compile(checkpointing=checkpointing)
        self.parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self.optimizer = self._fresh_optimizer()
        self.seconds, self.step = 0.0, 0
        net.train()

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=fused)

    def start_again(self, weights: Sequence[Tensor], plan: RoutePlan, seed: int) -> None:
        """Begin another run: weights are put back in place, because captured graphs read them where they are.

        Graphs hold the seed, so another one is captured anew, before the clock starts.
        """
        if seed != self.seed:
            self.handle.release_graphs()
        self.seed = seed
        self.handle.reroute(plan, seed=seed)
        self.warm_up()
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)
        self.optimizer = self._fresh_optimizer()
        self.seconds, self.step = 0.0, 0

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch on the tokens that were kept."""
        x, labels, where = batch
        labels = labels.masked_fill(noise.uniform(self.seed, CAPTION, where) < DROPPED, len(CLASSES))
        with self.handle.dense() if self.dense else nullcontext(), self.autocast():
            found = losses(self.net, x, labels, where, noise.uniform(self.seed, TIME, where), self.seed)  # (B, S)
        kept = self.handle.kept
        if self.dense or kept is None:
            return found.mean()
        return (found * kept).sum() / kept.sum()

    def train(self, steps: int, rate: float, after: Callable[[int], None] = lambda _: None) -> None:
        """So many steps, by the clock; `after` is called with each step done."""
        batches = self.data.batches(self.scale.batch, self.seed, self.step)
        self._wait()
        start = time.perf_counter()
        for step in range(self.step, self.step + steps):
            self._step(step, next(batches), rate * min(1.0, (step + 1) / self.scale.rate_warmup))
            after(step)
        self._wait()
        self.seconds += time.perf_counter() - start
        self.step += steps
        self._check_fast()

    def _check_fast(self) -> None:
        """The product goes on where compiling or capturing fails; here a time is taken."""
        check_fast([] if self.handle.fast is None else [self.handle.fast])

    def _step(self, step: int, batch: Batch, rate: float) -> None:
        self.handle.set_step(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.loss(batch).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def warm_up(self) -> None:
        """Compile and capture a step at each level of the schedule; learns nothing."""
        for step in self._levels().values():
            self._steps_at(step, WARM_STEPS if self.scale.compile else 1)
        self.optimizer = self._fresh_optimizer()
        self._check_fast()

    def seconds_by_scale(self) -> dict[float, float]:
        """Seconds of a step at each level of the schedule, compiled and captured; learns nothing."""
        self.warm_up()
        found = {level: self._steps_at(step, self.scale.timed) for level, step in self._levels().items()}
        self.optimizer = self._fresh_optimizer()
        return found

    def _levels(self) -> dict[float, int]:
        """The levels of the schedule, each with its first step."""
        schedule, found = self.handle.plan.schedule, dict[float, int]()
        total = 1 if schedule is None else schedule.total_steps or 1
        for step in range(total):
            found.setdefault(1.0 if schedule is None else schedule.scale(step), step)
        return found

    def _steps_at(self, step: int, count: int) -> float:
        """Seconds of a step at the level of one, with a rate of zero; the host runs ahead, as it does in training."""
        batches = self.data.batches(self.scale.batch, self.seed)
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            self._step(step, next(batches), rate=0.0)
        self._wait()
        return (time.perf_counter() - start) / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def validation_loss(self, held_out: Images) -> float:
        """The dense loss on fixed samples, noise and evenly spread times."""
        self.net.eval()
        count, total, size = len(held_out.pixels), 0.0, self.scale.sample_batch
        for first in range(0, count, size):
            chosen = torch.arange(first, min(first + size, count), device=self.device)
            x, labels, u = centred(held_out.pixels[chosen]), held_out.labels[chosen], (chosen + 0.5) / count
            with self.autocast():
                total += float(losses(self.net, x, labels, chosen, u, VALIDATION).double().mean(1).sum())
        self.net.train()
        return total / count

    def autocast(self) -> torch.autocast:
        """The precision of every forward."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def close(self) -> None:
        """Detach, and give the graphs' memory back."""
        self.handle.detach()


def steps_within(seconds: float, per_level: dict[float, float], arm: Arm) -> int:
    """The most steps that take so many seconds at the times of the schedule's levels."""

    def takes(steps: int) -> float:
        schedule = arm.plan(steps).schedule
        levels = (1.0 if schedule is None else schedule.scale(step) for step in range(steps))
        return sum(per_level.get(level, per_level[1.0]) for level in levels)

    low, high = 1, max(2, int(2 * seconds / min(per_level.values())))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) <= seconds else (low, middle)
    return low
