"""Prefetch in threads: the next batch is read while the current one is used."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    pool: ThreadPoolExecutor, read: Callable[[Item], Result], items: Sequence[Item], size: int
) -> Iterator[tuple[Sequence[Item], list[Result]]]:
    """Yield slices of `size` items with the results of `read`; the next slice is read while one is used."""
    batches = [items[first : first + size] for first in range(0, len(items), size)]
    following = [pool.submit(read, item) for batch in batches[:1] for item in batch]
    for batch, after in zip_longest(batches, batches[1:], fillvalue=()):
        current, following = following, [pool.submit(read, item) for item in after]
        yield batch, [future.result() for future in current]
