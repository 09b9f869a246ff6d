"""The frame of a job around the loop: accelerator, run folder and its saved settings, trackers, shutdown."""

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from torch import distributed

from tread.config.documents import read_document, settled
from tread.config.layers import changes, flatten
from tread.errors import ConfigError, Stopped, masked, one_line, shown
from tread.files import is_file, lock, sweep, unwritable, write_text, writing
from tread.kernels.attention.kernel import check_attention
from tread.together import together
from tread.training.checkpoint import CHECKPOINTS, MANIFEST, checkpoint_path, list_checkpoints, newest, recover
from tread.training.fingerprint import check_shared
from tread.training.loop import fit
from tread.training.metrics import tracker_of
from tread.training.ranks import arriving, check_launched, from_main, lost_ranks, rejoin, restarts
from tread.training.record import read_record, write_start, write_wandb_id
from tread.training.session import Session
from tread.training.settings import JobConfig
from tread.training.sharding.layout import BACKENDS, check_layout, open_group, shard_size
from tread.training.task import Task

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"


def make_accelerator(config: JobConfig, *, find_unused: bool = False) -> Accelerator:
    """The accelerator of a job, with layout and attention checked; `find_unused`: some trained parameters may get no
    gradient."""
    check_launched()
    check_layout(config)
    # a graph must cast its weights anew every time it runs; nothing is cast twice in a forward anyway
    autocast = AutocastKwargs(cache_enabled=False)
    # gradients live where they are exchanged: without the view there is a second copy of them
    parallel = DistributedDataParallelKwargs(find_unused_parameters=find_unused, gradient_as_bucket_view=True)
    # accelerate drops a timeout that equals its default, and torch then sets another one
    group = InitProcessGroupKwargs(timeout=config.train.timeout + timedelta(microseconds=1))
    if torch.cuda.is_available():  # over gloo, unlike over NCCL, a process notices that another one has ended
        group.backend = BACKENDS["cuda"]
    with arriving(config):
        rejoin(BACKENDS["cuda"] if torch.cuda.is_available() else "gloo", config.train.timeout)
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),  # else several processes on CPUs would not find each other
            mixed_precision="bf16" if config.train.bf16 else "no",
            log_with=tracker_of(config),
            project_config=ProjectConfiguration(logging_dir=config.output_dir),
            kwargs_handlers=[autocast, parallel, group],
        )
    if config.train.sharded:
        open_group(accelerator.device)
        shard_size(config, accelerator.num_processes)  # refuses one that does not divide
    check_attention(config.train.attention, accelerator.device, config.called("train.attention"))
    if tracker_of(config) == "wandb":
        from_main(accelerator, lambda: _log_in(config))
    return accelerator


def _log_in(config: JobConfig) -> None:
    """Log in to wandb before anything is encoded or loaded, which may take hours; offline it does nothing."""
    import wandb

    with _starting_tracker(config):
        wandb.login()


@contextmanager
def claimed_folder(config: JobConfig, accelerator: Accelerator) -> Iterator[Path]:
    """Make the run's folder and hold its lock; refuses a folder that holds another run or that another job holds, and
    a resume if all checkpoints are broken."""
    folder = Path(config.output_dir)
    source = _resumed_from(config, folder)
    goes_on = source is not None and source.resolve() == folder.resolve()
    if source is not None and not goes_on:
        _check_resumable(source, accelerator)
    with lost_ranks(config), ExitStack() as stack:

        def claim() -> None:
            make_folder(folder, f"output_dir {str(folder)!r}", "Name another output_dir.")
            if not stack.enter_context(locked(folder / LOCK_FILE)):
                raise ConfigError(f"another job is training in {folder}: wait for its end, or name another output_dir.")
            with writing(folder / CHECKPOINTS):
                recover(folder / CHECKPOINTS)
            sweep(folder)  # the lock is held: nobody else writes here

        from_main(accelerator, claim)
        with together():  # every rank has looked before rank 0 writes
            make_folder(folder, f"output_dir {str(folder)!r}", "Name another output_dir.")  # each machine's own
            if goes_on:
                _check_resumable(folder, accelerator)
            if (taken := _taken(config, folder)) is not None:
                raise taken
        yield folder


