"""Speed-up against token count, 256 to 65,536, for ratios 0.25, 0.5 and 0.75, beside what FLOPs say.

    python -m benchmarks.curve

Eight DiT layers, forward and backward in bf16, all but the first and the last routed, at the same number of tokens in
every step: the batch shrinks as samples grow. Layers are compiled once for all lengths. The ideal is
`tread.routing.cost`, which counts what torch's counter counts.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common.record import Facts, Record, compared, options
from benchmarks.common.timing import alternate, clocks
from tread.kernels.attention.kernel import use_attention
from tread.models.layers import Block
from tread.routing.cost import LayerShape, plan_cost
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan

RATIOS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured."""

    width: int
    heads: int
    depth: int
    total: int
    """Tokens in a step."""
    lengths: tuple[int, ...]
    """Tokens in a sample."""


FULL = Size(width=1536, heads=12, depth=8, total=65536, lengths=tuple(2**power for power in range(8, 17)))
WARM = replace(FULL, total=8192, lengths=(256, 8192))  # with a batch and without: the two that are compiled apart
SMOKE = Size(width=32, heads=2, depth=4, total=128, lengths=(32, 128))


class Layers(nn.Module):
    """A stack of DiT layers with routing in its loop."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, mlp_ratio=4.0, qk_norm=False, norm="layer", mlp="gelu")
            for _ in range(size.depth)
        )
        self.shift = nn.Parameter(torch.zeros(size.width))  # so that every layer's input has a gradient
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first layers are routed for speed's sake, not for quality's
            self.handles = {ratio: Handle(self.plan(ratio), depth=size.depth) for ratio in RATIOS}

    def plan(self, ratio: float) -> RoutePlan:
        """All layers but the first and the last."""
        route = {"selection_ratio": ratio, "start_layer_idx": 1, "end_layer_idx": -2}
        return RoutePlan.from_config({"routes": [route]}).resolve(self.size.depth)

    def forward(self, x: Tensor, c: Tensor, ratio: float | None) -> Tensor:
        """Tokens x (B, S, D), condition c (B, D), a ratio or None for dense -> (B, S, D)."""
        handle = self.handles[RATIOS[0] if ratio is None else ratio]
        with handle.dense() if ratio is None else handle.routed():
            state = handle.begin(training=True)
        x = x + self.shift
        for layer, block in enumerate(self.blocks):
            x = state.exit(layer, block(state.enter(layer, x), c))
        return x


def measure(record: Record, model: Layers, length: int) -> Facts:
    """Dense and every ratio by turns at one length."""
    size, device = model.size, record.device
    batch = size.total // length
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(batch, length, size.width, device=device, dtype=dtype)  # (B, S, D)
    c = torch.randn(batch, size.width, device=device, dtype=dtype)  # (B, D)
    gradient = torch.randn_like(x)

    def step(ratio: float | None) -> None:
        model(x, c, ratio).backward(gradient)
        model.zero_grad(set_to_none=True)

    kinds = {"dense": partial(step, None)} | {str(ratio): partial(step, ratio) for ratio in RATIOS}
    for one in (*kinds.values(), *kinds.values()):
        one()
    if record.warm:
        return {}
    times = alternate(kinds, device, seconds=record.seconds / 3, rounds=3)
    seen = clocks()
    shape = LayerShape(width=size.width)
    points = {}
    for ratio in RATIOS:
        cost = plan_cost(model.plan(ratio), shape, tokens=length)
        flops = 3 * batch * cost.dense_flops, 3 * batch * cost.routed_flops
        points[str(ratio)] = compared(asdict(times["dense"]), asdict(times[str(ratio)]), *flops)
    words = [f"{ratio}: x{one['speedup']:.2f} of x{one['ideal']:.2f};" for ratio, one in points.items()]
    return {
        "shapes": asdict(size) | {"tokens": length, "batch": batch},
        "clocks": seen,
        "points": points,
        "summary": {"speed-up at": " ".join(words)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the curve and draw it."""
    parser = options(__doc__)
    parser.add_argument("--figure", type=Path, help="a PNG of the curve")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a sample; from 256 to 65,536 by doubling")
    given = parser.parse_args(arguments)
    record = Record("curve", given)
    size = SMOKE if record.smoke else WARM if record.warm else FULL
    use_attention("auto", record.device)
    torch.manual_seed(0)
    with torch.device(record.device):
        model = Layers(size).train()
    if record.device.type == "cuda":
        model.bfloat16()
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(dynamic=True)
    # the ends first: what is left out when time runs short lies between
    ordered = sorted(size.lengths, key=lambda length: (size.lengths.index(length) % 2, length))
    for length in given.lengths or ordered:
        record.measure(f"{length} tokens", partial(measure, record, model, length), row="curve")
    for block in model.blocks:
        block._compiled_call_impl = None
    torch._dynamo.reset()
    if given.figure is not None and not record.warm:
        from benchmarks.plot import draw

        draw(record.facts, given.figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
