"""The tables of docs/families.md, made from the families themselves and from the installed diffusers."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from pages.tables import markdown_table, with_tables
from tread.attach.families import FAMILIES
from tread.report.families import rows, rows_elsewhere

# diffusers' pipelines read LoKr for these alone; the transformer's own loader reads it everywhere
_LOKR_PIPELINES = ("Flux2Transformer2DModel", "ZImageTransformer2DModel")


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
