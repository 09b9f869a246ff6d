"""Settings in layers: each file and each `name=value` overrides the ones before it.

- `settings_of` lists the settings: dotted names such as `train.steps`, with the type and documentation of each.
- `merged` merges one mapping over another, section by section. `assigned` applies `name=value`: the type of the setting
  decides how the value is parsed. Names may lead into a free mapping (`model.tread_config.routes.0.selection_ratio`).
- A name that does not exist is refused with the nearest one that does.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, get_origin

from tread.config.documents import check_text, parse_yaml, settled
from tread.config.fields import Field, fields_of, options_of
from tread.config.schema import from_text
from tread.errors import ConfigError, masked, nearest, shortened, shown
from tread.words import counted

Settings = dict[str, Field]
"""Settings by dotted name."""


def settings_of(owner: Callable[..., Any], groups: Mapping[str, Callable[..., Any]] | None = None) -> Settings:
    """Every setting of a dataclass by dotted name; a section in `groups` has the settings of the option chosen there.

    >>> from tread.routing.schedule import Schedule
    >>> list(settings_of(Schedule))[:2]
    ['warmup_steps', 'cooldown_fraction']
    """
    made: Settings = {}
    for name, field in fields_of(owner).items():
        section = (groups or {}).get(name) or next(filter(dataclasses.is_dataclass, options_of(field.hint)), None)
        if section is None:
            made[name] = field
            continue
        made |= {f"{name}.{inner}": inside for inner, inside in settings_of(section).items()}  # pyright: ignore
        if name in (groups or {}):
            made[f"{name}.name"] = Field(f"{name}.name", str, field.default, field.doc)
    return made


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`lower` overridden by `upper`; mappings are merged recursively, everything else is replaced.

    Routes and a preset of routes replace each other.
    """
    result = dict(lower)
    for name, value in upper.items():
        below = result.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and not {"routes", "preset"} & value.keys():
            value = merged(below, value)
        result[name] = value
    return result


def assigned(config: Mapping[str, Any], text: str, known: Settings, command: str) -> dict[str, Any]:
    """`config` with the override `text`, "name=value", applied; `command` is named in errors."""
    name, value = split_assignment(text)
    name = re.sub(r"\[(\d+)\]", r".\1", name)  # routes[0] and routes.0 are the same
    if name in known:
        return _put(config, name, from_text(known[name].hint, value, name))
    if any(other.startswith(f"{name}.") for other in known):
        section = parse_yaml(value, f"the value of {name}, {shown(value)},")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} is {shown(settled(section))}; it is a section: set {name}.SETTING=VALUE.")
        return merged(config, _put({}, name, section))
    free = [other for other in known if name.startswith(f"{other}.") and _is_free(known[other].hint)]
    if free:
        return _put(config, name, settled(parse_yaml(value, f"the value of {name}, {shown(value)},")))
    raise no_setting(name, known, command)


def split_assignment(text: str, example: str = "train.steps") -> tuple[str, str]:
    """The name and the value of "name=value"."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"cannot read {shown(text)}: write name=value, e.g. {example}=500, after at most one file.")
    check_text(text, "the command line")
    return name.strip(), value


def no_setting(name: str, known: Settings, command: str) -> ConfigError:
    """The error for a name that is no setting."""
    sections = {section for other in known for section in _prefixes(other)}
    like = nearest(name, [*known, *sections])
    return ConfigError(f"there is no setting {shortened(name, 120)}{like} `{command} --help` lists them all.")


def check_names(config: Mapping[str, Any], known: Settings, command: str, source: str = "") -> None:
    """Refuse settings that do not exist, by their dotted names; `source` is the file that has them."""
    sections = {section for other in known for section in _prefixes(other)}
    for name, value in _dotted(config, sections):
        if name not in known and not (name in sections and isinstance(value, Mapping)):
            if name in sections:
                raise ConfigError(f"{name} is {shown(settled(value))}; it must be a mapping of settings.")
            prefix = f"{source}: " if source else ""
            raise ConfigError(f"{prefix}{no_setting(name, known, command)}")


def flatten(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings by dotted name; mappings in a list, such as routes, are numbered by their index."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        flat |= flatten(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return flat


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which two configs differ, as "train.steps: 100 -> 200"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {masked(before.get(name), name)} -> {masked(after.get(name), name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _put(config: Mapping[str, Any], name: str, value: object, where: str = "") -> dict[str, Any]:
    """`config` with one value set, by its dotted name; lists are entered by index."""
    head, _, rest = name.partition(".")
    if not rest:
        return {**config, head: value}
    below, dotted = config.get(head, {}), f"{where}{head}"
    if isinstance(below, list | tuple):
        return {**config, head: _put_item(list(below), rest, value, dotted)}
    if not isinstance(below, Mapping):
        raise ConfigError(f"{dotted}.{rest} cannot be set: {dotted} is {shown(settled(below))}, which has no parts.")
    return {**config, head: _put(below, rest, value, f"{dotted}.")}


def _put_item(items: list[Any], name: str, value: object, where: str) -> list[Any]:
    index, _, rest = name.partition(".")
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(
            f"{where}.{index} cannot be set: {where} has {counted(len(items), 'item')}, counted from 0; "
            "to make it longer, give the whole list."
        )
    item = items[int(index)] if isinstance(items[int(index)], Mapping) else {}
    items[int(index)] = _put(item, rest, value, f"{where}.{index}.") if rest else value
    return items


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _dotted(config: Mapping[str, Any], sections: set[str], where: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values, with sections flattened."""
    found: list[tuple[str, Any]] = []
    for name, value in config.items():
        dotted = f"{where}{name}"
        found.append((dotted, value))
        if dotted in sections and isinstance(value, Mapping):
            found += _dotted(value, sections, f"{dotted}.")
    return found


def _is_free(hint: Any) -> bool:
    return any(get_origin(option) is dict for option in options_of(hint))
