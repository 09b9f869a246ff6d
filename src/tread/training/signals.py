"""Signals that stop a run after its current step, on every rank after the same one."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from accelerate import Accelerator

from tread.training.ranks import Largest

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""Signals that save and stop a run; Windows lacks the last two, and Slurm can be told to send the last one."""


@contextmanager
def stopping(accelerator: Accelerator, timeout: timedelta) -> Iterator[Callable[[], int]]:
    """Yields a function to call after every step; it returns the number of the signal received, 0 for none.

    Several processes all stop one step after the step in which a signal came. A second signal has its usual effect.
    """
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
        if number == hangup:
            leave_terminal()
        signal.signal(number, before[signal.Signals(number)])

    largest = Largest(accelerator, timeout)  # the ranks must stop at the same step

    def asked() -> int:
        return largest(received[0] if received else 0)

    hangup = getattr(signal, "SIGHUP", None)
    numbers = [signal.Signals[name] for name in STOPPING if hasattr(signal, name)]
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_IGN:  # as nohup does
        numbers.remove(hangup)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield asked
        largest.settle()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Discard further output if the terminal was closed: printing to it would raise an error."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
