"""The faults: what strikes a job at an event, and the ends that it may have."""

import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass

from faults.events import FSYNC, STEP

SMALL = 64
"""Bytes; semaphores are files of fewer."""
Strike = Callable[[str, bool, float], None]
"""Called with each event from the drawn one on, whether it is the first of them, and a number in [0, 1)."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault; `ends` are the exit statuses that a job may have, by the number of the signal if negative."""

    strike: Strike
    ends: tuple[int, ...]
    at: str = ""
    """How the event begins that it strikes at; empty for any."""
    says: bool = False
    """Whether the job must say in a sentence what is wrong."""
    prepare: Callable[[], None] = lambda: None
    """Called in the process before the job begins."""
    sure: bool = False
    """Whether no job survives it."""


def _kill(event: str, first: bool, amount: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _tear(event: str, first: bool, amount: float) -> None:
    """From now on the process dies in the middle of a write beyond so many bytes of a file."""
    _limit(int(SMALL * 2 ** (8 * amount)))


def _mortal() -> None:
    """Python ignores the signal that a write beyond the limit sends."""
    _spare_workers()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _stop(event: str, first: bool, amount: float) -> None:
    if first:
        os.kill(os.getpid(), signal.SIGTERM if amount < 0.5 else signal.SIGINT)


def _fill(event: str, first: bool, amount: float) -> None:
    """From now on no file grows beyond a few bytes: every other write fails, in Rust and C too."""
    _limit(SMALL)


def _lock(event: str, first: bool, amount: float) -> None:
    """From now on nothing in the folder can be changed; what would change nothing has the answer it always has."""
    what, _, path = event.partition(" ")
    idle = (what == "mkdir" and os.path.exists(path)) or (what == "remove" and not os.path.lexists(path))
    if what not in (STEP, FSYNC) and not idle:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def _rob(event: str, first: bool, amount: float) -> None:
    workers = multiprocessing.active_children()
    if first and workers:
        os.kill(workers[int(amount * len(workers))].pid or 0, signal.SIGKILL)


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _spare_workers() -> None:
    """Data workers hand batches over in shared memory, which is not the disk."""
    os.register_at_fork(after_in_child=lambda: _limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAULTS = {
    "kill": Fault(_kill, (-signal.SIGKILL,), sure=True),
    "torn": Fault(_tear, (0, -signal.SIGXFSZ), prepare=_mortal),
    "stop": Fault(_stop, (0, -signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)),
    "full": Fault(_fill, (0, 2), says=True, prepare=_spare_workers),
    "readonly": Fault(_lock, (0, 2), says=True),
    "worker": Fault(_rob, (0, 2), at=STEP, says=True),
}
"""By name: SIGKILL, death in the middle of a write, SIGTERM or SIGINT, a full disk, a file system that can no longer be
written to, SIGKILL for a data worker. The disk and its rights are as before when the command is given again."""
ORDER = ("kill", "torn", "kill", "full", "kill", "worker", "kill", "stop", "kill", "readonly", "kill", "kill", "kill")
"""The fault of case n is `ORDER[n % len(ORDER)]`."""


def fault_of(case: int, workers: bool) -> str:
    """The fault of a case; a job without data workers is killed instead of robbed of them."""
    name = ORDER[case % len(ORDER)]
    return "kill" if name == "worker" and not workers else name
