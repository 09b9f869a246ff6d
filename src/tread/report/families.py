"""Every transformer class of diffusers, and those known outside it, with their routing: `tread families` and
docs/families.md.

- The tables are made from the families themselves and from the installed diffusers; nothing is kept twice.
- Layers are those of the class's default config, counted on the meta device, where no weights are made.
- `make docs` writes the tables between their markers.
"""

import inspect
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tread.attach.families import ELSEWHERE, FAMILIES, REFUSED
from tread.attach.family import Family
from tread.errors import ConfigError
from tread.report.pages import markdown_table, with_tables

# diffusers' pipelines read LoKr for these alone; the transformer's own loader reads it everywhere
_LOKR_PIPELINES = ("Flux2Transformer2DModel", "ZImageTransformer2DModel")


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
    routed = [
        _routed(name, family, default_layers(name, family))
        for family in FAMILIES
        for name in family.models
        if word.lower() in name.lower()
    ]
    refused = [
        Row(name=name, status="refused", notes=reason)
        for name, reason in REFUSED.items()
        if word.lower() in name.lower()
    ]
    return sorted(routed + refused, key=lambda row: row.name.lower())


def rows_elsewhere(word: str = "") -> list[Row]:
    """The classes outside diffusers that have `word` in their name; families that read the same are one row."""
    found = {_routed(name, family) for family in ELSEWHERE for name in family.models}
    return sorted(
        (row for row in found if word.lower() in row.name.lower()), key=lambda row: (row.name.lower(), row.notes)
    )


def _routed(name: str, family: Family, layers: str = "") -> Row:
    stacks = ", ".join(stack.name for stack in family.stacks)
    return Row(name=name, status="routed", stacks=stacks, layers=layers, notes=family.notes)


def default_layers(name: str, family: Family) -> str:
    """The layers of each stack in the class's default config; empty where there is no diffusers or no such config."""
    try:
        from diffusers.models import transformers
    except ImportError:
        return ""
    try:
        with torch.device("meta"):
            model = getattr(transformers, name)()
    except (TypeError, ValueError):  # it has required settings
        return ""
    return " + ".join(str(len(operator.attrgetter(stack.name)(model))) for stack in family.stacks)


def describe_families(word: str = "") -> str:
    """The text of `tread families`."""
    found = rows(word) + rows_elsewhere(word)
    if not found:
        raise ConfigError(f"no transformer class has {word!r} in its name; `tread families` lists them all.")
    widths = [max(len(getattr(row, column)) for row in found) for column in ("name", "status", "layers")]
    lines = []
    for row in found:
        cells = zip((row.name, row.status, row.layers), widths, strict=True)
        text = ". ".join(part for part in (row.stacks, row.notes) if part)
        lines.append("  ".join([*(cell.ljust(width) for cell, width in cells), text]).rstrip())
    routed = sum(row.status == "routed" for row in found)
    return "\n".join([*lines, f"{routed} routed, {len(found) - routed} refused"])


def class_table() -> str:
    """The table of classes, as Markdown."""
    lines = ["| class | status | layers | stacks | notes |", "|---|---|---|---|---|"]
    for row in rows():
        stacks = ", ".join(f"`{name}`" for name in row.stacks.split(", ") if name)
        lines.append(f"| `{row.name}` | {row.status} | {row.layers} | {stacks} | {row.notes} |")
    return "\n".join(lines)


def table_elsewhere() -> str:
    """The table of classes outside diffusers, as Markdown."""
    cells = [
        (f"`{row.name}`", ", ".join(f"`{name}`" for name in row.stacks.split(", ")), row.notes)
        for row in rows_elsewhere()
    ]
    return markdown_table(("class", "stacks", "notes"), cells)


def adapter_table() -> str:
    """How stock diffusers loads an adapter of each routed class, as Markdown."""
    lines = ["| class | LoRA | LoKr |", "|---|---|---|"]
    for name, (lora, lokr) in sorted(adapter_loaders().items(), key=lambda item: item[0].lower()):
        lines.append(f"| `{name}` | `{lora}` | `{lokr}` |")
    return "\n".join(lines)


def adapter_loaders() -> dict[str, tuple[str, str]]:
    """The loaders of LoRA and LoKr for each routed class: the pipeline's, else the transformer's, else peft's."""
    from diffusers.loaders.peft import PeftAdapterMixin
    from diffusers.models import transformers

    pipelines: dict[str, list[str]] = {}
    for pipeline, parts in _pipelines_with_loader():
        for name in re.findall(r"\w+", parts):
            pipelines.setdefault(name, []).append(f"{pipeline}.load_lora_weights")
    loaders = {}
    for name in (name for family in FAMILIES for name in family.models):
        if not issubclass(getattr(transformers, name), PeftAdapterMixin):
            loaders[name] = ("PeftModel.from_pretrained",) * 2
            continue
        own = "transformer.load_lora_adapter"
        lora = min(pipelines.get(name, [own]), key=lambda loader: (len(loader), loader))
        loaders[name] = (lora, lora if name in _LOKR_PIPELINES else own)
    return loaders


def _pipelines_with_loader() -> Iterator[tuple[str, str]]:
    """The pipelines that load adapters, each with the annotation of its transformer."""
    import diffusers

    for name in dir(diffusers):
        if not name.endswith("Pipeline"):
            continue
        pipeline: Any = getattr(diffusers, name)
        if "load_lora_weights" not in {attribute for cls in pipeline.__mro__ for attribute in vars(cls)}:
            continue
        part = inspect.signature(pipeline.__init__).parameters.get("transformer")
        if part is not None:
            yield name, str(part.annotation)


def updated(page: str) -> str:
    """A page with its tables written anew between the markers."""
    return with_tables(page, {"classes": class_table(), "elsewhere": table_elsewhere(), "adapters": adapter_table()})
