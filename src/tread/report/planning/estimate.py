"""Tokens, FLOPs and memory of a run, dense and routed. estimate.js has the same; a test compares both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tread.report.planning.models import Layers, Model, Saved
from tread.report.planning.settings import Run, precisions_of
from tread.report.planning.tables import (
    APART_BYTES,
    BIAS_BYTES,
    CARDS,
    EVERY_STEP,
    GIB,
    OPTIMIZERS,
    PRECISIONS,
    RESERVED,
    SPARE,
    WORKING,
)
from tread.report.planning.weights import weight_bytes
from tread.routing.budget import kept_count
from tread.routing.plan import RoutePlan

PARTS = ("weights", "adapter", "optimizer", "average", "activations", "working", "gradients")
"""The parts of the memory, in display order."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a run per step and GPU; pairs are dense, then routed."""

    image: int
    """Tokens of the target."""
    reference: int
    """Tokens of reference images."""
    padding: int
    """Tokens that the model adds to an image that is not square."""
    layers: tuple[int, ...]
    """Image tokens, with references and padding, that each layer sees in a routed step."""
    flops: tuple[float, float]
    """FLOPs of a step: forward, backward and recomputation."""
    layer_flops: tuple[float, ...]
    """FLOPs of each routed layer."""
    memory: tuple[dict[str, float], dict[str, float]]
    """Bytes by part."""

    @property
    def speedup(self) -> float:
        """Ideal steps per second, routed over dense."""
        return self.flops[0] / self.flops[1]

    @property
    def gib(self) -> tuple[float, float]:
        dense, routed = (sum(parts.values()) / GIB for parts in self.memory)
        return dense, routed


def estimate(model: Model, run: Run, plan: RoutePlan) -> Estimate:
    """The cost of a run whose plan is resolved for the model."""
    image, reference = tokens(model, run)
    padding = 0 if run.width == run.height else max(0, model.padded - image)
    total = image + reference + padding
    always = padding + (reference if plan.reference_tokens == "keep" else 0)
    dense = [total] * model.depth
    routed = list(dense)
    for route in plan.routes:
        kept = kept_count(total, route.selection_ratio, always=always)
        for layer in route.layers:
            routed[layer] = kept
    dense_run, routed_run = run.sides
    layer_flops = _layer_flops(model, routed_run, routed)
    outside = _flops(model.outside, run, total, recomputed=False)
    return Estimate(
        image=image,
        reference=reference,
        padding=padding,
        layers=tuple(routed),
        flops=(sum(_layer_flops(model, dense_run, dense)) + outside, sum(layer_flops) + outside),
        layer_flops=tuple(layer_flops),
        memory=_memory(model, run, dense, routed),
    )


