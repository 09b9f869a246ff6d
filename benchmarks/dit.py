"""DiT-XL/2 and DiT-B/2 from scratch: 256 latent tokens, 256 images, bf16 autocast, fused AdamW, a moving average.

    python -m benchmarks.dit --models XL/2 B/2
    python -m benchmarks.dit --models XL/2 --variants whole-stream rowwise-stream

Routes are 0.5 over 2..24 and 2..8. The loss is the product's flow objective with its own hashed noise and times; the
latents are random and lie on the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.common.float8 import train_in_float8
from benchmarks.common.profile import profile_routing
from benchmarks.common.record import Facts, Record, options
from benchmarks.common.steps import Steps, Work, compile_options, job_config, stepping
from tread.kernels import adaln
from tread.kernels.attention.kernel import Attention
from tread.kernels.compiling import lengths
from tread.kernels.fast import Fast
from tread.models import DiT, model_size
from tread.objectives import build as build_objective
from tread.routing import noise

CLASSES, DROPPED = 1000, 0.1
ENDS = {"XL/2": 24, "B/2": 8, "tiny": 8}
SHALLOW = 6
"""Layers that are enough to compile everything, or to try it."""
ROWS = {"XL/2": "dit-xl", "B/2": "dit-b", "tiny": "dit-tiny"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the same step."""

    name: str
    sdpa: Attention = "auto"
    """The product's `train.attention`."""
    graphs: bool = True
    """The product's `train.graphs`."""
    compiled: str | None = "blocks"
    """`blocks` one by one, the `whole` model, or None: eager."""
    mode: str = "default"
    """torch.compile's."""
    plain_norms: bool = False
    """adaLN as the compiler makes it, without the product's kernels."""
    float8: str | None = None
    """The product's `train.float8`, or a trial of benchmarks.common.float8; None: bf16."""
    stream: bool = False
    """The product's `train.precision: bf16-stream`."""

    @property
    def beyond(self) -> list[str]:
        """What the product does not do by any setting of its own."""
        found = {
            "whole model compiled": self.compiled == "whole",
            f"compile mode {self.mode}": self.mode != "default",
            "adaLN without its kernels": self.plain_norms,
            f"float8 linears, {self.float8}": self.float8 not in (None, "rowwise", "tensorwise"),
        }
        return [words for words, true in found.items() if true]


# `blocks` is what the product does unless a config says otherwise
VARIANTS = (
    Variant(name="graphs", stream=True),
    Variant(name="blocks", graphs=False),
    Variant(name="stream", stream=True, graphs=False),
    Variant(name="stream-plain-norms", stream=True, graphs=False, plain_norms=True),
    Variant(name="flash", sdpa="flash"),
    Variant(name="whole-stream", compiled="whole", stream=True),
    Variant(name="eager", compiled=None, graphs=False),
    Variant(name="max-autotune", mode="max-autotune-no-cudagraphs"),
    Variant(name="rowwise", float8="rowwise"),
    Variant(name="rowwise-stream", float8="rowwise", stream=True),
    Variant(name="rowwise-stream-compiled", float8="rowwise", stream=True, graphs=False),
    Variant(name="tensorwise-stream", float8="tensorwise", stream=True),
    Variant(name="float8-torchao", float8="torchao-tensorwise"),
    Variant(name="float8-torchao-rowwise", float8="torchao-rowwise"),
)


@contextmanager
def dit_steps(name: str, variant: Variant, device: torch.device, *, batch: int, depth: int | None) -> Iterator[Steps]:
    """Steps of a fresh model; `depth` replaces the size's."""
    torch.manual_seed(0)
    shape = (4, 8, 8) if name == "tiny" else (4, 32, 32)
    settings: dict[str, Any] = model_size(name) | ({} if depth is None else {"depth": depth})
    with torch.device(device):
        model = DiT(input_size=shape[1:], in_channels=shape[0], num_classes=CLASSES, **settings).train()
        for parameter in model.parameters():
            if not parameter.any():  # a fresh model is the identity: products on zeros would run too fast
                nn.init.normal_(parameter, std=0.02)
    model.stream = torch.bfloat16 if variant.stream else None
    if variant.float8 is not None:
        train_in_float8(model, variant.float8)
    end = ENDS[name] if depth is None else depth - 2
    handle = model.route({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": end}]})
    objective = build_objective("flow", {})

    def make_fast() -> Fast:
        if variant.compiled == "whole":
            model.compile(dynamic=False, **compile_options(variant.mode, device))
        return Fast(
            model,
            list(model.blocks),
            [handle],
            compiled=variant.compiled not in (None, "whole"),
            graphs=variant.graphs and device.type == "cuda",
            attention=variant.sdpa,
            shapes=lengths(handle.plan),
            **compile_options(variant.mode, device),
        )

    def loss(net: nn.Module, given: tuple[Tensor, Tensor], step: int) -> Tensor:
        x, labels = given
        where = (torch.arange(batch) + step * batch).to(device, non_blocking=True)  # (B,)
        labels = labels.masked_fill(noise.uniform(0, 1, where) < DROPPED, CLASSES)
        drawn, u = noise.per_sample_normal(0, where, shape, 2), noise.uniform(0, 3, where)
        return objective.loss(net, x, labels, noise=drawn, u=u).mean()

    data = torch.randn(batch, *shape, device=device), torch.randint(CLASSES, (batch,), device=device)
    compiled = variant.compiled is not None
    work = Work(model=model, handle=handle, batch=data, loss_of=loss, fast=make_fast)
    config = job_config(
        batch_size=batch, autocast=True, compiled=compiled, attention=variant.sdpa, graphs=variant.graphs, ema=True
    )
    try:
        with _norms(plain=variant.plain_norms), stepping(work, config, device) as steps:
            yield steps
    finally:
        model._compiled_call_impl = None


def _norms(*, plain: bool) -> AbstractContextManager[Any]:
    return patch.object(adaln, "WIDEST", 0) if plain else nullcontext()


def compare(record: Record, name: str, variant: Variant, batch: int, profiles: list[Facts]) -> Facts:
    """One variant against its own dense step; where layers are compiled and no graph hides it, routing's share too."""
    depth = SHALLOW if record.warm or record.smoke else None
    with dit_steps(name, variant, record.device, batch=batch, depth=depth) as steps:
        if record.warm:
            return steps.warm_up()
        facts = steps.compare(seconds=record.seconds, rounds=2 if record.smoke else 5, images=batch)
        if variant.compiled == "blocks" and not variant.graphs:
            profiles.append(profile_routing(steps))
        return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen models and variants."""
    parser = options(__doc__, [variant.name for variant in VARIANTS], ["graphs", "stream"])
    parser.add_argument("--models", nargs="+", choices=list(ENDS), default=["XL/2", "B/2"])
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args(arguments)
    record = Record("dit", given)
    models, batch = (["tiny"], 2) if given.smoke else (given.models, given.batch)
    by_name = {variant.name: variant for variant in VARIANTS}
    for name in models:
        for variant in (by_name[one] for one in given.variants):
            profiles: list[Facts] = []
            record.measure(
                variant.name,
                partial(compare, record, name, variant, batch, profiles),
                row=ROWS[name] + ("-float8" if variant.float8 else ""),
                variant=asdict(variant),
                beyond=variant.beyond,
                shapes={"model": name, "batch": batch, "tokens": 64 if name == "tiny" else 256},
            )
            for profile in profiles:
                record.measure(f"dit {name}, {variant.name}", partial(dict, profile), row="routing")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
