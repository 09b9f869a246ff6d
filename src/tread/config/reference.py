"""Settings as commented YAML: every field with its default, and its documentation as a comment."""

import json
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from tread.config.fields import MISSING, Field, fields_of
from tread.config.schema import plain

COLUMN, WIDTH = 28, 132


def yaml_lines(fields: Mapping[str, Field], indent: int = 0) -> list[str]:
    """One line per field, `name: default  # documentation`."""
    lines: list[str] = []
    for name, field in fields.items():
        required = field.default is MISSING
        line = f"{' ' * indent}{name}: {'null' if required else scalar(field.default)}"
        lines += commented(line, f"required: {field.doc}" if required else field.doc)
    return lines


def section_lines(name: str, owner: Callable[..., Any]) -> list[str]:
    """A section with its fields below it, under the first line of its docstring."""
    about = (owner.__doc__ or "").partition("\n")[0].rstrip(".")
    return [*commented(f"{name}:", about[:1].lower() + about[1:]), *yaml_lines(fields_of(owner), indent=2)]


def commented(line: str, comment: str) -> list[str]:
    """A line with its comment beside it, or above it if that is too long."""
    if not comment:
        return [line]
    beside = f"{line.ljust(COLUMN - 1)} # {comment}"
    if len(beside) <= WIDTH:
        return [beside]
    indent = " " * (len(line) - len(line.lstrip()))
    above = textwrap.wrap(comment, WIDTH - len(indent) - 2, break_on_hyphens=False)
    return [*(f"{indent}# {text}" for text in above), line]


def scalar(value: Any) -> str:
    """A value on one line, as YAML; text is quoted if YAML would read something else."""
    import yaml

    if not isinstance(value, str):
        return yaml.safe_dump(plain(value), default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    try:
        same = yaml.safe_load(value) == value
    except yaml.YAMLError:
        same = False
    return value if same else json.dumps(value, ensure_ascii=False)
