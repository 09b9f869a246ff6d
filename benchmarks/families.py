"""LoRA steps on the released shapes of every fine-tunable family, dense and routed: `python -m benchmarks.families`.

    python -m benchmarks.families --warm --models chroma prx        # compile for the caches with few layers
    python -m benchmarks.families --models chroma prx

- The models are those that `tread plan` knows (`pages/model_lines.py`), made on the device with random weights; what
  runs is the family's own `predict` with the family's own LoRA layers, in the step of `tread finetune`.
- An image has 1024 x 1024 pixels, with its layers 640 x 640, a clip 480 x 832 and its usual frames, or as many as make
  at most 16,384 tokens. A model that edits has a reference of the same size, whose tokens are not dropped.
- `--list` prints the bf16 weights of each model, which must fit the device beside a step: an H200 has 139 GiB.
- Layers are compiled and checkpointed, with CUDA graphs; `compiled` is the same without graphs, measured where
  capturing fails because the stock forward waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tread
from benchmarks.common.lora import NOTES, RANK, ROUTES, Shape, Variant, build, lora_steps
from benchmarks.common.record import Facts, Record, options
from pages.model_lines import MODELS, Line
from pages.subjects import Subject
from tread.attach.registry import family_of
from tread.finetune.family import reference_name
from tread.finetune.model.adapters import add_adapter
from tread.finetune.model.quantize import check_precision, quantize
from tread.routing.plan import tread_mapping
from tread.training.settings import OptimizerName

IMAGE, LAYERS, CLIP = (1024, 1024), (640, 640), (480, 832)
MOST_TOKENS = 16384
SHALLOW = 4
"""Layers of each stack where few are enough: to fill the compiler's caches, and on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A LoRA of a model: the samples, and the settings that its step depends on."""

    line: Line
    pixels: tuple[int, int] | None = None
    """Height and width of a sample; None: the usual ones."""
    references: int | None = None
    """Reference images of a sample; None: as few as the family takes."""
    base: str = "bf16"
    """The frozen base: bf16, or one of the product's `base_model_precision`."""
    rank: int = RANK
    routes: Mapping[str, Any] | str | None = None
    """None: 0.5 over 2..-2."""
    optimizer: OptimizerName = "adamw"


