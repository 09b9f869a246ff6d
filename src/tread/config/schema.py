"""From a plain mapping to a typed dataclass, or one sentence that says which setting is wrong.

- The dataclasses hold types and cross-field checks (`__post_init__`); default values live in the YAML that users
  read and edit, so that there is one copy of them. A field with a default is one a config may leave out.
- A class outside this folder needs no dataclass for its settings: `arguments` reads them off its signature.
- Understood: bool, int, float (a whole number will do), str, Path, `Literal`, `X | None`, `tuple[X, ...]`, nested
  dataclasses and `dict[str, Any]` for what another part of the package validates.
"""

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tread.errors import ConfigError, check_keys

T = TypeVar("T")
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    types.NoneType: "null",
}


def parse(cls: type[T], config: object, where: str = "") -> T:
    """An instance of the dataclass `cls` from `config`; `where` is the dotted name of the section.

    >>> @dataclasses.dataclass(kw_only=True)
    ... class Point:
    ...     x: int
    >>> parse(Point, {"x": 3})
    Point(x=3)
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where or 'the config'} is {config!r}; it must be a mapping of settings.")
    return cls(**arguments(cls, config, where))


def arguments(function: Callable[..., Any], config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The keyword arguments of a function or class from `config`, each checked against its annotation.

    >>> def draw(*, size: int, flip: bool = False) -> None: ...
    >>> arguments(draw, {"size": 64})
    {'size': 64}
    """
    parameters = inspect.signature(function).parameters
    check_keys(config, parameters, where or "config")
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    values = {}
    for name, parameter in parameters.items():
        dotted = f"{where}.{name}" if where else name
        if name in config:
            values[name] = convert(hints[name], config[name], dotted)
        elif parameter.default is parameter.empty:
            raise ConfigError(f"{dotted} is missing; it must be {_describe(hints[name])}.")
    return values


def convert(hint: Any, value: object, name: str) -> Any:
    """A value of the type `hint`, or an error that names the setting."""
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, name)  # pyright: ignore[reportArgumentType]  (a class, not an instance)
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not types.NoneType]
        if value is None and len(options) < len(get_args(hint)):
            return None
        for option in options:
            if _fits(option, value):
                return convert(option, value, name)
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(get_args(hint)[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif _fits(hint, value):
        return float(value) if hint is float else value  # pyright: ignore[reportArgumentType]
    raise ConfigError(f"{name} is {value!r}; it must be {_describe(hint)}.")


def _fits(hint: Any, value: object) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint) and type(value) in {type(choice) for choice in get_args(hint)}
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple)
    if get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    """A type in words."""
    origin = get_origin(hint)
    if origin is Literal:
        choices = [repr(choice) for choice in get_args(hint)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    if origin is tuple:
        return f"a list ({_describe(get_args(hint)[0])} each)"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a mapping of settings"
    return WORDS[hint]


def at_least(config: object, section: str, **bounds: float) -> None:
    """Check lower bounds of a section's fields: `at_least(self, "train", steps=1)`; "" is no section."""
    for name, bound in bounds.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ConfigError(f"{section}.{name}".lstrip(".") + f" is {value}; it must be at least {bound}.")
