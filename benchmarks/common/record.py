"""Shared by the scripts: command-line options, and a JSON record rewritten atomically after every measurement.

- A measurement that fails is recorded with its traceback and the next one runs. Only if the device itself is lost (an
  illegal memory access) the script ends, with exit code 3.
- A measurement that would start after the budget is recorded as skipped.
"""

import argparse
import gc
import importlib.metadata
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.timing import GIB, ceilings
from tread.files import write_text

RESULTS = Path("benchmarks/results")
LIBRARIES = ("torch", "triton", "diffusers", "transformers", "peft", "torchao", "accelerate")
DEVICE_LOST = 3
Facts = dict[str, Any]


def options(
    description: str | None, variants: Sequence[str] = (), chosen: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The options every script has; `chosen` are the variants measured unless others are named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--warm", action="store_true", help="compile for the caches with few layers, measure nothing")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each measurement repeats its steps")
    parser.add_argument("--budget-seconds", type=float, default=600.0, help="start no measurement after this")
    parser.add_argument("--out", type=Path, help="the JSON file (default: benchmarks/results/GPU-SCRIPT.json)")
    if variants:
        parser.add_argument("--variants", nargs="+", choices=variants, default=list(chosen), help="which to measure")
    return parser


class Record:
    """The results of one script."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() and not given.smoke else "cpu")
        self.smoke, self.warm = given.smoke, given.warm
        if given.smoke:
            torch.set_num_threads(1)  # tiny work on a shared machine: several threads would wait for each other
        self.seconds = 0.0 if given.smoke else given.seconds
        self._ends = time.monotonic() + given.budget_seconds
        self.path: Path = given.out or RESULTS / f"{device_slug()}-{name}.json"
        self.facts: Facts = {
            "name": name,
            "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
            "smoke": given.smoke,
            "machine": machine() | {"ceilings": None if given.warm else ceilings(self.device)},
            "measurements": [],
        }

    @property
    def left(self) -> float:
        """Seconds left in the budget."""
        return self._ends - time.monotonic()

    def measure(self, name: str, function: Callable[[], Facts], **facts: Any) -> Facts:
        """Run one measurement and record its result, or its traceback, together with `facts`."""
        entry: Facts = {"name": name, **facts}
        if self.left <= 0:
            return self._add(entry | {"status": "skipped", "error": "out of time"})
        start = time.monotonic()
        lost = False
        try:
            entry |= function()
            entry["status"] = "ok"
        except Exception as error:  # one failure must not stop the other measurements
            entry |= {"status": "failed", "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            lost = self._device_lost()
        entry |= {"took_seconds": round(time.monotonic() - start, 1)}
        self._add(entry)
        if lost:
            print("the device is lost: the script ends here", flush=True)
            raise SystemExit(DEVICE_LOST)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return entry

    def _device_lost(self) -> bool:
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def _add(self, entry: Facts) -> Facts:
        self.facts["measurements"].append(entry)
        print(describe(entry), flush=True)
        if not self.warm:
            write_json(self.path, self.facts)
        return entry


def describe(entry: Facts) -> str:
    """One line about a measurement."""
    head = f"{entry.get('row', '-')} | {entry['name']}"
    if entry["status"] != "ok":
        lines = entry["error"].splitlines() or [""]
        return f"{head}: {entry['status']}: {lines[0][:300]}"
    words = [f"{head}:"]
    for kind in ("dense", "routed"):
        if kind in entry:
            one = entry[kind]
            speed = f", {one['images_per_second']:,.0f} img/s" if "images_per_second" in one else ""
            memory = f", {one['peak_gib']:.1f} GiB" if one.get("peak_gib") else ""
            words.append(f"{kind} {one['median_ms']:.1f} ms ({one['low_ms']:.1f}-{one['high_ms']:.1f}{speed}{memory});")
    if entry.get("speedup"):
        words.append(f"x{entry['speedup']:.3f} of x{entry['ideal']:.3f} = {entry['achieved']:.3f};")
    words += [f"{name} {value}" for name, value in entry.get("summary", {}).items()]
    if "took_seconds" in entry:
        words.append(f"[{entry['took_seconds']:.0f} s]")
    return " ".join(words)


def compared(dense: Facts, routed: Facts, dense_flops: float, routed_flops: float) -> Facts:
    """The measured and the ideal speed-up, and the achieved FLOP/s."""
    speedup, ideal = dense["median_ms"] / routed["median_ms"], dense_flops / routed_flops
    for one, flops in ((dense, dense_flops), (routed, routed_flops)):
        one["tflops"] = round(flops / one["median_ms"] / 1e9, 1)
    return {
        "dense": dense,
        "routed": routed,
        "dense_tflop": round(dense_flops / 1e12, 3),
        "routed_tflop": round(routed_flops / 1e12, 3),
        "speedup": round(speedup, 4),
        "ideal": round(ideal, 4),
        "achieved": round(speedup / ideal, 4),
    }


def machine() -> Facts:
    """The device and versions that figures depend on."""
    cuda = torch.cuda.is_available()
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / GIB, 1) if cuda else None,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        **versions,
    }


def device_slug() -> str:
    """`h200` for an NVIDIA H200, `cpu` without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    words = torch.cuda.get_device_name().removeprefix("NVIDIA ").removeprefix("GeForce ")
    return "-".join(words.lower().split())


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: a benchmark may be killed at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")
