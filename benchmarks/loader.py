"""Images per second of one node's loaders, beside those that a DiT-B/2 step uses: `python -m benchmarks.loader`.

Writes latents of 256-pixel images as `tread encode` does, then reads them as `tread train` does: a process per GPU,
each with its data workers, all at once. The goal is twice the images/s of the fastest DiT-B/2 row in
`benchmarks/results`, which one H200 makes. On the machine that trains, with its own disk and settings:

    python -m benchmarks.loader --ranks 8 --workers 8 --folder /local/scratch
    python -m benchmarks.loader --ranks 8 --workers 8 --path s3://bucket/latents/shard-{0000..1281}.tar --window 64

A machine with a few cores shows the ratio of its own loaders and no more.
"""

import argparse
import io
import json
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.common.record import RESULTS, device_slug, machine, write_json
from tread.data import Latents, Order, Readable, StepSampler, Visited
from tread.data.workers import fetched
from tread.words import counted

GOAL = 2.0
"""Times the images/s of the row."""
SHAPE = (8, 32, 32)
"""Moments of an image of 256 pixels."""
WARM = 4
"""Batches before the clock starts."""


def row_rate(results: Path = RESULTS) -> float:
    """Images/s of the fastest routed DiT-B/2 step among the committed measurements."""
    documents = [json.loads(path.read_text()) for path in results.glob("h200-*.json")]
    jobs = [job for document in documents for job in document.get("jobs", [document])]
    found = [one for job in jobs for one in job.get("measurements", []) if one.get("row") == "dit-b"]
    return max(one["routed"]["images_per_second"] for one in found if one["status"] == "ok")


def write_shards(folder: Path, shards: int, size: int) -> None:
    """Random latents in tars like those of `tread encode`."""
    rng = np.random.default_rng(0)
    for n in range(shards):
        with tarfile.open(folder / f"shard-{n:06d}.tar", "w") as tar:
            for i in range(n * size, (n + 1) * size):
                stream = io.BytesIO()
                np.save(stream, rng.standard_normal(SHAPE, np.float32).astype(np.float16))
                for name, data in (
                    (f"{i:08d}.cls", str(i % 1000).encode()),
                    (f"{i:08d}.latent.npy", stream.getvalue()),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def read(rank: int, given: argparse.Namespace, path: str, start: Any, answers: Any) -> None:
    """One rank: batches for so many seconds, from the moment that every rank is warm."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(given.ranks)}
    data = Latents(path, window=given.window)
    order = Order(len(data), 0, data.groups())
    slices = {"batch": given.batch * given.ranks, "micro_steps": 1, "rank": rank, "world": given.ranks}
    sampler = StepSampler(order, data.coming if rank == 0 else None, start_step=0, steps=2**40, **slices)
    visited = Visited(Readable(data, range(len(data)), Path(tempfile.gettempdir()) / f"skipped-{os.getpid()}.txt"))
    batches = fetched(DataLoader(visited, batch_sampler=sampler, num_workers=given.workers))
    for _ in range(WARM):
        next(batches)
    start.wait()
    began, images = time.perf_counter(), 0
    while time.perf_counter() - began < given.seconds:
        images += len(next(batches)[0])
    answers.put(images / (time.perf_counter() - began))


def measure(given: argparse.Namespace, path: str) -> float:
    """Images/s of all ranks together."""
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(given.ranks), context.Queue()
    ranks = [context.Process(target=read, args=(rank, given, path, start, answers)) for rank in range(given.ranks)]
    for rank in ranks:
        rank.start()
    found: list[float] = []
    while len(found) < len(ranks):
        while answers.empty():
            if any(rank.exitcode for rank in ranks):
                for rank in ranks:
                    rank.kill()
                raise SystemExit("a rank failed; its error is above")
            time.sleep(0.05)
        found.append(answers.get())
    for rank in ranks:
        rank.join()
    return sum(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=1, help="processes that train on the node (default: %(default)s)")
    add("--workers", type=int, default=2, help="data workers of each (default: %(default)s)")
    add("--batch", type=int, default=256, help="images of a batch and rank (default: %(default)s)")
    add("--seconds", type=float, default=10.0, help="how long to read (default: %(default)s)")
    add("--path", help="shards to read, as data.path; default: random ones, made for it")
    add("--window", type=int, help="as data.window")
    add("--folder", type=Path, help="where random shards are made (default: the system's temporary folder)")
    add("--shards", type=int, default=16, help="random shards (default: %(default)s)")
    add("--shard-size", type=int, default=1000, help="images of each (default: %(default)s)")
    add("--out", type=Path, help="the JSON file (default: benchmarks/results/MACHINE-loader.json)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.path is None:
            write_shards(Path(folder), given.shards, given.shard_size)
        rate = measure(given, given.path or folder)
    row = row_rate()
    facts = {
        "name": "loader",
        "command": " ".join(["python -m benchmarks.loader", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": machine() | {"cores": os.cpu_count()},
        "settings": {"ranks": given.ranks, "workers": given.workers, "batch": given.batch, "window": given.window},
        "images_per_second": round(rate, 1),
        "dit_b_images_per_second": row,
        "ratio": round(rate / row, 3),
        "ratio_per_rank": round(rate / row / given.ranks, 3),
    }
    write_json(given.out or RESULTS / f"{device_slug()}-loader.json", facts)
    print(
        f"{rate:,.0f} images/s from {counted(given.ranks, 'rank')} with {counted(given.workers, 'worker')} each on "
        f"{os.cpu_count()} cores; the DiT-B/2 row of one H200 uses {row:,.0f}: {rate / row:.2f} times that "
        f"(goal {GOAL:g}), {rate / row / given.ranks:.2f} times for each rank"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
