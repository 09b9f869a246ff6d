"""Remote shards: a server that fails, stalls and truncates; a cache of bounded size that processes share."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.data.server import Server, serving
from tread.data import Latents, Readable, remote
from tread.data.cache import RemoteShard, ShardCache
from tread.data.index import index_shards
from tread.data.remote import Facts, describe, download, list_remote
from tread.errors import ConfigError, OutputError, RemoteError


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalls end soon where a test makes one; any other server may take its time, on a busy machine too."""
    monkeypatch.setattr(remote, "TRIES", 2 if "stall" in request.node.name else 3)
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    if "stall" in request.node.name:
        monkeypatch.setattr(remote, "STALLED", 2.0)


@pytest.fixture
def server(tmp_path: Path, write_tar: Callable, samples: Callable) -> Iterator[Server]:
    """Four shards of five samples."""
    for n in range(4):
        write_tar(tmp_path / "served" / f"s-{n}.tar", samples(5, first=5 * n))
    with serving(tmp_path / "served") as found:
        yield found


def shard(server: Server, name: str, cache: ShardCache) -> RemoteShard:
    url = f"{server.url}/{name}"
    return RemoteShard(url, *describe(url), cache)


def test_remote_samples_are_the_local_ones(server: Server, tmp_path: Path) -> None:
    local = Latents(server.folder, vae="sd", num_classes=3)
    data = Latents(f"{server.url}/s-{{0..3}}.tar", vae="sd", num_classes=3, cache=str(tmp_path / "c"))
    assert len(data) == len(local) == 20
    assert data.contents() == local.contents()
    for i in range(20):
        assert data[i][1] == local[i][1]
        np.testing.assert_array_equal(data[i][0], local[i][0])
    assert set(server.gets.values()) == {1}
    Latents(f"{server.url}/s-{{0..3}}.tar", vae="sd", num_classes=3, cache=str(tmp_path / "c"))
    assert set(server.gets.values()) == {1}


def test_fsspec_lists_and_reads_other_protocols(server: Server, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in server.folder.glob("*.tar"):
        memory.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    assert list_remote("memory://bucket") == [f"memory:///bucket/s-{n}.tar" for n in range(4)]
    assert list_remote("memory://bucket/s-[12].tar") == [f"memory:///bucket/s-{n}.tar" for n in (1, 2)]
    data = Latents("memory://bucket", vae="sd", num_classes=3, cache=str(tmp_path / "c"))
    local = Latents(server.folder, vae="sd", num_classes=3)
    for i in range(20):
        np.testing.assert_array_equal(data[i][0], local[i][0])
    with pytest.raises(ConfigError, match=r"no shards \(\*\.tar\) at memory://empty"):
        index_shards("memory://empty")
    for url in ("memory://bucket/s-{0..3}.tar.gz", f"{server.url}/s-{{0..3}}.tgz", "memory://bucket/*.tar.zst"):
        with pytest.raises(ConfigError, match=r"data\.path .* is compressed, .*: decompress it \((gunzip|unzstd)\)"):
            index_shards(url)


@pytest.mark.parametrize("fault", ["fail", "drop", "truncate", "stall"])
def test_a_fault_is_retried(server: Server, tmp_path: Path, fault: str) -> None:
    server.faults["s-0.tar"] = [fault] * (remote.TRIES - 1)
    with shard(server, "s-0.tar", ShardCache(tmp_path / "c", 10**6)).open() as file:
        assert file.read() == (server.folder / "s-0.tar").read_bytes()
    assert server.gets["s-0.tar"] == remote.TRIES


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fail", "HTTP Error 503: Service Unavailable"),
        ("drop", ".+"),
        ("truncate", r"\d[\d,]* bytes came and it has \d[\d,]*|.*IncompleteRead.*"),
        ("stall", "no answer for 2 seconds|timed out"),
    ],
)
def test_a_server_that_stays_broken_is_named_within_the_bound(
    server: Server, tmp_path: Path, fault: str, reason: str
) -> None:
    """And what came of the shard is gone."""
    server.faults["s-0.tar"] = [fault] * remote.TRIES
    broken = shard(server, "s-0.tar", ShardCache(tmp_path / "c", 10**6))
    words = rf"cannot fetch http.*/s-0\.tar \(({reason})\), tried {remote.TRIES} times: look whether"
    with pytest.raises(RemoteError, match=words):
        broken.open()
    assert server.gets["s-0.tar"] == remote.TRIES
    assert not [path for path in (tmp_path / "c").iterdir() if path.name.endswith((".tar", ".tmp"))]
    with broken.open() as file:  # the server is well again
        assert len(file.read()) == broken.size


