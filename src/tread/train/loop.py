"""The training loop, one for every job.

- A `Task` brings the model, the batches and the loss; the loop brings optimizer, EMA, checkpoints, metrics and the
  progress bar.
- Everything that changes over a run is a function of the step: the learning rate, the data, the noise, the
  selections. So a checkpoint holds weights, averages and optimizer moments and nothing else, and a run that was
  killed goes on bit for bit.
- Nothing in a step waits for the device; numbers are read every `log.every` steps.
- Ctrl-C and SIGTERM finish the step, save and say how to go on.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from tread.routing import noise
from tread.routing.handle import Handle
from tread.train import checkpoint
from tread.train.ema import EMA
from tread.train.metrics import Metrics
from tread.train.settings import OptimizerConfig, PretrainConfig

CHECKPOINTS = "checkpoints"


class Task(Protocol):
    """What is trained."""

    handle: Handle | None
    facts: dict[str, Any]
    """What a checkpoint must say about the model for others to use it; JSON."""

    @property
    def model(self) -> nn.Module: ...

    def compile(self) -> None:
        """Compile the model in place, parameter names unchanged."""
        ...

    def batches(self, start_step: int) -> Iterator[Any]:
        """This rank's micro-batches from `start_step` on, on the device."""
        ...

    def loss(self, model: nn.Module, batch: Any, step: int, micro_step: int) -> Tensor:
        """The mean loss of one micro-batch."""
        ...

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Figures of the averaged model, all tokens in all layers; called on every rank."""
        ...

    def preview(self, model: nn.Module, step: int) -> None:
        """Draw samples of the averaged model; called on every rank."""
        ...


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate at optimizer step `step`, counted from 0."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    decay = 0.5 * (1 + math.cos(math.pi * step / steps)) if config.schedule == "cosine" else 1.0
    return config.learning_rate * warmup * decay


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW, fused where the device has it."""
    beta1, beta2 = config.betas
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = all(parameter.is_cuda for parameter in parameters)
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(beta1, beta2), weight_decay=config.weight_decay, fused=fused
    )


class Session:
    """A task with everything that training it changes: weights, their average, optimizer moments."""

    def __init__(self, task: Task, config: PretrainConfig, accelerator: Accelerator) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        self.model = accelerator.prepare(task.model)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        # a copy of the weights after all ranks have agreed on them
        self.ema = EMA(task.model, decay=config.ema.decay, warmup=config.ema.warmup)
        if config.train.compile:
            task.compile()

    def step(self, step: int, batches: Iterator[Any]) -> dict[str, Tensor]:
        """One optimizer step; returns its loss and gradient norm, still on the device."""
        config, accelerator = self.config, self.accelerator
        if self.task.handle is not None:
            self.task.handle.set_step(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, config.train.steps)
        micro_steps = config.train.micro_steps
        losses = []
        for micro_step in range(micro_steps):
            batch = next(batches)
            # for layers that draw from torch's own generator, such as dropout: theirs is a function of the step too;
            # after the batch, because a loader that starts draws from it
            torch.manual_seed(int(noise.bits(config.train.seed, step, micro_step, accelerator.process_index)))
            last = micro_step == micro_steps - 1
            with nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    loss = self.task.loss(self.model, batch, step, micro_step)
                accelerator.backward(loss / micro_steps)
            losses.append(loss.detach())
        clip = math.inf if config.optimizer.clip is None else config.optimizer.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update(self.task.model, step)
        return {"loss": torch.stack(losses).mean(), "grad_norm": norm}

    def save(self, folder: Path, step: int) -> None:
        """Write the checkpoint after `step` steps, on rank 0."""
        if self.accelerator.is_main_process:
            parts = {
                "model": self.task.model.state_dict(),
                "ema": self.ema.model.state_dict(),
                "optimizer": checkpoint.optimizer_tensors(self.optimizer),
            }
            handle = self.task.handle
            plan = None if handle is None else handle.plan.to_config()
            checkpoint.save(
                folder, step, parts, {**self.task.facts, "tread_config": plan}, keep=self.config.checkpoint.keep
            )
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> int:
        """Put the newest whole checkpoint in place; returns its step, 0 where there is none."""
        found = checkpoint.newest(folder, self.accelerator.print)
        if found is None:
            self.accelerator.print(f"no whole checkpoint in {folder}: the run starts at step 0.")
            return 0
        path, manifest = found
        checkpoint.load_model(self.task.model, checkpoint.load_part(path, "model"), path)
        checkpoint.load_model(self.ema.model, checkpoint.load_part(path, "ema"), path)
        checkpoint.load_optimizer(self.optimizer, checkpoint.load_part(path, "optimizer"))
        self.accelerator.print(f"resumed from {path}")
        return manifest["step"]


