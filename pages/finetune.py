"""The tables of docs/finetune.md: every key of a config, the models that a flavour names, how results are loaded."""

import json

from pages.tables import markdown_table, with_tables
from tread.config.fields import MISSING, fields_of
from tread.finetune.compat.models import MODELS
from tread.finetune.families import TUNE_FAMILIES, family_class
from tread.finetune.result.card import TWO_EXPERTS, loading_lines
from tread.finetune.settings import FinetuneConfig


def key_table() -> str:
    """Keys, defaults and meanings, in the order of the dataclass."""
    rows = [
        (f"`{name}`", "required" if field.default is MISSING else f"`{json.dumps(field.default)}`", field.doc)
        for name, field in fields_of(FinetuneConfig).items()
    ]
    return markdown_table(("key", "default", "meaning"), rows)


def model_table() -> str:
    """What a `model_flavour` stands for."""
    rows = [
        (f"`{family}`", f"`{flavour}`", f"`{model}`") for family in MODELS for flavour, model in MODELS[family].items()
    ]
    return markdown_table(("model_family", "model_flavour", "pretrained_model_name_or_path"), rows)


def loader_table() -> str:
    """A Markdown table of how stock code loads the adapters of each pipeline."""
    pipelines = [(name, pipeline) for name in sorted(TUNE_FAMILIES) for pipeline in family_class(name).pipelines]
    entries = [(name, pipeline, TWO_EXPERTS[:1]) for name, pipeline in pipelines]
    entries.append(("wan, both experts", "WanPipeline", TWO_EXPERTS))
    rows = ["| family | pipeline | LoRA | LoKr |", "|---|---|---|---|"]
    for name, pipeline, parts in entries:
        lora, lokr = (
            "<br>".join(f"`{line}`" for line in loading_lines(pipeline, kind, parts)) for kind in ("standard", "lokr")
        )
        rows.append(f"| {name} | `{pipeline}` | {lora} | {lokr} |")
    return "\n".join(rows)


def updated(page: str) -> str:
    """docs/finetune.md with its tables written anew."""
    tables = {"keys": key_table(), "models": model_table(), "loaders": loader_table()}
    return with_tables(page, tables)
