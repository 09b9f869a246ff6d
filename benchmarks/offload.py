"""LoRA steps on cards that cannot hold the model: layers in host memory, torch's memory capped, copies slowed down.

    python -m benchmarks.offload                                # every row
    python -m benchmarks.offload --rows flux-1024-12 --eager

- A row names a card: torch may take its size less 1 GiB (`set_per_process_memory_fraction`), and `offload: auto`
  chooses the layers within that. The step of the same model on the GPU, without a cap, is timed first.
- The GPU's own link is faster than a consumer card's. A copy is stretched to 12 and 25 GB/s by a kernel that sleeps in
  the stream of the copies, after each of them, for as long as the copy was too fast: the next copy and the layer wait
  for it as they would for the copy.
- Weights are random, made on the GPU and quantized there. Host memory is the anonymous memory of the process (RssAnon).
- The ratio says how much slower than in memory: on a GPU as fast as an H200 copies hide less than on a consumer card;
  `hides_tflops` is the rate up to which they would.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tread
from benchmarks import flux, wan
from benchmarks.common import qwen
from benchmarks.common.flops import count_flops
from benchmarks.common.lora import ROUTES, Shape, adapt, build
from benchmarks.common.record import Facts, Record, options
from benchmarks.common.steps import Steps, Work, compile_options, job_config, stepping
from benchmarks.common.timing import GIB, alternate, timed, watched
from tread.attach.registry import layers_of
from tread.finetune.model.quantize import quantize
from tread.kernels.compiling import lengths
from tread.kernels.fast import Fast
from tread.kernels.offload.host import HostLayer
from tread.kernels.offload.memory import let_segments_grow
from tread.kernels.offload.ring import Ring, Slot

LINKS = (25, 12)
"""GB/s of a consumer card's copies; the faster first, which leaves time for the slower."""
WARM_STEPS = 3
"""One decides how many layers are offloaded, one shows the order, one has it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model, its base and a card."""

    name: str
    shapes: dict[str, Shape]
    card: int
    """GB of the card; torch has 1 GiB less."""
    precision: str


def _with(module: Any, **size: Any) -> dict[str, Shape]:
    """The shapes of a script with another size of the full one."""
    return module.SHAPES | {"full": module.shape(**size), "shallow": module.shape(**size, **SHALLOW[module])}


SHALLOW: dict[Any, dict[str, int]] = {flux: {"double": 4, "single": 3}, wan: {"layers": 6}, qwen: {"layers": 6}}
ROWS = (
    Row(name="flux-1024-12", shapes=_with(flux), card=12, precision="fp8"),
    Row(name="flux-512-8", shapes=_with(flux, side=32), card=8, precision="int4"),
    Row(name="wan-480p-33-16", shapes=_with(wan, latent=(9, 60, 104)), card=16, precision="fp8"),
    Row(name="qwen-1024-16", shapes=_with(qwen), card=16, precision="fp8"),
)


def measure_row(record: Record, row: Row, *, eager: bool) -> None:
    """The step in memory, then in the card's memory at each speed of the link."""
    shape = row.shapes["smoke" if record.smoke else "shallow" if record.warm else "full"]
    facts: Facts = {"row": row.name, "card_gb": row.card, "precision": row.precision, "shapes": shape.notes}
    made: list[nn.Module] = []
    record.measure("build", partial(_build, record, row, shape, made), row="set-up")
    if not made:
        return
    resident: Facts = {}
    for card in (None, row.card):
        name = "in memory" if card is None else f"{card} GB card"
        with ExitStack() as stack:
            opened: list[Opened] = []
            start = partial(_open, record, made[0], shape, card, stack, opened, eager=eager)
            record.measure(f"{name}, first steps", start, row="set-up")
            if not opened or record.warm:
                continue
            if card is None:
                resident = record.measure(name, partial(_time, record, opened[0], None, {}), **facts)
                continue
            for link in LINKS:
                time = partial(_time, record, opened[0], link, resident)
                record.measure(f"{name}, {link} GB/s", time, link_gb_s=link, **facts)


