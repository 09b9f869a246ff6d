"""The tables of the pages on fine-tuning: families, keys of a config, models of flavours, how results are loaded."""

import json
from pathlib import Path

from pages.tables import markdown_table, with_tables
from tests.tiny.pipelines import TINY
from tread.config.fields import MISSING, fields_of
from tread.finetune.compat.models import MODELS
from tread.finetune.families import TUNE_FAMILIES, family_class
from tread.finetune.model.original_names import LAYOUTS
from tread.finetune.result.card import loading_lines
from tread.finetune.settings import FinetuneConfig

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MEASURED = {
    "flux": "h200-loop-trainer.json",
    "flux2": "h200-loop-flux2.json",
    "qwen_image": "h200-loop-models.json",
    "sd3": "h200-loop-models.json",
    "wan": "h200-loop-wan.json",
}
"""Families whose shapes ran on a GPU in a script of their own, and the file of the figures."""
WAYS = ("call", "graphs", "compiled")
"""The names of the measurements that are quoted, best first."""


def family_table() -> str:
    """What each family draws, its stock pipelines, those under the contract, and a step on a GPU."""
    rows = []
    for name in sorted(TUNE_FAMILIES):
        family = family_class(name)
        tiny = ", ".join(case.name for case in TINY.values() if case.family == name)
        pipelines = ", ".join(f"`{pipeline}`" for pipeline in family.pipelines)
        draws = "video" if family.video else "image"
        rows.append((f"`{name}`", draws, pipelines, str(family.longest_text), tiny, _step(name)))
    head = ("model_family", "draws", "pipelines", "text tokens", "tested as", "H200, dense to routed")
    return markdown_table(head, rows)


def _step(family: str) -> str:
    """The time of a checkpointed LoRA step at ratio 0.5, if one was measured."""
    file = MEASURED.get(family, "h200-families.json")
    row = f"loop-{family.removesuffix('_image')}-checkpointed" if family in MEASURED else f"family-{family}"
    document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    measured = [x for job in document.get("jobs", [document]) for x in job["measurements"]]
    found = next((x for x in measured if x["row"] == row and x["name"] in WAYS and x["status"] == "ok"), None)
    if found is None:
        return "not run"
    dense, routed = (found[kind]["median_ms"] for kind in ("dense", "routed"))
    return f"{dense:,.0f} to {routed:,.0f} ms"


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
    """A Markdown table of how stock code loads adapters; pipelines that take the same lines share a row."""
    pipelines: dict[tuple[str, ...], list[str]] = {}
    names = [pipeline for name in TUNE_FAMILIES for pipeline in family_class(name).pipelines]
    entries = [(pipeline, ["transformer"], "") for pipeline in names]
    two_experts = ("WanPipeline", ["transformer", "transformer_2"], " with both experts of Wan 2.2")
    for pipeline, parts, note in [*entries, two_experts]:
        kinds = (loading_lines(pipeline, kind, parts) for kind in ("standard", "lokr"))
        lines = tuple("<br>".join(f"`{line}`" for line in kind) for kind in kinds)
        pipelines.setdefault(lines, []).append(f"`{pipeline}`{note}")
    common, *others = sorted(pipelines, key=lambda lines: -len(pipelines[lines]))
    rows = [(", ".join(sorted(pipelines[lines])), *lines) for lines in others]
    return markdown_table(("pipeline", "LoRA", "LoKr"), [*rows, ("every other one", *common)])


def layout_table() -> str:
    """The families that have a key layout of another program."""
    rows = [(f"`--layout {layout}`", ", ".join(f"`{name}`" for name in names)) for layout, names in LAYOUTS.items()]
    return markdown_table(("layout", "defined for"), rows)


TABLES = {
    "finetune.md": {"loaders": loader_table, "layouts": layout_table},
    "finetune-keys.md": {"keys": key_table},
    "migrate.md": {"models": model_table},
    "models.md": {"families": family_table},
}
"""For each page on fine-tuning, the functions that make its tables."""


def updated(page: Path) -> str:
    """The text of a page on fine-tuning with its tables written anew."""
    return with_tables(page.read_text(encoding="utf-8"), {name: make() for name, make in TABLES[page.name].items()})
