"""What attaching costs the host: microseconds per layer and forward, on layers that do nothing.

    python -m benchmarks.hooks

It runs on any machine and needs no GPU: the time is Python's. A device hides it as long as it is busy, so it matters
where layers are short. Each way is timed on the same stack; what a way adds over the plain one is its cost.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tread
from benchmarks.common.record import Facts, Record, options

DEPTH, TOKENS, WIDTH = 57, 8, 4
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}


class Idle(nn.Module):
    """A layer that returns its tokens."""

    def forward(self, hidden_states: Tensor, rope: tuple[Tensor, Tensor], temb: Tensor) -> Tensor:
        return hidden_states


class Model(nn.Module):
    """Layers that do nothing, called as stock models call theirs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Idle() for _ in range(depth))
        self.gradient_checkpointing = False

    def _gradient_checkpointing_func(self, layer: Any, *args: Any) -> Any:
        return checkpoint(layer.__call__, *args, use_reentrant=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], temb: Tensor) -> Tensor:
        for layer in self.layers:
            if self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(layer, x, rope, temb)
            else:
                x = layer(hidden_states=x, rope=rope, temb=temb)
        return x


FAMILY = tread.Family(
    models=("Model",),
    stacks=(tread.Stack(name="layers", sides=(tread.Side(name="rope", dim=0),)),),
)


def per_layer(call: Callable[[], Any], depth: int, repeats: int) -> float:
    """Microseconds per layer: the fastest of several blocks, which is the one nothing interrupted."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        found.append((time.perf_counter() - start) / repeats)
    return min(found) * 1e6 / depth


def measure(depth: int, repeats: int, *, checkpointed: bool) -> Facts:
    """Plain, attached and dense, attached and routed."""
    model = Model(depth).train()
    model.gradient_checkpointing = checkpointed
    table = torch.randn(TOKENS, WIDTH)
    arguments = torch.randn(1, TOKENS, WIDTH, requires_grad=True), (table, table), torch.randn(1, WIDTH)
    call = partial(model, *arguments)
    plain = per_layer(call, depth, repeats)
    with tread.attach(model, ROUTES, family=FAMILY) as handle:
        routed = per_layer(call, depth, repeats)
        with handle.dense():
            dense = per_layer(call, depth, repeats)
    figures = {
        "plain_us": plain,
        "attached_dense_us": dense,
        "attached_routed_us": routed,
        "routing_us": routed - plain,
    }
    figures = {name: round(value, 2) for name, value in figures.items()}
    return {"shapes": {"layers": depth}, **figures, "summary": figures}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both ways to call layers."""
    record = Record("hooks", options(__doc__).parse_args(arguments))
    depth, repeats = (6, 2) if record.smoke else (DEPTH, 50)
    for name, checkpointed in (("hooks", False), ("checkpointed", True)):
        record.measure(name, partial(measure, depth, repeats, checkpointed=checkpointed), row="hooks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
