"""Every transformer class of diffusers, and those known outside it, with their routing: `tread families`.

Layers are those of the class's default config, counted on the meta device, which allocates no weights.
"""

from dataclasses import dataclass

import torch

from tread.attach.families import ELSEWHERE, FAMILIES, REFUSED
from tread.attach.family import Family
from tread.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Row:
    """One class."""

    name: str
    status: str
    stacks: str = ""
    layers: str = ""
    notes: str = ""


def rows(word: str = "") -> list[Row]:
    """The classes of diffusers that have `word` in their name, by name."""
    known = {name: family for family in FAMILIES for name in family.models} | REFUSED
    names = sorted((name for name in known if word.lower() in name.lower()), key=str.lower)
    return [_row(name, known[name]) for name in names]


def rows_elsewhere(word: str = "") -> list[Row]:
    """The classes outside diffusers that have `word` in their name, without duplicate rows."""
    matches = {_routed(name, family) for family in ELSEWHERE for name in family.models if word.lower() in name.lower()}
    return sorted(matches, key=lambda row: (row.name.lower(), row.notes))


def _row(name: str, known: Family | str) -> Row:
    if isinstance(known, str):
        return Row(name=name, status="refused", notes=known)
    return _routed(name, known, default_layers(name, known))


def _routed(name: str, family: Family, layers: str = "") -> Row:
    stacks = ", ".join(stack.name for stack in family.stacks)
    return Row(name=name, status="routed", stacks=stacks, layers=layers, notes=family.notes)


def default_layers(name: str, family: Family) -> str:
    """The layers of each stack in the class's default config; empty without diffusers or without defaults."""
    try:
        from diffusers.models import transformers

        with torch.device("meta"):
            model = getattr(transformers, name)()
    except (ImportError, TypeError, ValueError):  # no diffusers, or a constructor with required arguments
        return ""
    return " + ".join(str(len(stack.layers(model))) for stack in family.stacks)


def describe_families(word: str = "") -> str:
    """The text of `tread families`."""
    listed = rows(word) + rows_elsewhere(word)
    if not listed:
        raise ConfigError(f"no transformer class has {word!r} in its name; `tread families` lists them all.")
    widths = [max(len(getattr(row, column)) for row in listed) for column in ("name", "status", "layers")]
    lines = []
    for row in listed:
        cells = zip((row.name, row.status, row.layers), widths, strict=True)
        text = ". ".join(part for part in (row.stacks, row.notes) if part)
        lines.append("  ".join([*(cell.ljust(width) for cell, width in cells), text]).rstrip())
    routed = sum(row.status == "routed" for row in listed)
    return "\n".join([*lines, f"{routed} routed, {len(listed) - routed} refused"])