def check_folder(config: JobConfig) -> None:
    """Refuse an output_dir that `claimed_folder` would refuse, without making it."""
    folder = Path(config.output_dir)
    if reason := unwritable(folder):
        raise ConfigError(f"cannot write to output_dir {str(folder)!r}: {reason}. Name another output_dir.")
    if (taken := _taken(config, folder)) is not None:
        raise taken


def _taken(config: JobConfig, folder: Path) -> ConfigError | None:
    """The refusal of a folder that holds another run than the one to resume."""
    source = _resumed_from(config, folder)
    if (source is not None and source.resolve() == folder.resolve()) or not list_checkpoints(folder / CHECKPOINTS):
        return None
    return ConfigError(
        f"{folder} already holds a run: continue it with {config.called('resume')}=latest, or name another output_dir."
    )


def _check_resumable(run_folder: Path, accelerator: Accelerator) -> None:
    """Refuse a run whose checkpoints are all broken, before anything is encoded or loaded."""
    from_main(accelerator, lambda: newest(run_folder / CHECKPOINTS, lambda _: None))  # broken ones are named later


def make_folder(folder: Path, called: str, fix: str) -> None:
    """Make a folder; refuses one in which no file can be written, by the name `called` and with the advice `fix`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder), (folder / LOCK_FILE).open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {called}: {error.strerror}. {fix}") from None


def run(
    task: Task,
    config: JobConfig,
    accelerator: Accelerator,
    folder: Path,
    settings: dict[str, Any],
    saved: Callable[[Path], dict[str, Any]] | None = None,
) -> int:
    """Train a task from its start or its newest checkpoint; returns the signal that stopped it, or 0.

    `settings`, the job's own config, are written to the folder without secrets; `saved` reads those of the resumed run,
    to report changes.
    """
    settings = masked(settings)
    check_shared(task.facts)  # the ranks meet here before they open process groups, which wait for one that has ended
    session = Session(task, config, accelerator)
    source = _resumed_from(config, folder)
    start = 0 if source is None else session.load(source / CHECKPOINTS)
    goes_on = source is not None and source.resolve() == folder.resolve()
    if start >= config.train.steps and not goes_on:
        steps = config.called("train.steps")
        raise ConfigError(
            f"{source} is at step {start} already, and {steps} is {config.train.steps}, so there is nothing to train "
            f"in {folder}: raise {steps}."
        )

    def write_settings() -> None:
        before = {}
        if source is not None and (source / CONFIG_FILE).is_file():
            before = (saved or saved_settings)(source)
        _write_config(folder, before, settings, accelerator)
        write_start(folder, task, accelerator, start)

    # only now: a run that could not be resumed, or has nothing left to do, keeps its own
    if start < config.train.steps:
        from_main(accelerator, write_settings)
    if start and goes_on:  # a kill may have come before it
        from_main(accelerator, lambda: session.make_result(checkpoint_path(folder / CHECKPOINTS, start)))
    if accelerator.log_with:
        flat = {
            name: value if isinstance(value, int | float) else str(value) for name, value in flatten(settings).items()
        }
        from_main(accelerator, lambda: _start_tracker(config, accelerator, folder, flat, start))
    accelerator.print(task.summary())
    _advise(task, config, accelerator)
    return fit(session, folder, start=start)


def _start_tracker(
    config: JobConfig, accelerator: Accelerator, folder: Path, settings: dict[str, Any], start: int
) -> None:
    wandb_id = str(read_record(folder).get("wandb") or secrets.token_hex(8))
    options = {
        # hides what an earlier start wrote of the steps that are repeated
        "tensorboard": {"purge_step": start + 1 if start else 0},
        # goes on with the curves of an earlier start, and ignores steps that it has already
        "wandb": {"name": config.log.run or folder.name, "dir": str(folder), "id": wandb_id, "resume": "allow"},
    }
    with _starting_tracker(config):
        accelerator.init_trackers(config.log.project, config=settings, init_kwargs=options)
    if tracker_of(config) == "wandb":
        write_wandb_id(folder, wandb_id)


@contextmanager
def _starting_tracker(config: JobConfig) -> Iterator[None]:
    """Turn a tracker's own error into one that names the setting."""
    try:
        yield
    except Exception as error:  # wandb's own: no login, no network, a project that is another's
        setting, name = config.called("log.trackers"), tracker_of(config)
        reason = one_line(error).rstrip(".")
        fix = " set WANDB_MODE=offline in the environment, or" * (name == "wandb")
        raise ConfigError(
            f"{setting} is {name!r}, which cannot start: {reason}. Mend that,{fix} go on without: {setting}=none."
        ) from error


