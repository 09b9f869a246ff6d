"""The errors that are a user's business, and the checks that word a wrong setting the same everywhere.

- Each message is one sentence or two: what was given, what is allowed, what to change. The command line prints it
  without a traceback; every other exception is a defect.
- A DataLoader worker hands its error over as a printed traceback; `DataError` keeps the sentence alone.
"""

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A setting is wrong."""


class DataError(ValueError):
    """The data is bad. The message is one sentence: what was found, where, and what to do."""

    def __init__(self, message: str) -> None:
        if message.startswith("Caught ") and "Original Traceback" in message:  # torch's ExceptionWrapper
            message = message.rstrip().rsplit("\n", 1)[-1].partition(": ")[2]
        super().__init__(message.replace("\n", " "))  # a decoder's reason may have several lines


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used."""


class TrainingDiverged(RuntimeError):
    """The loss is no longer a number."""


class Stopped(RuntimeError):
    """A signal stopped the run, which is saved; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


class OutOfMemory(RuntimeError):
    """The device's memory is too small for these settings."""


class RiskWarning(UserWarning):
    """A setting that runs, but that is known to cost quality or to gain no speed."""


USER_ERRORS = (ConfigError, DataError, CheckpointError, TrainingDiverged, OutOfMemory, ImportError, OSError)
"""What the command line reports as a sentence."""


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Name the extra that a missing package comes with: `with needs("reading clips needs PyAV", "data"): import av`."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'tread-diffusion[{extra}]'") from error


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about a mistyped name: a full stop, and the known name that is close, if any."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f". Did you mean {close[0]!r}?" if close else "."


def check_keys(given: Iterable[object], known: Iterable[str], where: str) -> None:
    """Refuse keys nobody reads."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, known)} Known keys: {', '.join(known)}.")


def check_int(value: object, name: str, low: int | None = None, fix: str = "") -> int:
    """A whole number, not a bool, not below `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number. {fix}".strip())
    if low is not None and value < low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}. {fix}".strip())
    return value


def check_fraction(value: object, name: str, *, closed: bool = True, fix: str = "") -> float:
    """A number in [0, 1], or in [0, 1) where `closed` is False."""
    allowed = "0 <= value <= 1" if closed else "0 <= value < 1"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a number with {allowed}. {fix}".strip())
    if not (0 <= value <= 1 if closed else 0 <= value < 1):
        raise ConfigError(f"{name} is {value}; allowed is {allowed}. {fix}".strip())
    return float(value)


def check_choice(value: object, name: str, choices: Iterable[str]) -> str:
    """One of a few names."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is {value!r}{nearest(value, choices)} Choose one of: {', '.join(choices)}.")
    return value
