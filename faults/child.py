"""A command in a process of its own, forked so that everything is imported already, and struck on the way."""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tread.evaluate.compare
from faults.events import watch
from tread.cli import main

LONGEST = 600
"""Seconds after which a job hangs."""
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
    target.join(LONGEST)
    if target.exitcode is None:
        target.kill()
        target.join()
    return Ended(target.exitcode or 0, *(_drained(end) for end, _ in pipes))


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
