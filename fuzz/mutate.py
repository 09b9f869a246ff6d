"""Seeded mutations of documents and of bytes."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 1e-308, float("inf"), float("nan"), 2**31, 2**63, -(2**64), 10**400,
    "", " ", "x", "null", "nan", "1e400", "9" * 5000, "0x" + "f" * 5000, "a" * 300, "b/" * 3000, "c" * 20000, "\ud800",
    "\0", "\n\r\t", "é漢字", "../..", "/", "~", "{", "[", "${HOME}", "%s", "--x", "a.b.c", "2024-01-01", "paper",
    "latest", [], {}, [[]], [{}], [None], {"": None}, {"name": []}, ["x", 1, {}], {"a": {"b": {"c": [1, 2]}}},
    ["y"] * 500, {str(i): i for i in range(200)},
)  # fmt: skip
"""Values that a field does not expect."""


def _paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from _paths(value, (*path, key))


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))  # it may be changed in its turn


def _deep(document: Any, levels: int) -> Any:
    for _ in range(levels):
        document = [document]
    return document


def mutated(document: Any, rng: random.Random) -> Any:
    """A document with one to three values replaced, renamed, removed, wrapped or moved."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = list(_paths(document))
        path = rng.choice(paths)
        if not path or not isinstance(parent := _at(document, path[:-1]), dict | list):
            document = _odd(rng) if rng.random() < 0.02 else document
            continue
        key = path[-1]
        match rng.randrange(8):
            case 0 | 1 | 2:
                parent[key] = _odd(rng)
            case 3:
                del parent[key]
            case 4 if isinstance(parent, dict):
                parent[_renamed(key, rng)] = parent.pop(key)
            case 5:
                parent[key] = {key: parent[key]} if rng.random() < 0.5 else _deep(parent[key], rng.choice((1, 2, 300)))
            case 6:
                parent[key] = json.loads(json.dumps(_at(document, rng.choice(paths))))
            case _:
                parent[key] = mutated_text(parent[key], rng) if isinstance(parent[key], str) else _odd(rng)
    return document


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        if not isinstance(document, dict | list):
            return None
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):  # an earlier mutation has taken it away
            return None
    return document


def _renamed(name: Any, rng: random.Random) -> str:
    odd = rng.choice([value for value in ODD if isinstance(value, str)])
    return rng.choice((f"{name}s", str(name)[:-1], f"--{name}", odd))


def mutated_text(text: str, rng: random.Random) -> str:
    """A text with a slice removed, repeated or replaced."""
    first, last = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    return (
        text[:first]
        + rng.choice(("", text[first:last] * 2, "\ud800", "9" * 5000, "\0", ": ", "a" * 3000))
        + text[last:]
    )


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with one to four bits, slices or ends changed."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + rng.randrange(1, 64)]
            case 4:
                changed[at:at] = rng.choice((b"\0" * 16, b"\xff" * 8, b"\x80", b"9" * 400, b"PK\3\4", b"{", b"&a [*a]"))
            case 5:
                changed[at:at] = changed[at : at + rng.randrange(1, 200)]
            case _ if at < len(changed):
                changed[at] = rng.choice(b"0123456789-\"'{}[]:,&*! \n\0\xff")
    return bytes(changed)
