"""What `tread plan` knows of each model, counted on the stock classes: `python -m pages.models [MODEL ...]`.

A model is one line of `model_lines.py`; its weights are counted on the meta device, its layers by `counts.py`. The
result is `src/tread/report/planning/models.json`, which `tread plan` reads without torch.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from pages.counts import counted
from pages.model_lines import DITS, MODELS, Line
from pages.subjects import DiTSubject, Subject
from tread.finetune.families import TUNE_FAMILIES
from tread.finetune.model.adapters import find_linears
from tread.finetune.model.quantize import GROUP, layer_linears
from tread.models import DiT

FILE = Path(__file__).resolve().parents[1] / "src" / "tread" / "report" / "planning" / "models.json"
CLIP = (832, 480)
"""Width and height of a usual clip."""
MIB = 2**20


def derive(line: Line) -> dict[str, Any]:
    """Everything that is counted of a stock model."""
    subject = Subject(line)
    return described(subject) | counted_once(subject)


def described(subject: Subject) -> dict[str, Any]:
    """What a model takes and weighs, which is quick to look up."""
    line, family, model = subject.line, subject.family, subject.model
    return {
        "title": line.title,
        "family": line.family,
        "class": line.model,
        "factor": family.factor,
        "patch": list(family.patch),
        "size": list(CLIP) if family.video else [family.usual_side] * 2,
        "multiple": family.multiple,
        "padded": line.padded,
        "frame_factor": family.frame_factor,
        "frames": line.frames,
        "video": family.video,
        "references": line.references,
        "image_layers": family.layers if family.layered else 0,
        "one_sample": family.one_length,
        "one_dtype": family.one_dtype,
        "text": line.reads or family.longest_text,
        "pretrained": True,
        "lora": {way: sides(model, targets) for way, targets in subject.targets.items()},
        "weights": weights(model),
    }


def derive_dit(size: str) -> dict[str, Any]:
    """Everything that is counted of a DiT."""
    subject = DiTSubject(size)
    patch = subject.arguments["patch"]
    found = {
        "title": f"DiT-{size} of `tread train`",
        "family": "dit",
        "class": "DiT",
        "factor": 8,
        "patch": [1, patch, patch],
        "size": [256, 256],
        "multiple": 8 * patch,
        "padded": 0,
        "frame_factor": 1,
        "frames": 1,
        "video": False,
        "references": False,
        "image_layers": 0,
        "one_sample": False,
        "one_dtype": False,
        "text": 0,
        "pretrained": False,
        "lora": {},
        "weights": weights(subject.model),
    }
    return found | counted(subject, ("full",))


def sides(model: nn.Module, targets: Sequence[str]) -> int:
    """Weights of a LoRA per rank: inputs and outputs of all linears that it is on."""
    return sum(linear.in_features + linear.out_features for linear in find_linears(model, targets).values())


def weights(model: nn.Module) -> dict[str, int]:
    """Elements of the weights: all, those of linears that quantizing packs, their rows and groups, float32 ones.

    `buffers`, such as tables of positions, are bytes; so is `spare_BITS`, what the weights leave unused of their
    segments where each element of the packed ones, or of all, has so many bits.
    """
    linears = list(layer_linears(model).values()) if not isinstance(model, DiT) else []
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    packed = {id(linear.weight) for linear in linears}
    all_sizes = [p.numel() for p in model.parameters()]
    own = [4 if any(part in n.split(".") for part in kept) else 2 for n, _ in model.named_parameters()]

    def with_packed(size: float) -> int:
        each = [size if id(p) in packed else usual for p, usual in zip(model.parameters(), own, strict=True)]
        return spare(int(count * one) for count, one in zip(all_sizes, each, strict=True))

    return {
        "all": sum(p.numel() for p in model.parameters()),
        "packed": sum(x.weight.numel() for x in linears),
        "rows": sum(x.out_features for x in linears),
        "groups": sum(x.weight.numel() // GROUP for x in linears),
        "float32": sum(p.numel() for n, p in model.named_parameters() if any(part in n.split(".") for part in kept)),
        "buffers": sum(b.numel() * b.element_size() for b in model.buffers()),
        "spare_32": spare(4 * count for count in all_sizes),
        "spare_16": spare(count * size for count, size in zip(all_sizes, own, strict=True)),
        "spare_8": with_packed(1),
        "spare_4": with_packed(0.5),
    }


def spare(sizes: Iterable[int]) -> int:
    """Bytes of the segments that torch's allocator takes for tensors of these sizes, beyond the tensors.

    From 10 MiB on a tensor has a segment of whole 2 MiB, smaller ones share segments of 20 MiB, and a remainder of more
    than 1 MiB is given to the next tensor that fits. Tensors up to 1 MiB fill segments of their own.
    """
    free: list[int] = []
    lost = 0
    for size in sizes:
        if size <= MIB:
            continue
        block = min((rest for rest in free if rest >= size), default=0)
        if block:
            free.remove(block)
        else:
            block = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            lost += block
        lost -= size
        if block - size > MIB:
            free.append(block - size)
    return lost


_COUNTED: dict[str, dict[str, Any]] = {}


def counted_once(subject: Subject) -> dict[str, Any]:
    """`counted`, shared by models that differ in their inputs alone."""
    key = json.dumps([subject.line.model, dict(subject.line.config)])
    if key not in _COUNTED:
        _COUNTED[key] = counted(subject, (*subject.targets, "full"))
    return _COUNTED[key]


def main(names: Sequence[str]) -> None:
    """Count the models named, or all of them, and write the file anew after each."""
    every = [*MODELS, *(f"dit/{size}" for size in DITS)]
    here = [name for name in every if name not in MODELS or MODELS[name].family in TUNE_FAMILIES]
    for name in names or here:
        made = derive(MODELS[name]) if name in MODELS else derive_dit(name.removeprefix("dit/"))
        known = json.loads(FILE.read_text(encoding="utf-8")) | {name: made}
        text = json.dumps({key: known[key] for key in every if key in known}, indent=1)
        FILE.write_text(text + "\n", encoding="utf-8")
        print(f"counted: {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
