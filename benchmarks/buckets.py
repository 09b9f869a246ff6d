"""A loop over aspect buckets with prompts of random lengths: how much is compiled and captured before it settles.

    python -m benchmarks.buckets --shapes 8        # FLUX.1, Qwen-Image and Z-Image, full width, few layers

`handle.compile(shapes=N)` gives the first N shapes code of their own; further ones share code for any shape. Each
round visits every bucket once: the counts must stop growing. FLUX.1's prompts are padded to one length, so each bucket
gets graphs at its third visit; the prompts of Qwen-Image and Z-Image have a new length each time, so few kinds of calls
come often enough to get any.
"""

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch._dynamo.utils import counters

from benchmarks import flux
from benchmarks.common import qwen, z_image
from benchmarks.common.lora import Shape
from benchmarks.common.record import Facts, Record, options
from benchmarks.common.steps import compile_options
from benchmarks.loop import Loop, looping, make_model

MODELS = {"flux": flux.SHAPES, "qwen": qwen.SHAPES, "z-image": z_image.SHAPES}
ASPECTS = ((64, 64), (56, 72), (72, 56), (52, 78), (78, 52), (48, 84), (84, 48), (44, 92), (92, 44), (40, 100))
ASPECTS += (100, 40), (36, 112)
LONGEST_PROMPT = 512
PADDED = ("flux",)
"""Models whose prompts are all as long as the longest."""


def run(record: Record, shape: Shape, *, shapes: int, rounds: int, padded: bool) -> Facts:
    """Visit the buckets `rounds` times."""
    model: Any = make_model(shape, record.device)
    counters.clear()
    with looping(model, shape, record.device, checkpointed=True) as loop:
        loop.handle.compile(shapes=shapes, **compile_options("default", record.device))
        draw = random.Random(0)
        found = [one_round(record, loop, shape, draw, padded=padded) for _ in range(rounds)]
    settled = found[-1]["compilations"] == found[-2]["compilations"]
    return {"rounds": found, "settled": settled, "summary": {"by round": [tuple(one.values()) for one in found]}}


def one_round(record: Record, loop: Loop, shape: Shape, draw: random.Random, *, padded: bool) -> Facts:
    """A step in every bucket; the counts since the start."""
    start, longest = time.perf_counter(), 16 if record.smoke else LONGEST_PROMPT
    for rows, columns in ASPECTS:
        if record.smoke:
            rows, columns = rows // 4 // 2 * 2, columns // 4 // 2 * 2
        loop.batch = shape.inputs(record.device, rows, columns, longest if padded else draw.randrange(8, longest))
        value = float(loop.routed()["loss"])
        if value != value:
            raise RuntimeError(f"the loss is not a number at {rows} x {columns}")
    fast: Any = loop.handle.fast
    return {
        "compilations": counters["stats"]["unique_graphs"],
        "graphs": fast.graphs.count if fast.graphs is not None else 0,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Count on the chosen models."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--shapes", type=int, default=32, help="shapes with code of their own")
    parser.add_argument("--rounds", type=int, default=5, help="visits of all buckets")
    given = parser.parse_args(arguments)
    record = Record("buckets", given)
    for name in given.models:
        shape = MODELS[name]["smoke" if record.smoke else "shallow"]
        facts = {"row": f"buckets-{name}", "shapes": given.shapes, "buckets": len(ASPECTS), "notes": shape.notes}
        given_all = {"shapes": given.shapes, "rounds": given.rounds, "padded": name in PADDED}
        record.measure("checkpointed", partial(run, record, shape, **given_all), **facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
