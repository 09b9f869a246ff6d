"""JSON, YAML, TOML and environment files, all read into one tree of plain values.

- An unquoted YAML scalar that looks like a number or a truth value is kept as `Plain`, the text as it was written. A
  text field takes it verbatim (`path: 2024`, `mixed_precision: no`), any other field takes its value: the type of the
  field decides, not the YAML loader (`schema.convert`). `settled` gives the values where no field is known.
- A key that is given twice in one mapping is refused. Dates stay text, and `1e-4` is a number.
- The values of an environment file (`.env`) are all `Plain`; a later line wins, as in a shell.
- A document is a tree of mappings, lists, text, numbers, truth values and null, of limited size: tags that make other
  objects, recursive documents, and YAML whose aliases expand without bound are refused.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tread.errors import ConfigError, one_line, shown
from tread.files import is_file

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
YAML_SUFFIXES = (".yaml", ".yml")
ENV_SUFFIX = ".env"
LARGEST, VALUES, LEVELS, DIGITS = 2**20, 100_000, 32, 40
"""Limits of a document: characters, values with aliases expanded, nesting depth, digits of an integer."""


class Plain(str):
    """An unquoted scalar that YAML reads as a number or a truth value, as it was written."""

    @property
    def value(self) -> object:
        """The number or truth value; the text itself if it is neither."""
        text = self.lower().replace("_", "")
        if text in _TRUTH:
            return _TRUTH[text]
        for number in (_integer, lambda text: int(text[:DIGITS], 0), lambda text: float(text.replace(".inf", "inf"))):
            try:
                return number(text)
            except ValueError:
                continue
        return str(self)


def _integer(text: str) -> float:
    """An integer; a float if it has more than DIGITS digits."""
    return int(text) if len(text) <= DIGITS else float(text)


def settled(document: object) -> Any:
    """A document with the value of each scalar, as YAML defines it.

    >>> settled(parse_yaml("{rate: 1e-4, name: 12b, on: [yes, '1']}"))
    {'rate': 0.0001, 'name': '12b', 'on': [True, '1']}
    """
    if isinstance(document, Plain):
        return document.value
    if isinstance(document, Mapping):
        return {str(key): settled(value) for key, value in document.items()}
    return [settled(item) for item in document] if isinstance(document, list | tuple) else document


def find_recipe(path: Path) -> Path:
    """The path of a config; `recipes/...` falls back from the working directory to the installed package."""
    package = Path(__file__).resolve().parents[1]
    if path.parts[:1] == ("recipes",) and not is_file(path):
        return next((root / path for root in (package, package.parents[1]) if is_file(root / path)), path)
    return path


def read_document(path: Path, setting: str = "") -> object:
    """The content of a file, read by its suffix; `setting` is the setting that names it, if one does."""
    named = shown(str(path), 200)
    what = f"{setting} names {named}, which" if setting else f"the config file {named}"
    if not is_file(path):
        if not setting and "=" in path.name:
            raise ConfigError(f"{named} is a setting, not a config file: name the file first, then settings.")
        beside = "" if path.is_absolute() else f" (paths are relative to the working directory, {Path.cwd()})"
        raise ConfigError(f"{what} does not exist{beside}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is not text; a config is JSON, YAML or TOML in UTF-8.") from None
    suffix = ENV_SUFFIX if path.name.lower() == ENV_SUFFIX else path.suffix.lower()
    readers = {ENV_SUFFIX: parse_env, ".toml": parse_toml} | dict.fromkeys(YAML_SUFFIXES, parse_yaml)
    return readers.get(suffix, parse_json)(text, what)


def parse_json(text: str, what: str = "the text") -> object:
    """The content of a JSON text; `what` names it in an error."""

    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made: dict[str, object] = {}
        for key, value in pairs:
            if key in made:
                raise ConfigError(f"{what} gives {shown(key)} twice in one mapping; keep one.")
            made[key] = value
        return made

    _check_length(text, what)
    try:
        return _checked(json.loads(text, object_pairs_hook=mapping, parse_int=_integer), text, what)
    except RecursionError:
        raise ConfigError(f"{what} is nested more than {LEVELS} levels deep.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{what} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}."
        ) from None


def parse_toml(text: str, what: str = "the text") -> dict[str, Any]:
    """The content of a TOML text; `what` names it in an error.

    >>> parse_toml("rate = 1e-4\\nday = 2024-01-02")
    {'rate': 0.0001, 'day': '2024-01-02'}
    """
    _check_length(text, what)
    try:
        document = _without_dates(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid TOML: {str(error)[:200]}.") from None
    _checked(document, text, what)
    return document


def _without_dates(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_dates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_dates(item) for item in value]
    return str(value) if hasattr(value, "isoformat") else value


def parse_env(text: str, what: str = "the text") -> dict[str, Any]:
    """The variables of an environment file, null where one is empty; `what` names the file in an error.

    Nothing is run: `$NAME` becomes the value of a variable that the file set before, and stays otherwise.

    >>> parse_env("export RATE=1e-4  # the highest\\nARGS='--a --b'\\nARGS=$ARGS")
    {'RATE': '1e-4', 'ARGS': '--a --b'}
    """
    _check_length(text, what)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{what} is no environment file ({error}): write one NAME=value per line.") from None
    variables: dict[str, Any] = {}
    grown = 0

    def value_of(found: re.Match[str]) -> str:
        nonlocal grown
        name = found[1] or found[2]
        value = (variables[name] or "") if name in variables else found[0]
        grown += len(value)  # counted over the whole file: variables that expand each other can double at every line
        if grown > LARGEST:
            raise ConfigError(f"{what} grows to more than {LARGEST} characters by its variables; write them out.")
        return value

    for word in words:
        name, equals, value = word.partition("=")
        if name == "export" and not equals:
            continue
        if not equals or not name.isidentifier():
            raise ConfigError(f"{what} has {word[:60]!r}; write one NAME=value per line, spaces in quotes.")
        value = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value_of, value)
        variables[name] = Plain(value) if value else None
    return variables


def parse_yaml(text: str, what: str = "the text") -> object:
    """The content of a YAML text, ambiguous scalars as `Plain`; `what` names it in an error."""
    import yaml

    _check_length(text, what)
    try:
        return _checked(yaml.load(text, Loader=_loader()), text, what)
    except RecursionError:
        raise ConfigError(f"{what} is nested more than {LEVELS} levels deep.") from None
    except (ValueError, OverflowError) as error:  # an escape such as \UFFFFFFFF
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what} is not valid YAML: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or one_line(error)
        raise ConfigError(f"{what} is not valid YAML{position}: {problem}.") from None


def _check_length(text: str, what: str) -> None:
    if len(text) > LARGEST:
        raise ConfigError(f"{what} has {len(text)} characters; at most {LARGEST} are read.")


def _checked(document: object, text: str, what: str) -> object:
    """The document, if it is a tree of limited size and its text can be written to a file."""
    waiting, count = [(document, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > max(VALUES, len(text)):
            raise ConfigError(f"{what} grows to more than {VALUES} values by its aliases; write it without them.")
        if depth > LEVELS:
            raise ConfigError(f"{what} is nested more than {LEVELS} levels deep, or contains itself.")
        if isinstance(value, Mapping):
            waiting += [(key, depth + 1) for key in value]
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]
        elif isinstance(value, str):
            check_text(value, what)
    return document


def check_text(text: str, what: str) -> None:
    """Refuse a text that no file can hold as UTF-8, or that no path may contain."""
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{what} has a character that is not text, in {shown(text)}; remove it.")


@cache
def _loader() -> Any:
    """PyYAML's safe loader, with `Plain` scalars and without keys that are given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            super().fetch_flow_collection_start(TokenClass)
            if self.flow_level > LEVELS:  # PyYAML's time grows with the square of the depth
                problem = f"it is nested more than {LEVELS} levels deep"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > VALUES:  # `<<: [*a, *a]` may double it at every level
                problem = f"a mapping grows to more than {VALUES} keys by `<<`"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    problem = f"{shown(key.value)} is given twice in one mapping; keep one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
            return super().construct_mapping(node, deep)

    made = ("null", "str", "seq", "map")  # no dates, bytes or sets: JSON has none either
    Loader.yaml_constructors = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in made
    }
    # YAML 1.1 requires a dot in floats, so that `1e-4` would be text, and parses dates
    number = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|^[-+]?\.inf$|^\.nan$", re.IGNORECASE)
    scalars = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:bool")
    dropped = (*scalars[:1], "tag:yaml.org,2002:timestamp")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in dropped]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    for tag in scalars:
        Loader.add_constructor(tag, lambda loader, node: Plain(node.value))
    return Loader
