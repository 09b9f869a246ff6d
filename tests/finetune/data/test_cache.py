"""The cache on disk: encoded once, right after any interruption, shared by processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from tests.finetune.data.encoded import RNG, Encoder, encode, files
from tread.errors import ConfigError
from tread.finetune.data.cache import Cache, Tensors


def test_what_is_there_is_not_encoded_again_and_what_is_damaged_is(pictures: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, pictures, Encoder())
    before = files(cache)
    assert encode(Cache(tmp_path / "cache"), pictures, Encoder(most=0))[0] == entries  # never called
    path = cache.path("latents", entries[2].latents)
    for content in (path.read_bytes()[:-1], path.read_bytes()[:5], b""):
        path.write_bytes(content)
        again = Encoder()
        encode(cache, pictures, again)
        assert again.sizes == [1]
        assert files(cache) == before


def test_a_changed_picture_crop_or_encoder_is_another_item(pictures: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    first, _ = encode(cache, pictures, Encoder())
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(pictures / "0.png")
    second, _ = encode(cache, pictures, Encoder())
    assert [a.latents == b.latents for a, b in zip(first, second, strict=True)] == [False] + [True] * 5
    other, _ = encode(cache, pictures, Encoder(), identity="another vae")
    square, _ = encode(cache, pictures, Encoder(), crop=True)
    assert not {e.latents for e in second} & {e.latents for e in other}
    assert [a.latents == b.latents for a, b in zip(second, square, strict=True)] == [True] * 4 + [False] * 2
    (pictures / "1.png").rename(pictures / "renamed.png")
    (pictures / "1.txt").rename(pictures / "renamed.txt")
    renamed, _ = encode(cache, pictures, Encoder(most=0))  # the content is known
    assert {e.latents for e in renamed} == {e.latents for e in second}


def test_a_killed_run_goes_on_where_it_stopped(pictures: Path, tmp_path: Path) -> None:
    whole = Cache(tmp_path / "whole")
    encode(whole, pictures, Encoder())

    class Killed(Encoder):
        def __call__(self, pixels: Tensor) -> Tensors:
            if len(self.sizes) == 2:
                raise KeyboardInterrupt
            return super().__call__(pixels)

    cache = Cache(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        encode(cache, pictures, Killed())
    assert len(files(cache)) == 4
    rest = Encoder()
    encode(Cache(tmp_path / "cache"), pictures, rest)
    assert sum(rest.sizes) == 2
    assert files(cache) == files(whole)


def test_two_processes_share_the_work_and_agree(pictures: Path, tmp_path: Path) -> None:
    (pictures / "3.png").write_bytes((pictures / "3.png").read_bytes()[:2000])  # its header is whole
    barrier = threading.Barrier(2)

    class Rank:
        def __init__(self, index: int) -> None:
            self.process_index, self.num_processes = index, 2

        def wait_for_everyone(self) -> None:
            barrier.wait(timeout=30)

    encoders = [Encoder(), Encoder()]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(encode, Cache(tmp_path / "cache", Rank(n)), pictures, encoders[n]) for n in range(2)]
        results = [job.result() for job in running]
    assert results[0] == results[1]
    alone = Cache(tmp_path / "alone")
    assert results[0][0] == encode(alone, pictures, Encoder())[0]
    assert [len(entries) for entries, _ in results] == [5, 5]
    assert [Path(name).name for name, _ in results[0][1]] == ["3.png"]
    assert [sum(encoder.sizes) for encoder in encoders] == [3, 2]
    assert files(Cache(tmp_path / "cache")) == files(alone)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache_dir '\S+/file/cache' cannot be created \(.+\); name another"):
        Cache(tmp_path / "file" / "cache")
