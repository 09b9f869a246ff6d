"""Timing of steps.

- Dense and routed steps alternate in one process, in blocks, so that both see the same clocks and temperature.
- A block is several whole steps between two device events: the host runs ahead as it does in training. One figure per
  block; the median of the blocks and their 10th and 90th percentile are reported.
- The caller warms up first, so that nothing is compiled or allocated while timing.
- Without a GPU the host's clock is used, so that tests can run the same code.
"""

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tread.kernels.capture import SPOILED

Step = Callable[[], Any]
BLOCK_SECONDS = 0.4
LONGEST_BLOCK = 20
GIB = 2**30


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one step."""

    median_ms: float
    low_ms: float
    """The 10th percentile of the blocks."""
    high_ms: float
    """The 90th percentile."""
    blocks: int
    steps: int
    """Steps in all blocks together."""

    @classmethod
    def of(cls, blocks: list[float], steps: int) -> "Timing":
        """Summarise the milliseconds per step of each block."""
        ordered = sorted(blocks)
        last = len(ordered) - 1
        low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        return cls(round(statistics.median(ordered), 3), round(low, 3), round(high, 3), len(ordered), steps)


def alternate(steps: Mapping[str, Step], device: torch.device, *, seconds: float, rounds: int = 3) -> dict[str, Timing]:
    """Time the steps in alternating blocks for about `seconds`, and for at least `rounds` blocks of each."""
    first = {name: timed(step, 1, device) for name, step in steps.items()}
    lengths = {name: _block_length(milliseconds) for name, milliseconds in first.items()}
    # if a block is one step, the step that determined the block length counts as a block
    blocks_of = {name: [first[name]] if length == 1 else [] for name, length in lengths.items()}
    ends = time.perf_counter() + seconds
    while min(map(len, blocks_of.values())) < rounds or time.perf_counter() < ends:
        for name, step in steps.items():
            blocks_of[name].append(timed(step, lengths[name], device))
    return {name: Timing.of(blocks, len(blocks) * lengths[name]) for name, blocks in blocks_of.items()}


def timed(step: Step, count: int, device: torch.device) -> float:
    """Milliseconds of one step, in a block of `count`."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - start) * 1e3 / count
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(count):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / count


def _block_length(milliseconds: float) -> int:
    return max(1, min(LONGEST_BLOCK, round(BLOCK_SECONDS * 1e3 / max(milliseconds, 1e-3))))


def watched(step: Step, device: torch.device, *, graphs: bool = False) -> dict[str, float | None]:
    """Host time and peak memory of a single step, which returns its loss.

    `host_ms`: the time the host took to launch it on an idle device. `peak_gib`: peak allocated memory, weights
    included; with `graphs`, whose private pools are not counted as allocated, peak reserved memory. None without a GPU,
    and with `graphs` after a failed capture in this process, which keeps its reserved memory.
    """
    on_gpu = device.type == "cuda"
    _wait(device)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    values = step()
    host = (time.perf_counter() - start) * 1e3
    _wait(device)
    most = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated
    peak = round(most(device) / GIB, 3) if on_gpu and not (graphs and SPOILED) else None
    return {"host_ms": round(host, 3), "peak_gib": peak, "loss": float(values["loss"])}


def clocks() -> dict[str, float] | None:
    """The GPU's clocks, power and temperature now, as nvidia-smi tells them; None where it does not."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        return {name: float(value) for name, value in zip(fields, answer.split(","), strict=True)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def ceilings(device: torch.device) -> dict[str, float] | None:
    """Achievable rates of this GPU: bf16 TFLOP/s of a large matmul on random data, TB/s of a copy (read and write)."""
    if device.type != "cuda":
        return None
    rates = {"bf16_tflops": round(_product_tflops(device), 1), "copy_tb_per_s": round(_copy_tb_per_s(device), 3)}
    torch.cuda.empty_cache()  # otherwise weights would be placed in these large segments and fragment them
    return rates


def _product_tflops(device: torch.device, side: int = 8192) -> float:
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    return 2 * side**3 / min(timed(lambda: a @ b, 10, device) for _ in range(3)) / 1e9


def _copy_tb_per_s(device: torch.device) -> float:
    source = torch.randn(2**30, device=device)  # 4 GiB: far more than the cache
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), 5, device) for _ in range(3)) / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
