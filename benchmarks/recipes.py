"""What the recipes for one card take: memory and time of the LoRA step that a recipe describes.

    python -m benchmarks.recipes --warm
    python -m benchmarks.recipes --recipes flux-lora qwen-image-lora

The base in the recipe's precision, its adapter, optimizer, routes and resolution are read from the file; weights are
random, made on the device in the released sizes, batch 1. Dense steps are measured too: validation is dense. Of an nf4
base the FLOPs are those of the adapter alone: bitsandbytes' products are no operations that torch counts.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.record import Record, options
from benchmarks.families import Case, measure
from pages.model_lines import MODELS
from tread.finetune.config import read_config

FOLDER = Path("recipes/finetune")
LINES = {
    "flux-lora": "flux",
    "flux-lora-low-memory": "flux",
    "kandinsky5-image-lora": "kandinsky5_image",
    "qwen-image-lora": "qwen_image",
    "qwen-image-edit-lora": "qwen_image/edit",
}
"""The recipes whose first lines name a card, by the model that `tread plan` knows."""


def case_of(name: str) -> Case:
    """The step of a recipe."""
    config = read_config(FOLDER / f"{name}.yaml")
    (entry,) = config.data_entries()
    side, line = int(entry["resolution"]), MODELS[LINES[name]]
    references = entry.get("conditioning_data_dir", [])
    return Case(
        line=line,
        pixels=(side, side),
        references=len(references),
        base=config.base_model_precision,
        rank=config.lora_rank,
        routes=config.tread_config,
        optimizer=config.optimizer,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen recipes."""
    parser = options(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=list(LINES), default=list(LINES), metavar="RECIPE")
    given = parser.parse_args(arguments)
    record = Record("recipes", given)
    for name in given.recipes:
        case = case_of(name)
        assert case.pixels is not None
        shapes = {"model": LINES[name], "resolution": case.pixels[0], "base": case.base, "lora_rank": case.rank}
        measure(record, case, row=f"recipe-{name}", shapes=shapes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
