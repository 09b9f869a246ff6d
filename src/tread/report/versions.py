"""The versions of packages that tread was tested with, beside those installed.

`constraints.txt` has the newest and `constraints-oldest.txt`, if there is one, the oldest; the wheel carries them.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEWEST, OLDEST = "constraints.txt", "constraints-oldest.txt"
PACKAGE = Path(__file__).resolve().parents[1]


def tested(file: str) -> dict[str, str]:
    """Version by distribution from a constraints file, in the package or at the root of a clone; empty without one."""
    path = next((root / file for root in (PACKAGE, PACKAGE.parents[1]) if (root / file).is_file()), None)
    lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    pins = (re.match(r"([\w.-]+)==([^\s;#]+)", line) for line in lines)
    return {_normal(match[1]): match[2] for match in pins if match}


def installed(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def beside_tested(name: str, found: str) -> str:
    """A phrase comparing a version with the tested ones; empty if none is known."""
    newest, oldest = (tested(file).get(_normal(name)) for file in (NEWEST, OLDEST))
    if newest is None:
        return ""
    if _key(found) > _key(newest):
        return f"newer than {newest}, the newest tested"
    if oldest is not None and _key(found) < _key(oldest):
        return f"older than {oldest}, the oldest tested"
    if oldest is not None and oldest != newest:
        return f"tested with {oldest} to {newest}"
    return f"tested with {newest}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _key(text: str) -> tuple[int, ...]:
    """The numbers of a release, `2.13.0+cu130` -> (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])