def tokens(model: Model, run: Run) -> tuple[int, int]:
    """Tokens of the target, with its layers, and of the reference images, which have its size."""
    frames, rows, columns = model.patch
    grid = (run.height // (model.factor * rows)) * (run.width // (model.factor * columns))
    latent_frames = 1 + (run.frames - 1) // model.frame_factor + run.image_layers
    return -(-latent_frames // frames) * grid, run.references * grid


def _layer_flops(model: Model, run: Run, counts: Sequence[int]) -> list[float]:
    return [_flops(layer, run, count) for layer, count in zip(model.layers, counts, strict=True)]


def _flops(layers: Layers, run: Run, image: int, *, recomputed: bool = True) -> float:
    """FLOPs of one layer in a step of the whole batch; checkpointing runs its forward again."""
    coefficients = layers.flops[run.way]
    again = coefficients.get("again", coefficients["forward"]) if recomputed and run.checkpointing == "full" else ()
    parts = (coefficients["forward"], coefficients["backward"], again)
    return run.batch * sum(_at(part, image, run.text) for part in parts)


def _at(coefficients: Sequence[float], image: int, text: int) -> float:
    """A polynomial in image and text tokens; the last terms may be left out."""
    terms = (1, image, text, image * image, image * text, text * text)
    return sum(a * b for a, b in zip(coefficients, terms, strict=False))


def forward_flops(model: Model, run: Run, counts: Sequence[int]) -> float:
    """FLOPs of the layers in one forward of the whole batch."""
    layers = zip(model.layers, counts, strict=True)
    return run.batch * sum(_at(layer.flops[run.way]["forward"], count, run.text) for layer, count in layers)


def _memory(
    model: Model, run: Run, dense: Sequence[int], routed: Sequence[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by part at the peak: when backward begins, or at its end, where gradients have replaced activations."""
    fixed, gradients = _fixed(model, run)
    activations = [_activations(model, side, counts) for side, counts in zip(run.sides, (dense, routed), strict=True)]
    spare, least = _spare(model, run), activations[1][0]
    made = []
    for saved, working in activations:
        more = WORKING["other_graphs"] * max(0.0, saved - least)
        graphs = WORKING["graphs"] * saved + more + spare if run.graphs else 0.0
        beyond = max(0.0, gradients - saved - working)
        made.append(fixed | {"activations": saved, "working": working + graphs, "gradients": beyond})
    return made[0], made[1]


def _spare(model: Model, run: Run) -> float:
    """Bytes of segments that weights leave unused, and, trained as a whole, gradients, moments and average too."""
    copies = 2 + OPTIMIZERS[run.optimizer].get("moments", 0) + run.ema if run.way == "full" else 1
    return copies * model.weights[SPARE[run.precision]]


def _fixed(model: Model, run: Run) -> tuple[dict[str, float], float]:
    """Bytes held throughout a step, by part, and the bytes of the gradients."""
    weights = weight_bytes(model, run.precision, run.offload)
    if run.way == "full":
        trained, size = model.weights["all"], PRECISIONS[run.precision]["all"]
        adapter = 0.0
    else:
        trained, size = run.rank * model.lora[run.way], 4.0
        adapter = trained * size
    state: Mapping[str, float] = OPTIMIZERS[run.optimizer]
    held = {
        "weights": weights,
        "adapter": adapter,
        "optimizer": trained * (state["bytes"] if "bytes" in state else state["moments"] * size),
        "average": trained * 4.0 if run.ema else 0.0,
    }
    return held, trained * size


def _activations(model: Model, run: Run, counts: Sequence[int]) -> tuple[float, float]:
    """Bytes saved for backward, and the working memory of the largest layer's backward."""
    saved = _saved(model.outside.saved[run.way][run.checkpointing], run, max(counts))
    largest = 0.0
    for layer, count in zip(model.layers, counts, strict=True):
        kept, whole = (_saved(layer.saved[run.way][how], run, count) for how in (run.checkpointing, "none"))
        saved += kept
        apart = 0.0 if run.checkpointing == "none" else APART_BYTES * run.batch * count * layer.adapted.get(run.way, 0)
        bias = BIAS_BYTES * _pairs(run, count) if layer.saved[run.way]["none"].get("square") else 0.0
        largest = max(largest, whole - kept + WORKING["layer"] * whole + apart + bias)  # recomputed, and its gradients
    return saved, WORKING["bytes"] + largest


def passed(model: Model, run: Run, counts: Sequence[int]) -> float:
    """Bytes of activations that the layers write and read in one forward, whether saved for backward or not."""
    layers = zip(model.layers, counts, strict=True)
    return sum(_saved(layer.saved[run.way]["none"], run, count) for layer, count in layers)


def _saved(counts: Saved, run: Run, image: int) -> float:
    each = counts["sample"] + counts["image"] * image + counts["text"] * run.text
    return counts["constant"] + run.batch * each + counts.get("square", 0) * _pairs(run, image)


def _pairs(run: Run, image: int) -> int:
    """Pairs of tokens that attention scores, in the whole batch."""
    return run.batch * (image + run.text) ** 2


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run the same plan in less memory."""

    precision: str
    checkpointing: str
    gib: tuple[float, float]
    """Dense and routed."""
    cards: tuple[int | None, int | None]
    """The smallest card of `CARDS` that it fits, dense and routed; None if it fits none."""


def choices(model: Model, run: Run, plan: RoutePlan) -> list[Choice]:
    """The memory of other precisions and checkpointing modes, most memory first within a precision."""
    shown = ("fp32", "bf16") if run.way == "full" else ("bf16", "fp8", "nf4")
    allowed = precisions_of(model, run.way)
    options = []
    for precision in dict.fromkeys((run.precision, *(name for name in shown if name in allowed))):
        for checkpointing in dict.fromkeys((*EVERY_STEP, run.checkpointing)):
            gib = estimate(model, replace(run, precision=precision, checkpointing=checkpointing), plan).gib
            cards = (smallest_card(gib[0]), smallest_card(gib[1]))
            options.append(Choice(precision=precision, checkpointing=checkpointing, gib=gib, cards=cards))
    return options


def smallest_card(gib: float) -> int | None:
    """The smallest of the common GPUs with that much usable memory."""
    return next((card for card in CARDS if gib <= card - RESERVED), None)
