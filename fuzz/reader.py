"""What a reader is to the fuzzer, and how its files are made."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.mutate import mutated, mutated_bytes

Make = Callable[[random.Random], bytes]
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Reader:
    """`make` gives the bytes of a mutated file called `file`; `read` is given the path where they lie."""

    file: str
    make: Make
    read: Read
    share: int = 1
    """Weight among all readers."""


def json_of(*documents: Any) -> Make:
    """Mutations of one of the documents, as JSON (and as YAML: JSON is nearly a part of it); some of its bytes too."""

    def make(rng: random.Random) -> bytes:
        data = json.dumps(mutated(rng.choice(documents), rng)).encode()
        return mutated_bytes(data, rng) if rng.random() < 0.1 else data

    return make


def bytes_of(data: Callable[[], bytes]) -> Make:
    """Mutations of the bytes that `data` makes."""
    whole = cache(data)
    return lambda rng: mutated_bytes(whole(), rng)
