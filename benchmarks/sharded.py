"""FSDP on one rank beside none: step time, memory, CPU offload, and how long a save in the background stops the step.

    python -m benchmarks.sharded --out $OUT/sharded.json
    python -m benchmarks.sharded --smoke --out sharded.json

- One rank gathers from nobody: what FSDP adds here is its hooks and copies, without any network. Layers are compiled.
- `stall_ms` is how long `Session.save` keeps the loop: of shards, the copy to pinned host memory; the first save also
  allocates that memory and is told apart. `written_ms` is the time until the checkpoint is in place. Without shards the
  loop waits for all of it.
- Checkpoints are written to a folder of their own inside `--folder`, which decides the disk, and removed at the end. A
  checkpoint holds weights, average and moments, 16 bytes per weight: 2 GB of B/2, 11 GB of XL/2.
- Each phase says what it does and how long it took, and the JSON file has every layout that came to its end.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from torch import Tensor, distributed, nn

from benchmarks.common.record import Facts, Record, options
from benchmarks.common.steps import Work, job_config, reset_accelerate
from benchmarks.common.timing import alternate, watched
from tread.kernels.fast import Fast
from tread.models import DiT, model_size
from tread.objectives import build as build_objective
from tread.routing import noise
from tread.training.session import Session
from tread.training.settings import JobConfig, LoopConfig
from tread.training.sharding.layout import open_group, shard

CLASSES = 1000
LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "fsdp": {"parallel": "fsdp"},
    "fsdp-offload": {"parallel": "fsdp", "cpu_offload": True},
}
"""What each measurement sets in the loop's settings."""
SAVES = 4
"""Saves of each layout; the first one allocates."""


@dataclass(kw_only=True)
class Saved(Work):
    """A work whose session can be saved."""

    facts: dict[str, Any] = field(default_factory=dict)

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is all there is."""


@contextmanager
def session_of(record: Record, layout: str, given: argparse.Namespace) -> Iterator[tuple[Session, Any]]:
    """The session of a fresh DiT in a layout, and its batches."""
    reset_accelerate()
    device, batch, size = record.device, 2 if record.smoke else given.batch, "tiny" if record.smoke else given.model
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=False)]
    )
    config = configured(layout, batch, compiled=not record.smoke)
    torch.manual_seed(0)
    shape = (4, 8, 8) if record.smoke else (4, 32, 32)
    model = DiT(input_size=shape[1:], in_channels=shape[0], num_classes=CLASSES, **model_size(size)).train()
    end = model.depth - 4
    handle = model.route({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": end}]})
    if config.train.sharded:
        open_group(device)
        shard(model, model.blocks, config, accelerator)
    else:
        model.to(device)
    objective = build_objective("flow", {})

    def loss(net: nn.Module, samples: tuple[Tensor, Tensor], step: int) -> Tensor:
        x, labels = samples
        where = (torch.arange(batch) + step * batch).to(device, non_blocking=True)  # (B,)
        drawn, u = noise.per_sample_normal(0, where, shape, 2), noise.uniform(0, 3, where)
        return objective.loss(net, x, labels, noise=drawn, u=u).mean()

    def make_fast() -> Fast:
        return Fast(
            model, list(model.blocks), [handle], compiled=not record.smoke, graphs=False, shapes=2, device=device
        )

    samples = torch.randn(batch, *shape, device=device), torch.randint(CLASSES, (batch,), device=device)
    work = Saved(model=model, handle=handle, batch=samples, loss_of=loss, fast=make_fast)
    session = Session(work, config, accelerator)  # pyright: ignore[reportArgumentType]
    try:
        yield session, cycle([samples])
    finally:
        for fast in session.fast:
            fast.remove()
        torch._dynamo.reset()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        reset_accelerate()


def configured(layout: str, batch: int, *, compiled: bool) -> JobConfig:
    """The settings of a layout."""
    config = job_config(batch_size=batch, autocast=True, compiled=compiled, attention="auto", graphs=False, ema=True)
    train: LoopConfig = replace(config.train, **LAYOUTS[layout])
    return replace(config, train=train, checkpoint=replace(config.checkpoint, every=1, keep=1))


def measure(record: Record, layout: str, given: argparse.Namespace) -> Facts:
    """Step time, memory and the stall of a save, in one layout."""
    with ExitStack() as stack:
        with _said(layout, "make the model"):
            session, batches = stack.enter_context(session_of(record, layout, given))
        count = iter(range(1, 1_000_000))

        def step() -> dict[str, Tensor]:
            return session.step(next(count), batches)

        warm_up = 1 if record.smoke else 5
        with _said(layout, f"compile and warm up ({warm_up} steps)"):
            for _ in range(warm_up):
                step()
            alone = watched(step, record.device)
        with _said(layout, "time steps"):
            timing = alternate({"routed": step}, record.device, seconds=record.seconds, rounds=2 if record.smoke else 5)
        saves = []
        for number in range(SAVES):
            with _said(layout, f"save {number + 1} of {SAVES}"):
                saves.append(_save(session, given.folder / layout, number, step))
    stalls = [save["stall_ms"] for save in saves]
    later = sorted(stalls[1:])[(SAVES - 1) // 2]
    return {
        "routed": asdict(timing["routed"]) | alone,
        "saves": saves,
        "summary": {"first stall ms": stalls[0], "later stalls ms": later, "written ms": saves[-1]["written_ms"]},
    }


@contextmanager
def _said(layout: str, doing: str) -> Iterator[None]:
    """Print what is done and how long it took, in one line that is begun before it is done."""
    print(f"{layout} | {doing} ... ", end="", flush=True)
    begin = time.perf_counter()
    try:
        yield
    finally:
        print(f"{time.perf_counter() - begin:.1f} s", flush=True)


def _save(session: Session, folder: Path, number: int, step: Any) -> dict[str, float]:
    """One save with a step beside it."""
    if session.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    session.save(folder, number, wait=False)
    stall = time.perf_counter() - begin
    step()
    if session.saver is not None:
        session.saver.wait()
    written = time.perf_counter() - begin if session.saver is not None else stall
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    return {
        "stall_ms": round(stall * 1e3, 2),
        "written_ms": round(written * 1e3, 2),
        "gib": round(size / 2**30, 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen layouts."""
    parser = options(__doc__, list(LAYOUTS), list(LAYOUTS))
    parser.set_defaults(seconds=3.0)
    parser.add_argument("--model", default="B/2", help="size of the DiT")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--folder", type=Path, help="made if it is not there (default: the system's temporary folder)")
    given = parser.parse_args(arguments)
    record = Record("sharded", given)
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sharded-", dir=given.folder) as folder:
        given.folder = Path(folder)
        for layout in given.variants:
            record.measure(layout, partial(measure, record, layout, given), row="sharded", settings=LAYOUTS[layout])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