def test_what_no_server_has_is_named(server: Server) -> None:
    with pytest.raises(RemoteError, match=r"cannot reach http.*/s-9\.tar \(HTTP Error 404.*tried 3 times"):
        index_shards(f"{server.url}/s-{{3,9}}.tar")
    with pytest.raises(ConfigError, match=r"needs a listing, which HTTP does not have: name the shards"):
        index_shards(f"{server.url}/s-*.tar")


def test_a_failing_server_is_no_unreadable_sample(server: Server, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    data = Latents(f"{server.url}/s-{{0..3}}.tar", vae="sd", num_classes=3, cache=str(cache))
    for path in cache.glob("*.tar"):
        path.unlink()
    data = Latents(f"{server.url}/s-{{0..3}}.tar", vae="sd", num_classes=3, cache=str(cache))
    server.faults["s-2.tar"] = ["fail"] * 3
    with pytest.raises(RemoteError, match=r"cannot fetch http.*/s-2\.tar \(HTTP Error 503"):
        Readable(data, range(20), tmp_path / "skipped.txt")[12]
    assert not (tmp_path / "skipped.txt").exists()


def test_a_stalled_file_system_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever library waits, the reader does not."""
    never = threading.Event()

    def stalled(_: str) -> tuple[Any, str]:
        never.wait()
        raise AssertionError

    monkeypatch.setattr(remote, "_system", stalled)
    with open(tmp_path / "x", "wb") as file, pytest.raises(RemoteError, match=r"\(no answer for 2 seconds\)"):
        download("s3://bucket/x.tar", file, 3)
    never.set()


def test_a_full_disk_is_not_tried_again(server: Server) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as file,
        pytest.raises(OutputError, match=r"cannot write /dev/full \(No space"),
    ):
        download(f"{server.url}/s-0.tar", file, (server.folder / "s-0.tar").stat().st_size)
    assert server.gets["s-0.tar"] == 1


def test_a_changed_shard_is_fetched_and_indexed_again(
    server: Server, tmp_path: Path, write_tar: Callable, samples: Callable
) -> None:
    path, settings = f"{server.url}/s-0.tar", {"vae": "sd", "num_classes": 3, "cache": str(tmp_path / "c")}
    before = Latents(path, **settings)
    write_tar(server.folder / "s-0.tar", samples(5, first=100))
    after = Latents(path, **settings)
    assert before.contents() != after.contents()
    local = Latents(server.folder / "s-0.tar", vae="sd", num_classes=3)
    np.testing.assert_array_equal(after[3][0], local[3][0])
    assert server.gets["s-0.tar"] == 2


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith((".tar", ".tmp")))


def test_the_cache_keeps_what_was_used_last_within_its_size(server: Server, tmp_path: Path) -> None:
    size = (server.folder / "s-0.tar").stat().st_size
    cache = ShardCache(tmp_path / "c", 2 * size + size // 2)
    shards = [shard(server, f"s-{n}.tar", cache) for n in range(4)]
    for n in (0, 1, 0, 2):  # 1 was used longest ago
        shards[n].open().close()
        os.utime(cache.folder / shards[n].file, ns=(n, [10, 11, 13][n] if n else 12))
        assert held(cache.folder) <= cache.limit
    assert [cache.holds(one) for one in shards] == [True, False, True, False]
    with shards[0].open() as reader:  # evicted while it is read
        os.utime(cache.folder / shards[0].file, ns=(0, 0))
        shards[3].open().close()
        assert not cache.holds(shards[0])
        assert reader.read() == (server.folder / "s-0.tar").read_bytes()
    assert held(cache.folder) <= cache.limit
    with pytest.raises(
        RemoteError, match=r"s-0\.tar has [\d,]+ bytes, and the cache may have 1,000: raise data\.cache_gb"
    ):
        shard(server, "s-0.tar", ShardCache(tmp_path / "d", 1000)).open()


def test_a_damaged_file_in_the_cache_is_fetched_again(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "c", 10**6)
    one = shard(server, "s-0.tar", cache)
    one.open().close()
    (cache.folder / one.file).write_bytes(b"cut")
    with one.open() as file:
        assert file.read() == (server.folder / "s-0.tar").read_bytes()


def read_all(shards: list[RemoteShard], answers: Any) -> None:
    for one in shards:
        with one.open() as file:
            answers.put(len(file.read()) == one.size)


def test_processes_fetch_a_shard_once_and_stay_within_the_size(server: Server, tmp_path: Path) -> None:
    size = (server.folder / "s-0.tar").stat().st_size
    roomy, tight = ShardCache(tmp_path / "c", 10 * size), ShardCache(tmp_path / "d", 2 * size)
    context = multiprocessing.get_context("fork")
    for cache in (roomy, tight):
        shards = [shard(server, f"s-{n}.tar", cache) for n in range(4)]
        answers: Any = context.Queue()
        readers = [context.Process(target=read_all, args=(shards[n:] + shards[:n], answers)) for n in range(4)]
        for reader in readers:
            reader.start()
        assert [answers.get() for _ in range(16)] == [True] * 16
        for reader in readers:
            reader.join()
        assert held(cache.folder) <= cache.limit
        if cache is roomy:
            assert set(server.gets.values()) == {1}


def test_what_a_killed_process_left_makes_room(server: Server, tmp_path: Path) -> None:
    size = (server.folder / "s-0.tar").stat().st_size
    cache = ShardCache(tmp_path / "c", size + size // 2)
    shards = [shard(server, f"s-{n}.tar", cache) for n in range(2)]
    server.faults["s-0.tar"] = ["stall"]
    context = multiprocessing.get_context("fork")
    reader = context.Process(target=read_all, args=(shards[:1], context.Queue()))
    reader.start()
    while not server.gets["s-0.tar"]:
        assert reader.is_alive()
        time.sleep(0.01)
    os.kill(reader.pid or 0, signal.SIGKILL)
    reader.join()
    assert len(list(cache.folder.glob(".*.tmp"))) == 1
    shards[1].open().close()
    assert not list(cache.folder.glob(".*.tmp"))
    assert held(cache.folder) == size


def test_a_cache_that_is_too_small_for_the_order_is_refused(server: Server, tmp_path: Path) -> None:
    size = (server.folder / "s-0.tar").stat().st_size
    settings = {"vae": "sd", "num_classes": 3, "cache": str(tmp_path / "c"), "cache_gb": 2.5 * size / 1e9}
    path = f"{server.url}/s-{{0..3}}.tar"
    with pytest.raises(ConfigError, match=r"data\.cache_gb is .*: raise it, or set data\.window to at most 1, so that"):
        Latents(path, **settings)
    with pytest.raises(ConfigError, match=r"data\.window is 2 and data\.cache_gb .*set data\.window to at most 1\."):
        Latents(path, window=2, **settings)
    assert len(Latents(path, window=1, **settings)) == 20


def test_a_server_without_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class System:
        def info(self, _: str) -> dict[str, None]:
            return {"size": None}

    monkeypatch.setattr(remote, "_system", lambda url: (System(), url))
    with pytest.raises(
        RemoteError, match=r"does not tell the size of s3://b/x\.tar, so a part could pass for the whole"
    ):
        describe("s3://b/x.tar")
    assert Facts(1, "a") != Facts(1, "b")
