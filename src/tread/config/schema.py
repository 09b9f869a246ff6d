"""Parse a mapping into a typed dataclass, or raise one sentence that says which setting is wrong.

- The dataclasses hold types, defaults, documentation and cross-field checks (`__post_init__`). For any other class,
  such as a dataset, the signature is used.
- Supported types: bool, int, float (an int is accepted), str, Path, `Literal`, `X | None`, `tuple[X, ...]`,
  `tuple[X, X]`, nested dataclasses, and `dict[str, Any]` for what another part of the package validates.
- Text from a command line and unquoted YAML scalars are parsed by the type of the field: verbatim for text, as YAML
  otherwise.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from tread.config.documents import Plain, parse_yaml, settled
from tread.config.fields import MISSING, describe, fields_of, options_of
from tread.errors import ConfigError, check_keys, is_finite, shown

T = TypeVar("T")


def parse(cls: type[T], config: object, where: str = "") -> T:
    """An instance of the dataclass `cls` from `config`; `where` is the dotted name of the section.

    >>> @dataclasses.dataclass(kw_only=True)
    ... class Point:
    ...     x: int
    >>> parse(Point, {"x": 3})
    Point(x=3)
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where or 'the config'} is {shown(config)}; it must be a mapping of settings.")
    return cls(**arguments(cls, config, where))


def arguments(function: Callable[..., Any], config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The keyword arguments of a function or class from `config`, each converted to its type.

    >>> def draw(*, size: int, flip: bool = False) -> None: ...
    >>> arguments(draw, {"size": 64})
    {'size': 64}
    """
    fields = fields_of(function)
    check_keys(config, fields, where or "config")
    values = {}
    for name, field in fields.items():
        dotted = f"{where}.{name}" if where else name
        if name in config:
            values[name] = convert(field.hint, config[name], dotted)
        elif field.default is MISSING:
            raise ConfigError(f"{dotted} is missing; it must be {describe(field.hint)}.")
    return values


def convert(hint: Any, value: object, name: str) -> Any:
    """Convert a value to the type `hint`, or raise an error that names the setting.

    >>> convert(str, Plain("2024"), "path"), convert(float | None, Plain("1e-4"), "rate")
    ('2024', 0.0001)
    """
    if isinstance(value, Plain):
        value = str(value) if takes_text(hint, value) else _number(hint, value)
    for option in options_of(hint):
        if _fits(option, value):
            return _converted(option, value, name)
    raise ConfigError(f"{name} is {shown(settled(value))}; it must be {describe(hint)}.")


def _number(hint: Any, text: Plain) -> object:
    """The value of a scalar; a whole number may be written with an exponent, such as 4e5 steps."""
    value = text.value
    whole = isinstance(value, float) and value.is_integer() and "e" in text.lower()
    return int(value) if whole and int in options_of(hint) else value  # pyright: ignore[reportArgumentType]


def from_text(hint: Any, text: str, name: str) -> object:
    """Parse the text of `name=text` on a command line for a field of this type; `convert` checks the value.

    Quotes around the whole text, which other tools require, are stripped.

    >>> from_text(str | None, "2024", "path"), convert(tuple[float, ...], from_text(tuple, "[0.9, 1]", "b"), "b")
    ('2024', (0.9, 1.0))
    """
    options = options_of(hint)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if text == "null" and types.NoneType in options:
        return None
    structured = text.lstrip().startswith(("{", "[")) and any(get_origin(option) in (tuple, dict) for option in options)
    if takes_text(hint, text):
        if not structured:
            return text
        try:
            return parse_yaml(_spaced(text))
        except ConfigError:  # text that only starts like a list
            return text
    return parse_yaml(_spaced(text), f"the value of {name}, {shown(text)},")


def _spaced(text: str) -> str:
    """A flow mapping with the space after each colon that YAML requires: {a:1} -> {a: 1}."""
    return re.sub(r"(?<=\w):(?=[^\s/\\])", ": ", text) if text.lstrip().startswith(("{", "[")) else text


def takes_text(hint: Any, text: str) -> bool:
    """Whether a field of this type takes this text verbatim."""
    return any(
        option in (str, Path) or (get_origin(option) is Literal and str(text) in get_args(option))
        for option in options_of(hint)
    )


def _converted(hint: Any, value: Any, name: str) -> Any:
    """Convert a value that `_fits` accepts, recursively."""
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, name)  # pyright: ignore[reportArgumentType]  (a class, not an instance)
    if get_origin(hint) is tuple:
        return tuple(convert(get_args(hint)[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if get_origin(hint) is dict:
        return settled(value)
    return float(value) if hint is float else value


def _fits(hint: Any, value: object) -> bool:
    if get_origin(hint) is Literal:
        return (
            isinstance(value, str | int | float)
            and value in get_args(hint)
            and type(value) in {type(choice) for choice in get_args(hint)}
        )
    if get_origin(hint) is tuple:
        wanted = get_args(hint)
        return isinstance(value, list | tuple) and (wanted[-1] is ... or len(value) == len(wanted))
    if get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, hint)


def plain(config: Any) -> Any:
    """A dataclass as mappings and lists, the form in which a run keeps its settings."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {name: plain(value) for name, value in config.items()}
    return [plain(item) for item in config] if isinstance(config, list | tuple) else config


def several(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The texts of a setting that may be one or several."""
    return () if value is None else (value,) if isinstance(value, str) else value


def at_least(config: object, section: str, **bounds: float) -> None:
    """Check lower bounds of a section's fields: `at_least(self, "train", steps=1)`; "" is no section."""
    for name, bound in bounds.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ConfigError(f"{section}.{name}".lstrip(".") + f" is {value}; it must be at least {bound}.")