def shape_of(case: Case, *, shallow: bool, smoke: bool) -> tuple[Subject, Shape]:
    """A model of the released sizes and a batch of one sample."""
    line = case.line
    subject = Subject(line)
    family = subject.family
    frames, rows, columns = grid_of(subject, case.pixels)
    references = family.reference_counts.start if case.references is None else case.references
    if smoke:
        frames, rows, columns = min(frames, 2), 4, 6
    tokens, text = frames * rows * columns, line.reads or family.longest_text
    depths = {stack: len(subject.model.get_submodule(stack)) for stack in subject.stacks}
    config = {**line.config, **(shallow_config(subject, depths) if shallow else {})}

    def inputs(device: torch.device) -> dict[str, Any]:
        steps = zip(family.patch, (frames, rows, columns), strict=True)
        sizes = [patch * count for patch, count in steps][0 if family.video or family.layered else 1 :]
        with torch.device(device):
            noisy = torch.randn(1, line.channels, *sizes)
            _, batch = subject.batch(1, 1, 16 if smoke else text)
        # tokens that are all alike would leave the attention among them nothing to learn
        drawn = {name: torch.randn_like(x) if x.is_floating_point() else x for name, x in batch.items()}
        count = 0 if family.layered else references  # layers are a part of the sample
        seen = {f"{reference_name(number)}.mean": torch.randn_like(noisy) for number in range(count)}
        return drawn | seen | {"mean": noisy, "noisy": noisy}

    def loss(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
        noisy = batch["noisy"]
        prediction = family.predict(model, noisy, torch.full((1,), 0.5, device=noisy.device), batch)
        return (prediction.float() - 1).square().mean()

    notes = {
        "batch": 1,
        "image_tokens": tokens,
        "references": references,
        "text_tokens": text,
        "layers": depths,
        "title": line.title,
    }
    notes["weights_gib"] = round(weights_gib(subject), 1)
    return subject, Shape(model=partial(subject.cls, **config), inputs=inputs, notes=notes, loss=loss)


def weights_gib(subject: Subject) -> float:
    """GiB of the released model's weights in bf16."""
    return sum(parameter.numel() for parameter in subject.model.parameters()) * 2 / 2**30


def grid_of(subject: Subject, pixels: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Tokens of a sample by frames, rows and columns."""
    family, line = subject.family, subject.line
    height, width = pixels or (CLIP if family.video else LAYERS if family.layered else IMAGE)
    step, rows_step, columns_step = family.patch
    rows, columns = height // family.factor // rows_step, width // family.factor // columns_step
    latent_frames = 1 + (family.layers if family.layered else (line.frames - 1) // family.frame_factor)
    return max(1, min(latent_frames // step, MOST_TOKENS // (rows * columns))), rows, columns


def shallow_config(subject: Subject, depths: dict[str, int]) -> dict[str, Any]:
    """The settings of a model's config that are the lengths of its stacks, each at most SHALLOW, and lists with an
    entry for each layer."""
    counts = set(depths.values())
    named = {
        name: value
        for name, value in subject.settings.items()
        if type(value) is int and value in counts and any(word in name for word in ("layers", "blocks", "depth"))
    }
    short: dict[str, Any] = {name: min(value, math.ceil(SHALLOW / len(depths)) + 2) for name, value in named.items()}
    lists = {name: value for name, value in subject.settings.items() if isinstance(value, list | tuple)}
    each = {name: value[: sum(short.values())] for name, value in lists.items() if len(value) == sum(depths.values())}
    return short | each


def run(record: Record, case: Case, *, graphs: bool) -> Facts:
    """Compare dense and routed steps of one model."""
    subject, shape = shape_of(case, shallow=record.warm or record.smoke, smoke=record.smoke)
    model = build(shape, record.device)
    if case.base != "bf16":
        check_precision(case.base, record.device)
        quantize(model, case.base, record.device)
    add_adapter(model, kind="standard", rank=case.rank, alpha=case.rank, targets=subject.family.lora_targets, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    variant = Variant(name="steps", graphs=graphs and record.device.type == "cuda")
    routes = case.routes or ROUTES
    settings: dict[str, Any] = {"routes": shortened(routes) if record.warm else routes, "optimizer": case.optimizer}
    with lora_steps(model, shape, variant, record.device, checkpointed=True, **settings) as steps:
        if isinstance(steps.work.handle, tread.Attachment):
            steps.work.handle.references = subject.family.reference_tokens(steps.work.batch)
        facts = steps.warm_up(1) if record.warm else steps.compare(seconds=record.seconds, rounds=2)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": weights, "stacks": [stack.name for stack in family_of(model).stacks]} | facts


def shortened(routes: Mapping[str, Any] | str) -> dict[str, Any]:
    """Routes of the same ratios, whose windows fit a model with few layers: the code that is compiled is the same."""
    window = {"start_layer_idx": 2, "end_layer_idx": -2}
    return {"routes": [{**route, **window} for route in tread_mapping(routes)["routes"]]}


def measure(record: Record, case: Case, **facts: Any) -> None:
    """Steps by CUDA graphs, or without where capturing fails."""
    subject, shape = shape_of(case, shallow=False, smoke=False)
    facts |= {"checkpointed": True, "shapes": shape.notes | facts.get("shapes", {}), "family": subject.family.name}
    for kind in ("graphs", "compiled"):
        found = record.measure(kind, partial(run, record, case, graphs=kind == "graphs"), **facts)
        if found["status"] == "ok":
            break


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen models."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--list", action="store_true", help="print the size of each model's weights, and stop")
    given = parser.parse_args(arguments)
    if given.list:
        for name in given.models:
            print(f"{name:20} {weights_gib(Subject(MODELS[name])):6.1f} GiB  {MODELS[name].title}")
        return 0
    record = Record("families", given)
    for name in given.models:
        measure(record, Case(line=MODELS[name]), row=f"family-{name}", shapes=NOTES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
