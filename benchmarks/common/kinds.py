"""Where the time of dense and routed steps goes, by kind of kernel, against what the FLOPs of each kind say.

Where a step falls short of its FLOPs, this tells which kernels do not shrink as their work does, and how much of the
step no kernel accounts for. CUDA graphs do not hide kernels from the profiler.
"""

from dataclasses import asdict

from benchmarks.common.profile import STEPS, events_of, kernels_of
from benchmarks.common.record import Facts
from benchmarks.common.steps import Steps

KINDS = {
    "attention": ("sdpa", "cudnn", "flash", "fmha", "attention"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "gemv", "splitk"),
    "compiled": ("triton_",),
}
"""Substrings of kernel names by kind; the first match counts. Everything else is `other`: copies, the optimizer."""


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def by_kind(steps: Steps) -> Facts:
    """Milliseconds and launches by kind of dense and routed steps, with the FLOPs of each; call `compare` first."""
    found: dict[str, dict[str, Facts]] = {}
    for sort, step in (("dense", steps.dense), ("routed", steps.routed)):
        times: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "other")}
        for kernel in kernels_of(events_of(step, steps.device.type == "cuda")):
            times[kind_of(kernel.name)].append(kernel.time_range.elapsed_us())
        found[sort] = {
            kind: {"ms": round(sum(each) / 1e3 / STEPS, 3), "launches": round(len(each) / STEPS, 1)}
            for kind, each in times.items()
        }
    dense, routed = found["dense"], found["routed"]
    summary = {kind: f"{dense[kind]['ms']:.1f} -> {routed[kind]['ms']:.1f} ms;" for kind in dense}
    return {"kinds": found, "flops": {sort: asdict(flops) for sort, flops in steps.flops.items()}, "summary": summary}
