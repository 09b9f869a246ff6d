"""`tread autotune CONFIG`: measure, search, verify, write.

The output folder has `measurements.json` (every measurement, saved at once), `tread_config.json` (the routes, ready for
a config), `report.html`, and with --verify the runs. The same command resumes an interrupted tuning.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tread.autotune.goal import Options
from tread.autotune.jobs.job import Job, TrainedJob, read_job, stem
from tread.autotune.measure import Budget, Timer, steady
from tread.autotune.store import FILE, claimed
from tread.autotune.tuning import Tuning
from tread.errors import RiskWarning, Stopped


def autotune(options: Options, *, timer: Timer | None = None, clock: Callable[[], float] | None = None) -> Path:
    """Tune the routes of a config; returns the folder. `timer` and `clock` replace the device's and the system's."""
    job = read_job(options.config, options.settings)
    verified = None if options.verify_minutes is None else job
    if verified is not None:
        verified.check_verify()
    out = options.out or Path("autotune") / stem(options.config)
    return tune(options, job, out, measured_device(), verified=verified, timer=timer, clock=clock)


def tune(
    options: Options,
    job: Job,
    out: Path,
    device: torch.device,
    *,
    verified: TrainedJob | None = None,
    timer: Timer | None = None,
    clock: Callable[[], float] | None = None,
) -> Path:
    """Tune the routes of a job; with `verified`, also train its finalists."""
    with claimed(out) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RiskWarning)  # the rules already keep to these limits
        tuning = Tuning(options, job, folder, device, verified)
        with _kept(job, folder), job.explained():
            tuning.run(timer or steady(device), Budget(60 * options.budget_minutes, *([clock] if clock else [])))
    return folder


def measured_device() -> torch.device:
    """The device that a job trains on."""
    accelerator = torch.accelerator.current_accelerator()
    hidden = accelerator is not None and accelerator.type == "cuda" and not torch.cuda.is_available()
    return torch.device("cpu") if accelerator is None or hidden else accelerator


@contextmanager
def _kept(job: Job, folder: Path) -> Iterator[None]:
    """Report what is saved when the tuning is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, Stopped):  # a verifying run reports its own progress
        kept = f"what was measured is kept in {folder / FILE}"
        print(job.said(f"interrupted; {kept}: the same command goes on from there"))
        raise
