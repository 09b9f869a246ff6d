"""The errors that are a user's business, and the checks that word a wrong setting the same everywhere.

- Each message is one sentence or two: what was given, what is allowed, what to change. The command line prints it
  without a traceback; every other exception is a defect.
- A message has at most `LONGEST` characters and can be printed anywhere: `shown` shortens a value that is quoted in it
  and hides secrets, and whatever is still too long loses its middle.
- A DataLoader worker hands its error over as a printed traceback; `DataError` keeps the sentence alone.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

LONGEST = 500
"""Characters of a message."""
SECRETS = re.compile("secret|passw|credential|token(?!s|iz)|(api|access|private)_?key", re.IGNORECASE)
"""Words in the name of a setting that is neither shown nor kept; `reference_tokens` and tokenizers are no secrets."""
HIDDEN = "********"


class _Told(Exception):
    """A message of at most LONGEST characters, without lone surrogates, which no terminal takes."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(printable(message), LONGEST))


class ConfigError(_Told, ValueError):
    """A setting is wrong."""


class DataError(_Told, ValueError):
    """The data is bad. The message is one sentence: what was found, where, and what to do."""

    def __init__(self, message: str) -> None:
        if message.startswith("Caught ") and "Original Traceback" in message:  # torch's ExceptionWrapper
            message = message.rstrip().rsplit("\n", 1)[-1].partition(": ")[2]
        super().__init__(message.replace("\n", " "))  # a decoder's reason may have several lines


class RemoteError(DataError):
    """A remote file cannot be had: no fault of a sample, so no other one stands for it."""


class CheckpointError(_Told, RuntimeError):
    """A checkpoint cannot be written or used."""


class OutputError(_Told, OSError):
    """A file cannot be written; `strerror` is the system's reason."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.strerror = reason


class TrainingDiverged(RuntimeError):
    """The loss is no longer a number."""


class Stopped(RuntimeError):
    """A signal stopped the run, which is saved; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


class OutOfMemory(RuntimeError):
    """The device's memory is too small for these settings."""


class RankLost(RuntimeError):
    """Another process of the run has ended."""


class TreadWarning(UserWarning):
    """A warning of this package, for the user; each has this category or one below it."""


class RiskWarning(TreadWarning):
    """A setting that runs, but that is known to cost quality or to gain no speed."""


USER_ERRORS = (ConfigError, DataError, CheckpointError, TrainingDiverged, OutOfMemory, RankLost, ImportError, OSError)
"""What the command line reports as a sentence."""


def printable(text: str) -> str:
    """A text without lone surrogates, which stand for the bytes of a file's name that are not UTF-8; these are escaped.

    >>> printable("caf\\udce9.png")
    'caf\\\\udce9.png'
    """
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, longest: int) -> str:
    """A text that lacks its middle if it is longer than that.

    >>> shortened("0123456789" * 3, 13)
    '01234 ... 789'
    """
    if len(text) <= longest:
        return text
    tail = (longest - 5) * 2 // 5
    return f"{text[: longest - 5 - tail]} ... {text[-tail:]}"


def one_line(error: BaseException) -> str:
    """What an error says, in one line; the name of its class if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """The system's reason for an error, such as "No space left on device"; what it says if it has none."""
    return getattr(error, "strerror", None) or str(error)


def masked(value: Any, name: object = "") -> Any:
    """A value, or a document, with every secret in it hidden; `name` is that of its setting.

    >>> masked({"reference_tokens": "keep", "aws_secret_access_key": "x"})
    {'reference_tokens': 'keep', 'aws_secret_access_key': '********'}
    """
    if isinstance(value, Mapping):
        return {key: masked(item, key) for key, item in value.items()}
    if isinstance(value, str | bytes) and value and SECRETS.search(str(name)):
        return HIDDEN
    return [masked(item, name) for item in value] if isinstance(value, list | tuple) else value


def shown(value: object, longest: int = 120) -> str:
    """A value as a message quotes it: `repr`, without secrets and not too long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**longest:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        return shortened(repr(masked(value)), longest)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a very large number"


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Name the extra that a missing package comes with: `with needs("reading clips needs PyAV", "data"): import av`."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'tread-diffusion[{extra}]'") from error


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about a mistyped name: a full stop, and the known name that is close, if any."""
    close = difflib.get_close_matches(str(name)[:200], list(known), n=1)  # it takes time with the square of the length
    return f". Did you mean {close[0]!r}?" if close else "."


def check_keys(given: Iterable[object], known: Iterable[str], where: str) -> None:
    """Refuse keys nobody reads."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {shown(key)}{nearest(key, known)} Known keys: {_listed(known)}.")


def _listed(names: list[str], most: int = 300) -> str:
    """Names in a row; the last of many are left out."""
    listed = ", ".join(names)
    return listed if len(listed) <= most else f"{listed[:most].rpartition(',')[0]}, ..."


def check_int(value: object, name: str, low: int | None = None, fix: str = "") -> int:
    """A whole number, numpy's too, but not a bool, not below `low`; `fix` says how to make one of another type."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number. {fix}".strip())
    value = int(value)
    if low is not None and value < low:
        raise ConfigError(f"{name} is {shown(value)}; it must be at least {low}.")
    if abs(value) >= 2**63:
        raise ConfigError(f"{name} is {shown(value)}; it must be below 2^63.")
    return value


def is_finite(value: float) -> bool:
    """Whether a number fits in a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def check_fraction(value: object, name: str, *, closed: bool = True, fix: str = "") -> float:
    """A number in [0, 1], or in [0, 1) where `closed` is False."""
    allowed = "0 <= value <= 1" if closed else "0 <= value < 1"
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise ConfigError(f"{name} is {shown(value)}; it must be a number with {allowed}. {fix}".strip())
    if not (0 <= value <= 1 if closed else 0 <= value < 1):
        raise ConfigError(f"{name} is {shown(value)}; allowed is {allowed}. {fix}".strip())
    return float(value)


def check_choice(value: object, name: str, choices: Iterable[str]) -> str:
    """One of a few names."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is {shown(value)}{nearest(value, choices)} Choose one of: {', '.join(choices)}.")
    return value
