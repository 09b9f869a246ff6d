"""Bytes of a model's weights: all of them, and layer by layer for those in host memory (`offload`).

A model's counts have FLOPs by layer, not weights, so weights are derived: a linear costs 2 FLOPs per weight and token.
Whether image and text tokens of a stack share linears is not recorded either: the combination whose sum is nearest to
the number of packed weights is used.
"""

from itertools import product

from tread.report.planning.models import Layers, Model
from tread.report.planning.tables import PRECISIONS, SLOTS


def weight_bytes(model: Model, precision: str, offload: int = 0) -> float:
    """Bytes of the weights on a GPU, with `offload` layers in host memory."""
    away, slots = moved(model, precision, offload)
    return sum(size * model.weights[name] for name, size in PRECISIONS[precision].items()) - away + slots


def layer_bytes(model: Model, precision: str) -> list[float]:
    """Bytes of the weights of each layer."""
    ways = [
        dict(zip((stack.name for stack in model.stacks), own, strict=True))
        for own in product((False, True), repeat=len(model.stacks))
    ]
    packed = model.weights["packed"]
    guesses = ([_weights(layer, own[layer.name]) for layer in model.layers] for own in ways)
    best = min(guesses, key=lambda weights: abs(sum(weights) - packed))
    sizes = PRECISIONS[precision]
    packed_bytes = sum(sizes.get(name, 0) * model.weights[name] for name in ("packed", "rows", "groups"))
    packed_bytes += sizes["all"] * packed
    return [weights / sum(best) * packed_bytes for weights in best]


def _weights(layers: Layers, own: bool) -> float:
    """Weights of one layer; with `own`, text tokens have linears of their own."""
    once, image, text, *_ = layers.flops["full"]["forward"]
    return (once + image + own * text) / 2


def moved(model: Model, precision: str, number: int) -> tuple[float, float]:
    """Bytes of `number` evenly spread layers that leave the GPU, and of the slots that stay for them."""
    sizes = layer_bytes(model, precision)
    chosen = [sizes[i * len(sizes) // number] for i in range(number)]
    return sum(chosen), min(SLOTS, number) * max(chosen, default=0.0)
