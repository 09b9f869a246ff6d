"""The training loop, one for every job.

- A `Task` brings the model, the batches and the loss; the loop brings optimizer, EMA, checkpoints, metrics and the
  progress bar.
- Everything that changes over a run is a function of the step: the learning rate, the data, the noise, the
  selections. So a checkpoint holds weights, averages and optimizer moments and nothing else, and a run that was
  killed goes on bit for bit.
- Nothing in a step waits for the device; numbers are read every `log.every` steps.
- Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 finish the step, save and say how to go on. An error does so too, with the last
  step that is whole; sharded weights, which no process has whole, are as the last checkpoint has them.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from tread.errors import TrainingDiverged
from tread.kernels import attention
from tread.routing import noise
from tread.training import checkpoint
from tread.training.contents import check_data
from tread.training.ema import EMA
from tread.training.memory import lost_workers, out_of_memory, peak_memory
from tread.training.metrics import FILE as METRICS_FILE
from tread.training.metrics import Metrics
from tread.training.optimizers.make import applied_rate, averaged_weights, keeps_average, make_optimizer
from tread.training.optimizers.muon import embedding_tables
from tread.training.optimizers.rates import learning_rate
from tread.training.parts import averaged_part, load_into, load_moments, optimizer_tensors, trained
from tread.training.ranks import found_by_main, lost_ranks
from tread.training.settings import JobConfig
from tread.training.sharding.saver import Saver
from tread.training.signals import stopping
from tread.training.task import Task

CHECKPOINTS = "checkpoints"
SETTLED = 10
"""Steps after which nothing is built any more."""
UNSAVED = "nothing is saved, because checkpoint.every is 0"


class Session:
    """A task with everything that training it changes: weights, their average, optimizer moments."""

    def __init__(self, task: Task, config: JobConfig, accelerator: Accelerator) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        self.model = task.model if config.train.sharded else accelerator.prepare(task.model)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.trained, config.optimizer, embedding_tables(self.model))
        # a copy of the weights after all ranks have agreed on them
        self.ema = None if config.ema is None else EMA(task.model, decay=config.ema.decay, warmup=config.ema.warmup)
        self.fast = list(task.make_fast())
        """What makes the model fast; one for each part of it."""
        self.whole: int | None = None
        """Steps that weights, average and moments have all taken; None before the first and while one changes them."""
        self.due = False
        """Whether the validation and pictures due after the last whole step are still to be made."""
        self.saved: int | None = None
        """Step of the last checkpoint written by this session."""
        self.validated: tuple[int, float] = 0, math.nan
        """Step of the last validation, and its loss."""
        saves = config.train.sharded and config.checkpoint.every
        self.saver = Saver(accelerator.device, config.train.timeout) if saves else None
        """Writes the checkpoints of sharded weights."""

    @property
    def kept_share(self) -> float:
        """The share of tokens kept by the routed layers of the last forward; 1 if it was dense."""
        routing = self.task.routing
        return routing[0].kept_share if routing else 1.0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the task's model has its averaged weights (the EMA's, else the optimizer's own), in eval mode, not
        compiled: other shapes than training's would fill the compiler's caches."""
        training = self.task.model.training
        self.task.model.eval()
        try:
            eager = torch.compiler.set_stance("force_eager")
            kernels = attention.relaxed(self.config.train.attention, self.accelerator.device)
            with self.ema.applied() if self.ema else averaged_weights(self.optimizer), eager, kernels:
                yield
        finally:
            self.task.model.train(training)

    def step(self, step: int, batches: Iterator[Any]) -> dict[str, Tensor]:
        """One optimizer step; returns its loss and gradient norm, still on the device."""
        config, accelerator = self.config, self.accelerator
        for handle in self.task.routing:
            handle.set_step(step)
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
            # sharded gradients are reduced in every micro-step, or each process would hold them whole
            with nullcontext() if last or config.train.sharded else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    loss = self.task.loss(self.model, batch)
                accelerator.backward(loss / micro_steps)
            losses.append(loss.detach())
            del loss  # and what autograd holds for it: no CUDA graph can be captured beside that
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if config.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.trained, config.optimizer.clip, norm)
        self.whole = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            with averaged_weights(self.optimizer):
                self.ema.update(step)
        self.whole, self.due = step + 1, True
        # the norm of offloaded gradients is on the host
        return {"loss": torch.stack(losses).mean(), "grad_norm": norm.to(accelerator.device, non_blocking=True)}

    def save(self, folder: Path, step: int, *, together: bool = True, wait: bool = True) -> None:
        """Write the checkpoint after `step` steps, on rank 0; `together`: all ranks call it and wait for it.

        Shards are written by every rank; unless they `wait`, in the background. Nothing is written where
        `checkpoint.every` is 0.
        """
        if self.config.checkpoint.every == 0:
            return
        facts = self.task.facts | ({"due": True} if self.due else {})
        if self.validated[0] == step and math.isfinite(self.validated[1]):  # else it is that of other weights
            facts |= {checkpoint.VALIDATED: self.validated[1]}
        keep = {"keep": self.config.checkpoint.keep, "keep_best": self.config.checkpoint.keep_best}
        if self.saver is not None:
            self.saver.start(folder, step, self._parts(), facts, **keep)
            if wait:
                self.saver.wait()
            self.saved = self.saver.saved
            return
        if self.accelerator.is_main_process:
            path = checkpoint.save(folder, step, self._parts(), facts, **keep)
            self.saved = step
            self.make_result(path)
        if together:
            self.accelerator.wait_for_everyone()

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint, by part."""
        parts = {"model": trained(self.task.model), "optimizer": optimizer_tensors(self.optimizer)}
        if self.ema is not None:
            parts["ema"] = self.ema.averages
        elif keeps_average(self.optimizer):  # what results are made of; training goes on from the other weights
            with averaged_weights(self.optimizer):
                parts["ema"] = trained(self.task.model)
        return parts

    def make_result(self, path: Path) -> None:
        """Let the task make the result of the checkpoint that is in place, on rank 0, unless it is there."""
        if self.accelerator.is_main_process:
            with self.averaged():
                self.task.saved(path)

    def load(self, folder: Path) -> int:
        """Put the newest whole checkpoint in place; returns its step, 0 where there is none."""
        found = found_by_main(self.accelerator, lambda: checkpoint.newest(folder, self.accelerator.print))
        if found is None:
            if (folder.parent / METRICS_FILE).exists():  # it was stopped before its first one
                self.accelerator.print(f"no checkpoint in {folder}: the run starts at step 0.")
            return 0
        path, manifest = found
        check_data(self.config, path, manifest, self.task.facts, self.accelerator.print)
        load_into(trained(self.task.model), path, "model")
        if self.ema is not None:
            # a run that had no average so far starts it from its weights
            load_into(self.ema.averages, path, averaged_part(manifest))
        load_moments(self.optimizer, path)
        self.due = manifest.get("due", False)
        self.accelerator.print(f"resumed from {path}")
        return manifest["step"]


def fit(session: Session, folder: Path, *, start: int) -> int:
    """Train from step `start` to `train.steps`, with metrics, checkpoints, validation and previews in `folder`.

    Returns the number of the signal that stopped it, the same on every rank; 0 if it came to its end.
    """
    task, config, accelerator = session.task, session.config, session.accelerator
    steps, log, every = config.train.steps, config.log.every, config.checkpoint.every
    is_main = accelerator.is_main_process
    if start >= steps and not session.due:
        accelerator.print(f"the run is at step {start} already; raise {config.called('train.steps')} to train on.")
        return 0
    if every == 0:
        accelerator.print(f"{UNSAVED}, so this run can be neither resumed nor sampled from.")
    metrics = Metrics(folder, accelerator, start_step=start, advice=config.divergence_advice)
    batches = task.batches(start)
    clock, done, number = _Clock(), start, 0
    bar = tqdm(total=steps, initial=start, unit="step", desc=folder.name, disable=not is_main, mininterval=0.5)

    def finish(done: int) -> None:
        """Validate, draw and evaluate what is due after a step."""
        if reviews := task.reviews(done):
            metrics.flush()  # lines stay in order
            figures: dict[str, float] = {}
            with session.averaged():
                for doing, review in reviews.items():
                    with _said(bar, doing):
                        figures |= review()
            if figures:
                session.validated = done, figures.get("val_loss", math.nan)
                metrics.write(done, figures)
                if is_main:
                    bar.write(f"step {done}: " + ", ".join(f"{name} {figures[name]:.4f}" for name in figures))
        session.due = False

    explained = attention.explained(config.train.attention, config.called("train.attention"))
    with (
        lost_ranks(config),
        stopping(accelerator, config.train.timeout) as asked,
        _rescued(session, folder, metrics),
        out_of_memory(config.memory_advice),
        lost_workers(config.called("train.workers")),
        explained,
        settling() as settle,
        bar,
    ):
        if session.due:  # an error was in the way
            finish(start)
            session.save(folder / CHECKPOINTS, start)
        if start == 0:
            with clock.paused():
                finish(0)
        for step in range(start, steps):
            compiling = step == start and any(fast.attempt is not None for fast in session.fast)
            with _said(bar, "compiling") if compiling else nullcontext():
                values = session.step(step, batches)
            done = step + 1
            if done == start + SETTLED:
                settle()
            kept = session.kept_share
            metrics.add(done, {"learning_rate": applied_rate(session.optimizer), "tokens_kept": kept}, values)
            bar.update()

            number = asked()
            stop = done == steps or number > 0
            if stop or done % log == 0:
                loss = metrics.flush()["loss"]
                speed = clock.lap(done - start) * config.train.batch_size
                bar.set_postfix_str(f"loss {loss:.4f}, {speed:.3g} {task.unit}/s, tokens kept {kept:.0%}")
                metrics.write(
                    done, {"images_per_second": round(speed, 3), "memory_gib": peak_memory(accelerator.device)}
                )
            with clock.paused():
                saving = every > 0 and (stop or done % every == 0)
                if saving:
                    metrics.flush()  # a loss that is no number is not saved
                finish(done)  # before the save: a run killed in between goes on from an earlier step and misses nothing
                if saving:
                    with _said(bar, "saving"):
                        session.save(folder / CHECKPOINTS, done, wait=stop)
            if stop:
                break
    if done == steps:
        return 0
    goes_on = f"continue with: {config.resume_command(folder)}" if every else f"{UNSAVED}."
    accelerator.print(f"stopped at step {done} of {steps}; {goes_on}")
    return number


@contextmanager
def _said(bar: tqdm, doing: str) -> Iterator[None]:
    """Let the bar say what the run is doing instead of steps."""
    name = getattr(bar, "desc", "")  # a hidden bar has none
    bar.set_description_str(f"{name}, {doing}")
    try:
        yield
    finally:
        bar.set_description_str(name, refresh=False)


@contextmanager
def settling() -> Iterator[Callable[[], None]]:
    """Yields a function to call after the first steps: it freezes what they built, so that Python's garbage collector
    does not walk it again while the device waits."""

    settled = False

    def settle() -> None:
        nonlocal settled
        settled = True
        gc.collect()
        gc.freeze()

    try:
        yield settle
    finally:
        if settled:
            gc.unfreeze()


@contextmanager
def _rescued(session: Session, folder: Path, metrics: Metrics) -> Iterator[None]:
    """Save the last whole step when an error, such as an unreadable file, ends the run."""
    try:
        yield
    except (TrainingDiverged, checkpoint.CheckpointError):  # nothing to save, or no way to save it
        raise
    except Exception:
        try:
            _save_alone(session, folder, metrics)
        except Exception as second:  # the first error is the one to report
            session.accelerator.print(f"an error stopped the run, and another came while it was saved: {second}")
        raise


def _save_alone(session: Session, folder: Path, metrics: Metrics) -> None:
    """Save on rank 0 without the others, which may have failed or wait for something else."""
    step, accelerator = session.whole, session.accelerator
    if session.saver is not None:  # the shards of the others are out of reach
        session.saver.settle()
        command = session.config.resume_command(folder)
        accelerator.print(f"an error stopped the run; continue from its last checkpoint with: {command}")
        return
    if step is None or not accelerator.is_main_process or not metrics.are_finite:
        return
    if session.config.checkpoint.every == 0:
        accelerator.print(f"an error stopped the run at step {step}; {UNSAVED}.")
        metrics.flush(together=False)
        return
    if step != session.saved:
        try:
            session.save(folder / CHECKPOINTS, step, together=False)
        except Exception:
            if step != session.saved:
                raise
            # the checkpoint is saved; only the exported result is stale
    command = session.config.resume_command(folder)
    accelerator.print(f"an error stopped the run; step {step} is saved, continue with: {command}")
    metrics.flush(together=False)


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
