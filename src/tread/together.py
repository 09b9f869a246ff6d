"""Work that the processes of a run share: they meet in `gathered`, where an error of one of them ends the others too.

- Inside `together` an error is told where the others meet next. So nothing else in there may be a collective: none of
  torch's tells who failed.
- Others that are long in their own work are not waited for: the error is raised, and they notice, when they meet, that
  this process has ended.
- Without a process group all of it is for one process, and costs nothing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from tread.errors import RankLost, one_line

KNOWN = "The other processes of the run know of it."
"""The note of an error that need not be told to them any more."""
ARRIVALS = "tread/arrivals"
"""Key in the group's store of how often a process came to a meeting."""
PATIENCE = 10.0
"""Seconds that an error waits for the other processes before it is raised."""
Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """The values of all processes, in their order; a RankLost if one of them had an error on its way here."""
    try:
        _arrived(0)
        outcomes = _exchanged((value, None))
    except RuntimeError as error:  # one has ended without a word
        error.add_note(KNOWN)
        raise
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise RankLost(f"process {rank} of this run has ended, so this one ends too: {failure}")
    return [value for value, _ in outcomes]


@contextmanager
def together() -> Iterator[None]:
    """Work of each process by itself: all leave it together, or with the error of one.

    >>> with together():
    ...     print(sum(gathered(2)))
    2
    """
    try:
        yield
        gathered(None)
    except RankLost:
        raise
    except Exception as error:
        if distributed.is_initialized() and KNOWN not in getattr(error, "__notes__", ()):
            with suppress(RuntimeError):  # another process may be gone too, and this error is the one to report
                if _arrived(PATIENCE):
                    _exchanged((None, one_line(error)))
            error.add_note(KNOWN)
        raise


def _arrived(patience: float) -> bool:
    """Come to a meeting; whether all processes do within `patience` seconds.

    The store counts them, because a process cannot end while a collective of its own waits (gloo, torch 2.13).
    """
    if not distributed.is_initialized():
        return True
    store, deadline = _get_default_store(), time.monotonic() + patience
    count = store.add(ARRIVALS, 1)
    while count % distributed.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
        count = store.add(ARRIVALS, 0)
    return count % distributed.get_world_size() == 0


def _exchanged(outcome: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
    if not distributed.is_initialized():
        return [outcome]
    outcomes: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(outcomes, outcome)
    return outcomes
