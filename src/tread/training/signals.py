"""Signals that stop a run after its current step, on every rank after the same one.

A process that is alone also leaves a review (validation, pictures, an evaluation): it may take longer than a preempted
job is given, and the run is saved after it. Several processes cannot: a review may be a collective.
"""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta

from accelerate import Accelerator

from tread.training.ranks import Largest

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""Signals that save and stop a run; Windows lacks the last two, and Slurm can be told to send the last one."""


class Interrupted(BaseException):
    """A signal came inside `interruptible`; no `except Exception` of a review may take it for an error."""


Interruptible = Callable[[], AbstractContextManager[None]]


@contextmanager
def stopping(accelerator: Accelerator, timeout: timedelta) -> Iterator[tuple[Callable[[], int], Interruptible]]:
    """Yields a function to call after every step, which returns the number of the signal received, 0 for none, and a
    context inside which a signal raises `Interrupted` if this process is alone.

    Several processes all stop one step after the step in which a signal came. A second signal has its usual effect.
    """
    received: list[int] = []
    inside = False

    def note(number: int, _frame: object) -> None:
        received.append(number)
        if number == hangup:
            leave_terminal()
        signal.signal(number, before[signal.Signals(number)])
        if accelerator.is_main_process:
            said = f"\n{signal.Signals(number).name}: stopping after this step; once more stops at once.\n"
            with suppress(OSError):
                os.write(2, said.encode())  # print may be in the middle of a line
        if inside:
            raise Interrupted

    @contextmanager
    def interruptible() -> Iterator[None]:
        nonlocal inside
        inside = accelerator.num_processes == 1
        try:
            yield
        finally:
            inside = False

    largest = Largest(accelerator, timeout)  # the ranks must stop at the same step

    def asked() -> int:
        return largest(received[0] if received else 0)

    hangup = getattr(signal, "SIGHUP", None)
    numbers = [signal.Signals[name] for name in STOPPING if hasattr(signal, name)]
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_IGN:  # as nohup does
        numbers.remove(hangup)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield asked, interruptible
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