def _advise(task: Task, config: JobConfig, accelerator: Accelerator) -> None:
    """Print likely mistakes; the run continues with them."""
    schedule = task.routing[0].plan.schedule if task.routing else None
    if schedule is not None and not any(schedule.scale(step) for step in range(config.train.steps)):
        accelerator.print(
            f"the routes' schedule leaves no step of {config.train.steps} routed, so the run is dense: lower its "
            "warmup_steps or cooldown_fraction."
        )
    if config.optimizer.warmup_steps > config.train.steps:
        accelerator.print(
            f"the learning rate climbs for {config.optimizer.warmup_steps} steps and the run has {config.train.steps}, "
            f"so it never reaches its rate: lower {config.called('optimizer.warmup_steps')}."
        )
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        accelerator.print("Launched for several processes but running one; on CPUs pass --multi_gpu.")


def end(accelerator: Accelerator, stopped: int = 0) -> None:
    """Close trackers and the process group; raises `Stopped` if a signal stopped the run.

    Wrapped models are freed first, then the ranks wait for each other: a group that is destroyed together with a DDP
    model waits for a thread that waits for the GIL (gloo, torch 2.13).
    """
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if distributed.is_initialized():  # a group of one, which accelerate does not know
        distributed.destroy_process_group()
    if stopped:
        raise Stopped(stopped)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock file; yields False if another process holds it. The system frees it when this process ends."""
    with path.open("a") as file:
        if hasattr(os, "register_at_fork"):  # else data-loading processes would hold it too
            os.register_at_fork(after_in_child=file.close)
        yield lock(file, wait=False)


def _resumed_from(config: JobConfig, folder: Path) -> Path | None:
    """`config.resumed`, or the run's own folder where torchrun gave the same command again."""
    source = folder if restarts() and list_checkpoints(folder / CHECKPOINTS) else config.resumed
    if source is not None and config.resume != "latest":
        saved_settings(source)  # refuses what is not the folder of a run, before a run would begin at step 0
    return source


def saved_settings(folder: Path) -> dict[str, Any]:
    """The settings that a run folder keeps; refuses a folder that holds no run."""
    if is_file(folder / MANIFEST):
        raise ConfigError(
            f"{shown(str(folder), 200)} is not the folder of a run, but one of its checkpoints: name the run's folder, "
            "which goes on from the newest; to go back to this step, move the later checkpoints out of it first."
        )
    if not is_file(folder / CONFIG_FILE):
        raise ConfigError(f"{shown(str(folder), 200)} is not the folder of a run: it has no {CONFIG_FILE}.")
    settings = settled(read_document(folder / CONFIG_FILE))
    if not isinstance(settings, dict):
        raise ConfigError(f"{folder / CONFIG_FILE} is not the config of a run; restore it.")
    return settings


def _write_config(folder: Path, before: dict[str, Any], settings: dict[str, Any], accelerator: Accelerator) -> None:
    import yaml

    for change in changes(before, settings) if before else ():
        if not change.startswith(("resume", "output_dir")):
            accelerator.print(f"changed since the run was started: {change}")
    write_text(folder / CONFIG_FILE, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120))
