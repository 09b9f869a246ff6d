"""A command in a process of its own, forked so that everything is imported already, and struck on the way."""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tread.evaluate.compare
from faults.events import watch
from tread.cli import main
from tread.data.workers import own_bars

LONGEST = 120
"""Seconds after which a job counts as hanging; the slowest takes 7 on one core."""
STACKS = signal.SIGUSR2
"""Makes a job print the stack of each thread."""
IMPORTED = (
    *("tread.pretrain.run", "tread.finetune.config", "tread.finetune.run", "tread.data.shards", "tread.report.scores"),
    *("sklearn.datasets", "PIL.PngImagePlugin"),
)
"""What jobs import when they need it; a child would import it again in every case."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status, or minus the signal's number, and what it printed."""

    status: int
    out: str
    err: str
    hung: bool = False
    """Whether it had to be killed; `err` then ends with the stack of each of its threads."""

    def __str__(self) -> str:
        """How it ended and its last words; a stack is shown whole, since it begins with the innermost call."""
        return f"hung for {LONGEST} s: {self.err}" if self.hung else f"ended with {self.status}: {self.err[-3000:]}"


def run(
    command: list[str], folder: Path, tell: Callable[[str], None], prepare: Callable[[], None] = lambda: None
) -> Ended:
    """Run `tread COMMAND` in `folder`; there `prepare` is called first, and `tell` with each event."""
    for name in IMPORTED:
        importlib.import_module(name)
    pipes = [os.pipe(), os.pipe()]
    target = multiprocessing.get_context("fork").Process(target=_child, args=(command, folder, pipes, tell, prepare))
    target.start()
    for _, end in pipes:
        os.close(end)
    deadline = time.monotonic() + LONGEST
    while target.exitcode is None and time.monotonic() < deadline:  # not join: it waits for orphaned data workers too
        time.sleep(0.01)
    if hung := target.exitcode is None:
        os.kill(target.pid or 0, STACKS)
        time.sleep(1)
        target.kill()
        target.join()
    return Ended(target.exitcode or 0, *(_drained(end) for end, _ in pipes), hung=hung)


def _child(
    command: list[str],
    folder: Path,
    pipes: list[tuple[int, int]],
    tell: Callable[[str], None],
    prepare: Callable[[], None],
) -> None:
    for number, (_, end) in enumerate(pipes, 1):  # pipes, not files: a limit on the size of files is one of the faults
        os.dup2(end, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as in a terminal, whatever started the tests
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    faulthandler.register(STACKS, file=2)
    own_bars()  # else a killed job takes along the lock of all later ones
    os.chdir(folder)
    os.environ |= {"XDG_CACHE_HOME": str(folder / "home"), "TREAD_CONFIGS": str(folder), "HF_HUB_OFFLINE": "1"}
    tread.evaluate.compare.SAVE_SECONDS = -1  # a save after every batch, not every minute
    prepare()
    watch(folder, tell)
    main(command)


def _drained(end: int) -> str:
    """What is in a pipe now: data workers that outlive a killed job for seconds may hold its other end."""
    os.set_blocking(end, False)
    with open(end, "rb") as file:
        return (file.read() or b"").decode(errors="replace")
