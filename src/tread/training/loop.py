"""The training loop, one for every job: steps of a `Session`, with metrics, reviews, checkpoints and the progress bar.

- Everything that changes over a run is a function of the step: the learning rate, the data, the noise, the
  selections. So a run that was killed goes on bit for bit.
- Nothing in a step waits for the device; numbers are read every `log.every` steps.
- Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 finish the step, save and print how to continue; reviews wait for the resume. An
  error saves the last complete step; of sharded weights, which no process has whole, the last checkpoint remains.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tqdm import tqdm

from tread.errors import CheckpointError, TrainingDiverged
from tread.kernels.attention import kernel
from tread.together import together
from tread.training.checkpoint import CHECKPOINTS
from tread.training.memory import lost_workers, out_of_memory, peak_memory
from tread.training.metrics import Metrics
from tread.training.optimizers.make import applied_rate
from tread.training.ranks import lost_ranks
from tread.training.session import Session
from tread.training.signals import Interrupted, Interruptible, stopping

SETTLED = 10
"""Steps of a process after which compiled code, graphs and moments all exist."""
UNSAVED = "nothing is saved, because checkpoint.every is 0"


def fit(session: Session, folder: Path, *, start: int) -> int:
    """Train from step `start` to `train.steps`, with metrics, checkpoints, validation and previews in `folder`.

    Returns the number of the signal that stopped it, the same on every rank; 0 if it ran to its end.
    """
    task, config, accelerator = session.task, session.config, session.accelerator
    steps, log_every, save_every = config.train.steps, config.log.every, config.checkpoint.every
    if start >= steps and not session.due:
        accelerator.print(f"the run is at step {start} already; raise {config.called('train.steps')} to train on.")
        return 0
    if save_every == 0:
        accelerator.print(f"{UNSAVED}, so this run can be neither resumed nor sampled from.")
    with together():  # before `stopping` opens a process group
        metrics = Metrics(folder, accelerator, start_step=start, advice=config.divergence_advice)
        batches = task.batches(start)
    hidden = not accelerator.is_main_process
    bar = tqdm(total=steps, initial=start, unit="step", desc=folder.name, disable=hidden, mininterval=0.5)
    clock, done, stopped_by = _Clock(bar), start, 0

    explained = kernel.explained(config.train.attention, config.called("train.attention"))
    with (
        lost_ranks(config),
        stopping(accelerator, config.train.timeout) as (asked, interruptible),
        _rescued(session, folder, metrics),
        out_of_memory(config.memory_advice),
        lost_workers(config.called("train.workers")),
        explained,
        settling() as settle,
        bar,
    ):
        with clock.paused():
            if session.due:  # the checkpoint was saved after an error, before its reviews
                if _review(session, start, metrics, bar, interruptible):
                    session.save(folder / CHECKPOINTS, start)
                else:
                    stopped_by = asked()
            if start == 0:
                _review(session, 0, metrics, bar, nullcontext)  # a resume cannot repeat it
        for step in range(start, start if stopped_by else steps):
            compiling = step == start and any(fast.attempt is not None for fast in session.fast)
            with _showing(bar, "compiling") if compiling else nullcontext():
                values = session.step(step, batches)
            done = step + 1
            if done == start + SETTLED:
                settle()
            kept = session.kept_share
            metrics.add(done, {"learning_rate": applied_rate(session.optimizer), "tokens_kept": kept}, values)
            bar.update()

            stopped_by = asked()
            stop = done == steps or stopped_by > 0
            if stop or done % log_every == 0:
                loss = metrics.flush()["loss"]
                speed = clock.lap(done - start) * config.train.batch_size
                bar.set_postfix_str(f"loss {loss:.4f}, {speed:.3g} {task.unit}/s, tokens kept {kept:.0%}")
                metrics.write(
                    done, {"images_per_second": round(speed, 3), "memory_gib": peak_memory(accelerator.device)}
                )
            with clock.paused():
                saving = save_every > 0 and (stop or done % save_every == 0)
                if saving:
                    metrics.flush()  # raises if the loss is not finite, so that it is not saved
                # before the save: a run killed in between resumes from an earlier step and repeats the review.
                # A signal gives no time for reviews: they are due when the run is resumed
                hurried = stopped_by > 0 and done < steps and bool(task.reviews(done))
                if not hurried and not _review(session, done, metrics, bar, interruptible):
                    stopped_by, stop, saving = asked(), True, save_every > 0
                if saving:
                    with _showing(bar, "saving"):
                        session.save(folder / CHECKPOINTS, done, wait=stop)
            if stop:
                break
    if done == steps and not session.due:
        return 0
    goes_on = f"continue with: {config.resume_command(folder)}" if save_every else f"{UNSAVED}."
    accelerator.print(f"stopped at step {done} of {steps}; {goes_on}")
    return stopped_by


def _review(session: Session, done: int, metrics: Metrics, bar: tqdm, interruptible: Interruptible) -> bool:
    """Run the reviews due after `done` steps, with the averaged weights, and log their figures.

    Returns False if a signal interrupted them, which leaves them due.
    """
    if reviews := session.task.reviews(done):
        metrics.flush()  # lines stay in order
        figures: dict[str, float] = {}
        try:
            # a forward of sharded weights is a collective: one that waits in it notices only the end of a process, and
            # has nothing to tell of that itself
            with session.averaged(), together(), lost_ranks(session.config):
                for doing, review in reviews.items():
                    with _showing(bar, doing), interruptible():
                        figures |= review()
        except Interrupted:
            return False
        if figures:
            session.validated = done, figures.get("val_loss", math.nan)
            metrics.write(done, figures)
            if session.accelerator.is_main_process:
                bar.write(f"step {done}: " + ", ".join(f"{name} {figures[name]:.4f}" for name in figures))
    session.due = False
    return True


@contextmanager
def _showing(bar: tqdm, doing: str) -> Iterator[None]:
    """Inside, the progress bar shows what the run is doing."""
    name = getattr(bar, "desc", "")  # a hidden bar has none
    bar.set_description_str(f"{name}, {doing}")
    try:
        yield
    finally:
        bar.set_description_str(name, refresh=False)


@contextmanager
def settling() -> Iterator[Callable[[], None]]:
    """Yields a function to call after the first steps: it freezes the objects built so far, so that Python's garbage
    collector does not walk them again while the device waits."""
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
    """Save the last complete step when an error, such as an unreadable file, ends the run."""
    try:
        yield
    except (TrainingDiverged, CheckpointError):  # nothing to save, or no way to save it
        raise
    except Exception:
        try:
            _save_alone(session, folder, metrics)
        except Exception as second:  # the first error is the one to report
            session.accelerator.print(f"an error stopped the run, and another came while it was saved: {second}")
        raise


def _save_alone(session: Session, folder: Path, metrics: Metrics) -> None:
    """Save on rank 0 without the other ranks, which may have failed or wait for something else."""
    step, accelerator = session.complete_steps, session.accelerator
    if session.saver is not None:  # the other ranks' shards are out of reach
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
    """Steps per second of training alone, here and on the progress bar."""

    def __init__(self, bar: tqdm) -> None:
        self._since, self._steps, self._bar = time.perf_counter(), 0, bar

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
        spent = time.perf_counter() - before
        self._since += spent
        if not self._bar.disable:  # else the bar takes a review for a slow step, and predicts hours
            self._bar.last_print_t += spent