def _build(record: Record, row: Row, shape: Shape, made: list[nn.Module]) -> Facts:
    model = build(shape, record.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    quantize(model, row.precision, record.device)
    adapt(model)
    made.append(model)
    return {"summary": {"model": row.name, "parameters": parameters, "precision": row.precision}}


@dataclass(frozen=True)
class Opened:
    """A model that has made its first steps, in memory or offloaded."""

    handle: tread.Attachment
    steps: Steps


def _open(
    record: Record,
    model: nn.Module,
    shape: Shape,
    card: int | None,
    stack: ExitStack,
    opened: list[Opened],
    *,
    eager: bool,
) -> Facts:
    """Let the model make its first steps, offloaded to fit a card or not; `stack` takes everything off again."""
    device = record.device
    handle = stack.enter_context(tread.attach(model, ROUTES))
    stack.enter_context(_capped(card, device))
    if card is not None:
        # a CPU has no memory to keep within
        handle.offload("auto" if device.type == "cuda" else len(layers_of(model)), device=device)
    steps = stack.enter_context(_steps(model, handle, shape, device, eager=eager))
    for _ in range(1 if record.warm else WARM_STEPS):
        steps.routed()
    opened.append(Opened(handle, steps))
    return {}


def _time(record: Record, opened: Opened, link: int | None, resident: Facts) -> Facts:
    """Routed steps at a speed of the copies; `resident` is what the step in memory came to."""
    device, step = record.device, opened.steps.routed
    with _slowed(opened.handle, link, device):
        flops = resident["flops"] if "flops" in resident else count_flops(step, device).total
        alone = watched(step, device)
        timing = alternate({"routed": step}, device, seconds=record.seconds, rounds=2)["routed"]
        facts = {"routed": asdict(timing) | alone, "flops": flops}
        return facts | {"summary": _summary(opened.handle, facts, link, resident)}


def _summary(handle: tread.Attachment, facts: Facts, link: int | None, resident: Facts) -> Facts:
    found: Facts = {"host_gib": anonymous_gib()}
    if handle.offloaded is not None and link is not None:
        sizes = [call.host.size for call in handle.offloaded.calls if call.host is not None]
        found |= {"layers": len(sizes), "offloaded_gib": round(sum(sizes) / GIB, 2)}
        # of a LoRA's step the forward is a third; it hides one copy of every layer
        found["hides_tflops"] = round(facts["flops"] / 3 * link * 1e9 / max(sum(sizes), 1) / 1e12, 1)
        if "routed" in resident:
            found["ratio"] = round(facts["routed"]["median_ms"] / resident["routed"]["median_ms"], 3)
    return found


@contextmanager
def _steps(
    model: nn.Module, handle: tread.Attachment, shape: Shape, device: torch.device, *, eager: bool
) -> Iterator[Steps]:
    """Steps of the product's loop, checkpointed."""
    if eager:
        model.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    work = Work(
        model=model,
        handle=handle,
        batch=shape.inputs(device),
        loss_of=shape.loss or _loss,
        fast=lambda: Fast(
            model,
            layers_of(model),
            [handle],
            compiled=not eager,
            checkpointing=not eager,
            graphs=False,
            shapes=lengths(handle.plan),
            **compile_options("default", device),
        ),
    )
    config = job_config(batch_size=1, autocast=True, compiled=not eager, attention="auto", graphs=False, ema=False)
    with stepping(work, config, device) as steps:
        yield steps


def _loss(model: nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
    return (model(**batch, return_dict=False)[0].float() - 1).square().mean()


@contextmanager
def _capped(card: int | None, device: torch.device) -> Iterator[None]:
    """Inside, torch may take what a card of so many GB has, less 1 GiB; weights beyond it leave when they are
    offloaded, and come back afterwards."""
    if card is None or device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction((card - 1) * GIB / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _slowed(handle: tread.Attachment, link: int | None, device: torch.device) -> Iterator[None]:
    """Inside, copies of offloaded layers take as long as over a link of so many GB/s."""
    if link is None or handle.offloaded is None or device.type != "cuda" or not handle.offloaded.calls:
        yield
        return
    ring = handle.offloaded.ring
    ring.copy = _stretched(ring, link, device)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del ring.__dict__["copy"]


def _stretched(ring: Ring, link: int, device: torch.device) -> Callable[[Slot, HostLayer], None]:
    copy = ring.copy
    cycles = 10**8
    torch.cuda._sleep(1000)  # pyright: ignore[reportPrivateUsage]
    per_ms = cycles / timed(lambda: torch.cuda._sleep(cycles), 1, device)  # pyright: ignore[reportPrivateUsage]
    missing = max(0.0, 1e3 / (link * 1e9) - _ms_per_byte(device))

    def stretched(slot: Slot, host: HostLayer) -> None:
        copy(slot, host)
        torch.cuda._sleep(int(host.size * missing * per_ms))  # pyright: ignore[reportPrivateUsage]

    return stretched


def _ms_per_byte(device: torch.device) -> float:
    """Of a copy from page-locked memory over the GPU's own link."""
    block = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(block, device=device)
    target.copy_(block)
    return timed(lambda: target.copy_(block, non_blocking=True), 3, device) / block.nbytes


def anonymous_gib() -> float:
    """GiB of anonymous memory of this process; 0 where /proc does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    kib = next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
    return round(kib / 2**20, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen rows."""
    parser = options(__doc__)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="which to measure")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    given = parser.parse_args(arguments)
    let_segments_grow()
    record = Record("offload", given)
    for row in ROWS:
        if row.name in given.rows:
            measure_row(record, row, eager=given.eager)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
