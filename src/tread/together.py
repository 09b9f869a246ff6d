"""Work that the processes of a run share: they meet in `gathered`, where an error of one of them ends the others too.

- Inside `together` an error is told where the others meet next. So nothing else in there may be a collective, and the
  error needs no timeout: none of torch's collectives tells who failed, and NCCL does not notice that a process ended.
- Without a process group all of it is for one process, and costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch import distributed

from tread.errors import RankLost, one_line

TOLD = "The other processes of the run were told."
"""The note of an error that `together` has told: a block around it does not tell it again."""
Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """The values of all processes, in their order; a RankLost if one of them had an error on its way here."""
    outcomes = _exchanged((value, None))
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
        if distributed.is_initialized() and TOLD not in getattr(error, "__notes__", ()):
            with suppress(RuntimeError):  # another process may be gone too, and this error is the one to report
                _exchanged((None, one_line(error)))
            error.add_note(TOLD)
        raise


def _exchanged(outcome: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
    if not distributed.is_initialized():
        return [outcome]
    outcomes: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(outcomes, outcome)
    return outcomes
