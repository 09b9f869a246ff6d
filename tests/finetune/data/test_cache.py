"""The cache on disk: encoded once, right after any interruption, shared by processes."""

import json
import os
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from tests.finetune.data.encoded import RNG, Encoder, TextEncoder, encode, files
from tests.forks import in_ranks
from tread.errors import ConfigError, RankLost
from tread.finetune.data.cache import Cache, Tensors
from tread.finetune.data.encode import encode_texts
from tread.together import together


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


def encode_in_rank(pictures: Path, folder: Path) -> None:
    """Each rank writes down what it got, and how many pictures it encoded itself."""
    ranks, encoder = Accelerator(cpu=True), Encoder()
    entries, skipped = encode(Cache(folder / "cache", ranks), pictures, encoder)
    found = [entry.latents for entry in entries], [Path(name).name for name, _ in skipped], sum(encoder.sizes)
    (folder / f"rank-{ranks.process_index}").write_text(json.dumps(found))


def test_two_processes_share_the_work_and_agree(pictures: Path, tmp_path: Path) -> None:
    (pictures / "3.png").write_bytes((pictures / "3.png").read_bytes()[:2000])  # its header is whole
    in_ranks(encode_in_rank, pictures, tmp_path)
    found = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    alone = Cache(tmp_path / "alone")
    latents = [entry.latents for entry in encode(alone, pictures, Encoder())[0]]
    assert len(latents) == 5
    assert found == [[latents, ["3.png"], 3], [latents, ["3.png"], 2]]
    assert files(Cache(tmp_path / "cache")) == files(alone)


def fail_in_rank(rank: int, what: str, pictures: Path, folder: Path) -> None:
    """A rank's encoder fails, and the rank lives on until the other one has ended its wait, or for ten seconds."""
    ranks = Accelerator(cpu=True)
    cache, fails = Cache(folder / "cache", ranks), ranks.process_index == rank
    with pytest.raises((OSError, RankLost)) as error, together():
        if what == "captions":
            text = Mock(side_effect=OSError("no such weights")) if fails else TextEncoder()
            encode_texts(cache, ["red", "blue", "green"], encode=text, identity="text", progress=False)
        else:
            encode(cache, pictures, Mock(side_effect=OSError("no such weights")) if fails else Encoder())
    if fails:
        deadline = time.monotonic() + 10
        while not (folder / f"rank-{1 - rank}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    (folder / f"rank-{ranks.process_index}").write_text(f"{time.time()} {error.value}")
    os._exit(0)


@pytest.mark.parametrize(("rank", "what"), [(0, "captions"), (1, "pictures")])
def test_an_encoder_that_fails_on_one_rank_ends_the_others(
    rank: int, what: str, pictures: Path, tmp_path: Path
) -> None:
    """They would wait for its share until their timeout."""
    in_ranks(fail_in_rank, rank, what, pictures, tmp_path)
    said = [(tmp_path / f"rank-{number}").read_text().split(" ", 1) for number in (rank, 1 - rank)]
    assert said[0][1] == "no such weights"
    assert said[1][1] == f"process {rank} of this run has ended, so this one ends too: no such weights"
    assert said[1][0] < said[0][0], "the one that failed ended first"


def encode_apart(pictures: Path, folder: Path) -> None:
    """Each rank has a cache of its own."""
    ranks = Accelerator(cpu=True)
    cache = Cache(folder / f"cache-{ranks.process_index}", ranks)
    message = r"what another process encoded is not in cache_dir '\S+': name a folder that all machines"
    with pytest.raises(ConfigError, match=message), together():
        encode(cache, pictures, Encoder())
    with pytest.raises(ConfigError, match=message), together():
        encode_texts(cache, ["red", "blue"], encode=TextEncoder(), identity="text", progress=False)


def test_processes_that_do_not_share_a_cache_are_refused(pictures: Path, tmp_path: Path) -> None:
    """Each would train on the half that it encoded."""
    in_ranks(encode_apart, pictures, tmp_path)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache_dir '\S+/file/cache' cannot be created \(.+\); name another"):
        Cache(tmp_path / "file" / "cache")
