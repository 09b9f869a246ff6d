"""A table of measured bandwidth: all-reduce, all-gather and reduce-scatter over sizes, as JSON.

    torchrun --nproc-per-node 8 -m benchmarks.collectives --out node.json                        # one node
    torchrun --nnodes 8 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m benchmarks.collectives --out nodes.json
    python -m benchmarks.collectives --processes 2                                               # gloo, on this CPU

`tread plan MODEL --gpus 64 --collectives node.json nodes.json` reads them in place of the links that it assumes.

- `bytes` is the size of the whole tensor: what every rank has before an all-reduce or a reduce-scatter, and after an
  all-gather. The algorithm's bandwidth is bytes over seconds. The bus bandwidth counts what has to leave a rank, to be
  compared with a link: 2 (n - 1) / n of the bytes in an all-reduce, (n - 1) / n in the others.
- The figure of a size is the median over its repetitions of the slowest rank's time.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.record import RESULTS, device_slug, machine, write_json

SIZES = tuple(2**power for power in range(16, 31, 2))
"""Bytes, 64 KiB to 1 GiB."""


def collectives(size: int, world: int, device: torch.device) -> dict[str, tuple[Callable[[], Any], float]]:
    """Each collective over `size` bytes, and the share of them that leaves a rank."""
    whole = torch.zeros(size // 4 // world * world, device=device)
    part = torch.zeros(whole.numel() // world, device=device)
    parts: list[Tensor] = list(whole.chunk(world))
    share = (world - 1) / world
    if device.type == "cuda":
        return {
            "all_reduce": (lambda: dist.all_reduce(whole), 2 * share),
            "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), share),
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), share),
        }
    return {
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * share),
        "all_gather": (lambda: dist.all_gather(parts, part), share),
        "reduce_scatter": (lambda: dist.reduce_scatter(part, parts), share),
    }


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median time of the slowest rank."""
    found = []
    for repeat in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found += [float(slowest)] * (repeat > 0)  # the first one makes the connections
    return statistics.median(found)


def measure(given: argparse.Namespace) -> None:
    """Measure in every rank; the first one writes and prints the table."""
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world = dist.get_world_size()
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", world))
    facts: dict[str, Any] = {
        "name": "collectives",
        "machine": machine(),
        "backend": dist.get_backend(),
        "world": world,
        "nodes": nodes,
        "rows": [],
    }
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(f"{world} ranks on {nodes} node{'s' * (nodes > 1)} by {dist.get_backend()}")
    say(f"{'collective':<16}{'MiB':>10}{'ms':>12}{'GB/s':>10}{'bus GB/s':>10}")
    for size in given.sizes:
        for name, (call, share) in collectives(size, world, device).items():
            taken = seconds_of(call, device, given.repeats)
            rate = size / taken / 1e9
            row = {"collective": name, "bytes": size, "seconds": taken, "gb_per_s": rate, "bus_gb_per_s": rate * share}
            facts["rows"].append(row)
            say(f"{name:<16}{size / 2**20:>10,.2f}{taken * 1e3:>12.3f}{rate:>10.2f}{rate * share:>10.2f}")
    if dist.get_rank() == 0:
        write_json(given.out or RESULTS / f"{device_slug()}-collectives-{world}.json", facts)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    given_words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="without torchrun: how many (default: %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="(default: 64 KiB to 1 GiB)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="per size (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, help="the JSON file (default: benchmarks/results/MACHINE-collectives-N.json)"
    )
    given = parser.parse_args(given_words)
    if "RANK" in os.environ:
        measure(given)
        return 0
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.processes}"]
    return subprocess.run([sys.executable, *launch, "-m", "benchmarks.collectives", *given_words]).returncode


if __name__ == "__main__":
    sys.exit(main())
