"""Batches that threads read one ahead of their use."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    pool: ThreadPoolExecutor, read: Callable[[Item], Result], items: Sequence[Item], size: int
) -> Iterator[tuple[Sequence[Item], list[Result]]]:
    """Slices of `size` items, each with the results of `read`; the next one is read in the meantime."""
    batches = [items[first : first + size] for first in range(0, len(items), size)]
    following = [pool.submit(read, item) for batch in batches[:1] for item in batch]
    for batch, after in zip_longest(batches, batches[1:], fillvalue=()):
        current, following = following, [pool.submit(read, item) for item in after]
        yield batch, [future.result() for future in current]
