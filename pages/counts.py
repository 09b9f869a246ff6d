"""What a layer costs: FLOPs by torch's count, and the bytes that it saves for backward.

- FLOPs are fitted exactly by a polynomial of second degree in image and text tokens.
- A checkpointed layer recomputes until its last saved tensor is there, so a product at its end may be left out: where
  recomputation has fewer FLOPs than the forward, it is counted as `again`.
- Bytes are those that torch's partitioner chooses for compiled code, counted once per storage. Image tokens, text
  tokens and the batch have sizes in distinct primes, so that the size of a saved tensor tells what it grows with.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from pages.subjects import DEPTH, DiTSubject, shallow
from pages.values import Values, without_values
from tread.finetune.model.adapters import find_linears
from tread.kernels.checkpointing import Checkpointing, checkpoint_layers
from tread.kernels.fast import Fast

IMAGE, TEXT = 59, 44
"""59, 11 and 103 = 59 + 44 divide no width of a model."""
PRIMES = {"both": 103, "image": 59, "text": 11}
POINTS = ((16, 8), (32, 8), (64, 8), (16, 16), (32, 16), (16, 32))
"""Image and text tokens at which FLOPs are counted: as many as a polynomial of second degree has terms."""
BACKEND = "aot_eager_decomp_partition"
"""torch.compile up to the partitioner, which decides what is saved; no code is generated."""
HOW: dict[str, Checkpointing] = {"none": False, "full": True, "selective": "selective"}


def counted(subject: Any, ways: Sequence[str]) -> dict[str, Any]:
    """Layers of each stack, with FLOPs and saved bytes of one layer; and those outside layers."""
    lengths = [len(operator.attrgetter(stack)(subject.model)) for stack in subject.stacks]
    widths = widest(subject)
    flops = {way: fitted(subject, way) for way in ways}
    saved = {way: {name: saved_bytes(subject, way, how) for name, how in HOW.items()} for way in ways}
    stacks = [
        {
            "name": name,
            "layers": length,
            "flops": {way: flops[way][name] for way in ways},
            "saved": {way: {how: counts[name] for how, counts in saved[way].items()} for way in ways},
        }
        | {"adapted": {way: widths[way][name] for way in widths}}
        for name, length in zip(subject.stacks, lengths, strict=True)
    ]
    outside = {
        "flops": {way: flops[way][""] for way in ways},
        "saved": {way: {how: counts[""] for how, counts in saved[way].items()} for way in ways},
    }
    return {"stacks": stacks, "outside": outside}


def fitted(subject: Any, way: str) -> dict[str, dict[str, list[int | float]]]:
    """Forward and backward FLOPs of one layer of each stack and, under "", outside of them, as polynomials.

    Terms are 1, n, t, n^2, n t and t^2 for n image and t text tokens, per sample. `again` are those of recomputation.
    """
    texts = not isinstance(subject, DiTSubject)
    points = _points(subject)
    terms = [_terms(image, text) if texts else [1, image, image * image] for image, text in points]
    rows = [flops_at(subject, way, *points[0], again=True)]
    fewer = any(rows[0][stack]["again"] != rows[0][stack]["forward"] for stack in subject.stacks)
    rows += [flops_at(subject, way, image, text, again=fewer) for image, text in points[1:]]
    found: dict[str, dict[str, list[int | float]]] = {}
    for name in ("", *subject.stacks):
        told = ("forward", "backward", "again") if fewer and name else ("forward", "backward")
        parts = {part: [row[name][part] for row in rows] for part in told}
        solved = {part: solve(terms, values, subject.texts) for part, values in parts.items()}
        found[name] = {part: x if texts else [x[0], x[1], 0, x[2], 0, 0] for part, x in solved.items()}
    return found


def widest(subject: Any) -> dict[str, dict[str, int]]:
    """The widest input or output of a linear with an adapter that sees image tokens, by way and stack."""
    if isinstance(subject, DiTSubject):
        return {}
    image, text = _points(subject)[2]  # more image tokens than any other rows
    depths = dict.fromkeys(subject.stacks, DEPTH)
    targets = {way: find_linears(subject.model, names) for way, names in subject.targets.items()}
    found = {way: dict.fromkeys(subject.stacks, 0) for way in targets}
    with shallow(subject, "full", image, depths) as model:
        for stack, (way, names) in itertools.product(subject.stacks, targets.items()):
            for name in names:
                if not name.startswith(f"{stack}.{DEPTH - 1}."):
                    continue

                def seen(linear: Any, inputs: Any, _: Any, stack: str = stack, way: str = way) -> None:
                    if inputs[0].numel() // linear.in_features >= image:
                        width = max(linear.in_features, linear.out_features)
                        found[way][stack] = max(found[way][stack], width)

                model.get_submodule(name).register_forward_hook(seen)
        with torch.autocast("cpu", torch.bfloat16):
            subject.loss(model, 1, image, text)
    return found


def _points(subject: Any) -> list[tuple[int, int]]:
    """Image and text tokens at which a subject is counted."""
    texts = not isinstance(subject, DiTSubject)
    chosen = POINTS if texts else POINTS[:3]
    return [(subject.unit * image, subject.unit * text if texts else 0) for image, text in chosen]


def _terms(image: int, text: int) -> list[int]:
    return [1, image, text, image * image, image * text, text * text]


def solve(matrix: Sequence[Sequence[int]], values: Sequence[int], parts: int = 1) -> list[int | float]:
    """The solution of a linear system, which must be whole or a number of `parts`-ths: FLOPs are counts."""
    rows = [[Fraction(x) for x in row] + [Fraction(value)] for row, value in zip(matrix, values, strict=True)]
    for i in range(len(rows)):
        pivot = next(j for j in range(i, len(rows)) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(len(rows)):
            if j != i:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    found = [row[-1] for row in rows]
    assert all(parts % x.denominator == 0 for x in found), found
    return [int(x) if x.denominator == 1 else float(x) for x in found]


def flops_at(subject: Any, way: str, image: int, text: int, *, again: bool = False) -> dict[str, dict[str, int]]:
    """FLOPs of one sample, forward and backward: of one more layer of each stack, and of what is outside of them.

    With `again` also those of recomputation: what the backward of a checkpointed model has more.
    """
    base = dict.fromkeys(subject.stacks, DEPTH)

    def total(depths: Mapping[str, int]) -> dict[str, int]:
        plain = total_flops(subject, way, image, text, depths)
        if not again:
            return plain
        checkpointed = total_flops(subject, way, image, text, depths, checkpointed=True)
        return plain | {"again": checkpointed["backward"] - plain["backward"]}

    whole = total(base)
    found, outside = {}, dict(whole)
    for stack in subject.stacks:
        longer = total(base | {stack: DEPTH + 1})
        found[stack] = {part: longer[part] - whole[part] for part in whole}
        outside = {part: outside[part] - DEPTH * found[stack][part] for part in whole}
    return found | {"": outside}


def total_flops(
    subject: Any, way: str, image: int, text: int, depths: Mapping[str, int], *, checkpointed: bool = False
) -> dict[str, int]:
    """FLOPs of one sample in a model with so many layers."""
    with shallow(subject, way, image, depths) as model:
        if checkpointed:
            checkpoint_layers([layer for stack in depths for layer in operator.attrgetter(stack)(model)], True)
        with FlopCounterMode(display=False) as forward, torch.autocast("cpu", torch.bfloat16):
            loss = subject.loss(model, 1, image, text)
        with FlopCounterMode(display=False) as backward, Values() if subject.values else nullcontext():
            loss.backward()
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


def saved_bytes(subject: Any, way: str, how: Checkpointing) -> dict[str, dict[str, int]]:
    """Bytes saved for backward by one layer of each stack and, under "", outside of the layers.

    `constant` whatever the batch; per sample `sample`, `image` per image token, `text` per text token and, of attention
    masks, `square` per pair of tokens. A model that takes one sample at a time has everything per sample.
    """
    where: list[str] = [""]
    found: dict[str, dict[str, int]] = {}
    depths = dict.fromkeys(subject.stacks, DEPTH)
    image, text = subject.unit * IMAGE, subject.unit * TEXT  # registers among the text
    with shallow(subject, way, image, depths) as model:
        layers = {f"{s}.{i}": operator.attrgetter(s)(model)[i] for s in subject.stacks for i in range(DEPTH)}
        said: list[str] = []
        fast = Fast(
            model,
            list(layers.values()),
            checkpointing=how,
            graphs=False,
            shapes=2,
            say=said.append,
            backend=BACKEND,
        )
        for name, layer in layers.items():
            layer._compiled_call_impl = Marked(layer._compiled_call_impl, where, name, values=subject.values)
        known = {_storage(x) for x in (*model.parameters(), *model.buffers())}
        held: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            key = _storage(tensor)
            if key not in known:
                known.add(key)
                held.append(tensor)
                _add(found.setdefault(where[0], {}), tensor, subject.samples, image, text)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
            loss = subject.loss(model, subject.samples, image, text - subject.registers)
        assert loss.requires_grad
        fast.remove()
        assert not fast.failed, said
    nothing = {"constant": 0, "sample": 0, "image": 0, "text": 0}
    last = {stack: nothing | found.get(f"{stack}.{DEPTH - 1}", {}) for stack in subject.stacks} | {
        "": nothing | found.get("", {})
    }
    for name, counts in last.items():
        assert counts["image"] or not name, f"{name} saves nothing per image token: {counts}"
        registers, square = subject.registers, counts.get("square", 0)  # (n + t + registers)^2 pairs
        counts["sample"] += registers * counts["text"] + square * registers**2
        for kind in ("image", "text"):
            counts[kind] += 2 * square * registers
    return last


def _add(counts: dict[str, int], tensor: Tensor, samples: int, image: int, text: int) -> None:
    storage = tensor.untyped_storage()
    size, per_item = storage.nbytes() // tensor.element_size(), tensor.element_size()
    if size % (pairs := (image + text) ** 2) == 0:  # an attention mask
        batched = size % (pairs * samples) == 0
        counts["square"] = counts.get("square", 0) + size // pairs // (samples if batched else 1) * per_item
        return
    kind = next((name for name, prime in PRIMES.items() if size % prime == 0), None)
    if kind is None:
        batched = size % samples == 0
        name = "sample" if batched else "constant"
        counts[name] = counts.get(name, 0) + size // (samples if batched else 1) * per_item
        return
    tokens = {"both": image + text, "image": image, "text": text}[kind]
    batched = size % (tokens * samples) == 0
    if not batched:  # a table that all samples share: it is counted as if each had its own
        each = size // tokens * per_item if size % tokens == 0 else 0
    else:
        each = size // (tokens * samples) * per_item
    for name in ("image", "text") if kind == "both" else (kind,):
        counts[name] = counts.get(name, 0) + each


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


class Marked:
    """A layer's call that says which layer runs."""

    def __init__(self, call: Callable[..., Any], where: list[str], name: str, *, values: bool) -> None:
        self.call, self.where, self.name, self.values = call, where, name, values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.where[0] = self.name
        try:
            return without_values(self.call, args, kwargs, values=self.values)
        finally:
            self.where[0] = ""