def fit(session: Session, folder: Path, *, start: int) -> None:
    """Train from step `start` to `train.steps`, with metrics, checkpoints, validation and previews in `folder`."""
    task, config, accelerator = session.task, session.config, session.accelerator
    steps, log, is_main = config.train.steps, config.log.every, accelerator.is_main_process
    if start >= steps:
        accelerator.print(f"the run is at step {start} already; raise train.steps to train on.")
        return
    metrics = Metrics(folder, accelerator, start_step=start)
    batches = task.batches(start)
    clock, done = _Clock(), start
    bar = tqdm(total=steps, initial=start, unit="step", desc=folder.name, disable=not is_main, mininterval=0.5)

    with _graceful(accelerator) as asked, bar:
        for step in range(start, steps):
            values = session.step(step, batches)
            done = step + 1
            rate = session.optimizer.param_groups[0]["lr"]
            kept = 1.0 if task.handle is None else task.handle.kept_share
            metrics.add(done, {"learning_rate": rate, "tokens_kept": kept}, values)
            bar.update()

            stop = done == steps or asked(at_log=done % log == 0)
            if stop or done % log == 0:
                loss = metrics.flush()["loss"]
                speed = clock.lap(done - start) * config.train.batch_size
                bar.set_postfix_str(f"loss {loss:.4f}, {speed:.0f} img/s, tokens kept {kept:.0%}")
                metrics.write(done, {"images_per_second": round(speed, 1)})
            with clock.paused():
                saving = stop or done % config.checkpoint.every == 0
                validating = _due(config.validation.every, done, steps)
                if saving or validating:
                    metrics.flush()  # lines stay in order, and a loss that is no number is not saved
                # before the save: a run killed in between goes on from an earlier step and misses nothing
                if validating and (figures := task.validate(session.ema.model)):
                    metrics.write(done, figures)
                    if is_main:
                        bar.write(f"step {done}: " + ", ".join(f"{name} {figures[name]:.4f}" for name in figures))
                if _due(config.sample.every, done, steps):
                    task.preview(session.ema.model, done)
                if saving:
                    session.save(folder / CHECKPOINTS, done)
            if stop:
                break
    if done < steps:
        accelerator.print(f"stopped at step {done} of {steps}; continue with: tread train resume={folder}")


def _due(every: int, done: int, steps: int) -> bool:
    return every > 0 and (done % every == 0 or done == steps)


class _Clock:
    """Steps per second of training alone."""

    def __init__(self) -> None:
        self._since, self._steps = time.perf_counter(), 0

    def lap(self, steps: int) -> float:
        """Steps per second since the last lap; `steps` counts from the start."""
        now = time.perf_counter()
        speed = (steps - self._steps) / (now - self._since)
        self._since, self._steps = now, steps
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before


@contextmanager
def _graceful(accelerator: Accelerator) -> Iterator[Callable[..., bool]]:
    """Yields a function that tells whether Ctrl-C or SIGTERM came; a second signal acts at once."""
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])

    def asked(*, at_log: bool) -> bool:
        if accelerator.num_processes == 1:
            return bool(received)
        if not at_log:  # the ranks must stop at the same step, so they agree where they meet anyway
            return False
        flag = torch.tensor(len(received), device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum"))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
