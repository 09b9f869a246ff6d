"""How far training on several processes is from training on one: `python -m benchmarks.layouts`.

The tiny runs of `tests/training/layouts.py` over gloo, four routed steps each. Samples and kept tokens must be the
same; losses, norms and the last weights differ by rounding, because sums over processes have another order.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import RESULTS, machine, write_json
from tests.tiny.runs import final_state, metrics

LAYOUTS = {"ddp": 1, "fsdp": 1, "micro": 1, "hsdp-1": 2, "hsdp-2": 2}
"""The layouts with the fewest processes that they differ from others on; `micro` is FSDP with two micro-steps."""


def train(folder: Path, processes: int) -> list[str]:
    """Train in every layout that so many processes have; returns their names."""
    names = [name for name, fewest in LAYOUTS.items() if processes >= fewest]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    settings = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    arguments = ["-m", "tests.training.layouts", ",".join(names), str(folder)]
    subprocess.run([*command, *arguments], check=True, env=os.environ | settings, stdout=subprocess.DEVNULL)
    return names


def seen(run: Path, processes: int) -> list[Any]:
    """The samples and the kept tokens of every micro-step, over all processes."""
    ranks = [json.loads((run / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    return [
        {what: [row for rank in ranks for row in rank[step][what]] for what in ("positions", "selections")}
        for step in range(len(ranks[0]))
    ]


def compared(run: Path, one: Path, processes: int) -> dict[str, Any]:
    """A run beside that of one process: relative differences, the largest of all lines and of all weights."""
    lines = [
        abs(line[name] - other[name]) / max(abs(other[name]), 1e-12)
        for line, other in zip(metrics(run), metrics(one), strict=True)
        for name in other
        if isinstance(other[name], float)
    ]
    mine, theirs = final_state(run)["model"], final_state(one)["model"]
    distances = [((mine[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12)).item() for name in theirs]
    return {
        "same_samples_and_tokens": seen(run, processes) == seen(one, 1),
        "metrics": max(lines),
        "weights": max(distances),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the layouts, print a table and write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-layouts.json")
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tread-layouts-") as name:
        folder = Path(name)
        for processes in sorted({1, *given.processes}):
            for layout in train(folder / str(processes), processes):
                one = folder / "1" / ("micro" if layout == "micro" else "ddp")
                facts = compared(folder / str(processes) / layout, one, processes)
                rows.append({"processes": processes, "layout": layout, **facts})
                same = "same tokens" if facts["same_samples_and_tokens"] else "OTHER TOKENS"
                print(
                    f"{processes} x {layout:7} {same}, metrics {facts['metrics']:.1e}, weights {facts['weights']:.1e}"
                )
    command = f"python -m benchmarks.layouts --processes {' '.join(map(str, given.processes))}"
    write_json(given.out, {"command": command, "machine": machine(), "rows": rows})
    return 0 if all(row["same_samples_and_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
