"""Shards read by ranks and their workers: each sample once, in one order, whatever their number; one index for all."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.data.server import serving
from tread.data import Latents, Order, StepSampler, Visited, index
from tread.data.index import index_shards
from tread.data.workers import fetched

SAMPLES, SHARDS, BATCH = 48, 8, 12
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def shards(tmp_path: Path, write_tar: Callable) -> Path:
    """48 samples in 8 shards; a sample's first value is its number."""
    for n in range(SHARDS):
        numbers = range(n * SAMPLES // SHARDS, (n + 1) * SAMPLES // SHARDS)
        latents = [(f"{i:04d}", np.full((1, 2, 2), i, np.float16)) for i in numbers]
        write_tar(tmp_path / "s" / f"s-{n}.tar", [{"__key__": k, "latent.npy": x, "cls": 0} for k, x in latents])
    return tmp_path / "s"


def read_rank(settings: dict[str, Any], slices: dict[str, int], workers: int, answers: Any) -> None:
    """What one rank reads, as (position, sample), through a loader like the trainer's."""
    data = Latents(vae="none", kind="sample", num_classes=1, **settings)
    sampler = StepSampler(Order(len(data), 5, data.groups()), data.coming, batch=BATCH, micro_steps=1, **slices)
    for x, _, positions in fetched(DataLoader(Visited(data), batch_sampler=sampler, num_workers=workers)):
        answers.put([*zip(positions.tolist(), x[:, 0, 0, 0].int().tolist(), strict=True)])
    answers.put(None)


def read_steps(settings: dict[str, Any], start: int, steps: int, *, world: int, workers: int) -> list[tuple[int, int]]:
    """What `world` ranks read together, in the order of positions."""
    answers: Any = FORK.Queue()
    ranks = [
        FORK.Process(
            target=read_rank,
            args=(settings, {"rank": r, "world": world, "start_step": start, "steps": steps}, workers, answers),
        )
        for r in range(world)
    ]
    for rank in ranks:
        rank.start()
    found: list[tuple[int, int]] = []
    running = world
    while running:
        while answers.empty():
            assert not any(rank.exitcode for rank in ranks)
            time.sleep(0.01)
        batch = answers.get()
        running -= batch is None
        found += batch or []
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    return sorted(found)


@pytest.mark.parametrize("window", [None, 2])
def test_each_sample_is_read_once_an_epoch_and_a_resume_on_other_ranks_goes_on(
    shards: Path, tmp_path: Path, window: int | None
) -> None:
    """Three steps on two ranks, the rest on three: mid-epoch, since an epoch has four. Workers have no say either."""
    with serving(shards) as server:
        size = (shards / "s-0.tar").stat().st_size
        room = SHARDS if window is None else 2 * window
        settings = {"path": f"{server.url}/s-{{0..7}}.tar", "cache": str(tmp_path / "c"), "window": window}
        settings["cache_gb"] = room * size / 1e9
        alone = read_steps({"path": shards, "window": window}, 0, 8, world=1, workers=0)
        before = read_steps(settings, 0, 3, world=2, workers=2)
        after = read_steps(settings, 3, 8, world=3, workers=1)
    assert before + after == alone
    assert [position for position, _ in alone] == list(range(8 * BATCH))
    for epoch in range(2):
        read = [sample for _, sample in alone[epoch * SAMPLES : (epoch + 1) * SAMPLES]]
        assert sorted(read) == list(range(SAMPLES))
    first, second = ([sample for _, sample in alone[n : n + SAMPLES]] for n in (0, SAMPLES))
    assert first != second


def test_the_next_window_is_there_before_it_is_read(shards: Path, tmp_path: Path) -> None:
    with serving(shards) as server:
        cache = tmp_path / "c"
        path = f"{server.url}/s-{{0..7}}.tar"
        data = Latents(path, vae="none", kind="sample", num_classes=1, window=2, cache=str(cache))
        for tar in cache.glob("*.tar"):
            tar.unlink()
        order = Order(len(data), 5, data.groups())
        told: list[list[int]] = []
        slices = {"batch": 3, "micro_steps": 1, "rank": 0, "world": 1, "start_step": 0, "steps": 32}
        visits = list(StepSampler(order, told.append, **slices))
        read = [[int(data._index.shard[visit.sample]) for visit in batch] for batch in visits]
        windows = [sorted({group for batch in read[n : n + 4] for group in batch}) for n in range(0, 32, 4)]
        assert [len(window) for window in windows] == [2] * 8
        assert told[:6] == [window for window, _ in groupby(windows[1:])]  # the first batch brings the second window
        server.gets.clear()
        data.coming(told[0])
        while len(list(cache.glob("*.tar"))) < 2:
            time.sleep(0.01)
        for batch in visits[4:8]:
            for visit in batch:
                data[visit.sample]
        assert sorted(server.gets) == [f"s-{group}.tar" for group in told[0]]
        assert set(server.gets.values()) == {1}


def noted(log: Path, plain: Callable) -> Callable:
    def read(shard: Path) -> Any:
        with log.open("a") as file:
            file.write(f"{shard.name} {os.getpid()}\n")
        return plain(shard)

    return read


def index_on_rank(rank: int, ranks: int, path: Path, answers: Any) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    found = index_shards(path)
    answers.put((found.key.tolist(), found.offset.tolist(), found.label.tolist(), found.shard.tolist()))


def test_ranks_index_each_shard_once_between_them_and_notice_a_changed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_tar: Callable, samples: Callable
) -> None:
    for n in range(48):
        write_tar(tmp_path / "s" / f"s-{n:02d}.tar", samples(3, first=3 * n))
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        alone = index_shards(tmp_path / "s")
    log = tmp_path / "log"
    monkeypatch.setattr(index, "_index_one", noted(log, index._index_one))
    monkeypatch.setattr(os, "cpu_count", lambda: 6)

    def ranks(count: int) -> list[tuple[str, str]]:
        log.write_text("")
        answers: Any = FORK.Queue()
        processes = [FORK.Process(target=index_on_rank, args=(r, count, tmp_path / "s", answers)) for r in range(count)]
        for process in processes:
            process.start()
        for found in [answers.get() for _ in processes]:
            assert found[0] == alone.key.tolist()
            assert found[1:] == (alone.offset.tolist(), alone.label.tolist(), alone.shard.tolist())
        for process in processes:
            process.join()
        return [(shard, pid) for shard, pid in (line.split() for line in log.read_text().splitlines())]

    read = ranks(3)
    assert Counter(shard for shard, _ in read) == Counter(f"s-{n:02d}.tar" for n in range(48))
    assert len({pid for _, pid in read}) > 1
    assert ranks(2) == []
    os.utime(tmp_path / "s" / "s-05.tar", ns=(0, 0))
    assert [shard for shard, _ in ranks(2)] == ["s-05.tar"]
