"""The tar index: WebDataset's own reader as the reference, a cache that may fail, and damaged shards."""

import bz2
import gzip
import io
import lzma
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset

from tread.data.index import ShardIndex, expand_shards, index_shards
from tread.errors import ConfigError, DataError


def read(index: ShardIndex, i: int) -> np.ndarray:
    raw = index.shards[index.shard[i]].read_bytes()
    return np.load(io.BytesIO(raw[index.offset[i] : index.offset[i] + index.size[i]]))


def plain_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_webdatasets_reader_sees_the_same_samples(tmp_path: Path, samples: Callable) -> None:
    pattern = str(tmp_path / "shard-%03d.tar")
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:  # pyright: ignore[reportAttributeAccessIssue]
        for sample in samples(10):
            writer.write({**sample, "json": {"other": "suffixes are not looked at"}})
    index = index_shards(tmp_path)
    urls = [str(path) for path in index.shards]
    reference = list(webdataset.WebDataset(urls, shardshuffle=False).decode())  # pyright: ignore[reportAttributeAccessIssue]
    assert len(index) == len(reference) == 10
    assert np.bincount(index.shard).tolist() == [4, 4, 2]
    for i, sample in enumerate(reference):
        assert index.key[i].decode() == sample["__key__"]
        assert index.label[i] == sample["cls"]
        np.testing.assert_array_equal(read(index, i), sample["latent.npy"])


def test_keys_end_at_the_first_dot_of_the_file_name(tmp_path: Path, npy: Callable) -> None:
    latent = npy(np.zeros((4, 2, 2), np.float32))
    long = "folder.with.dots/" + "x" * 150
    files = {"__meta__/notes.txt": b"", "README": b"", ".hidden": b""}
    for key in ("a/0", "b/0", long):
        files |= {f"{key}.Latent.NPY": latent, f"{key}.cls": b"1"}
    shard = plain_tar(tmp_path / "a.tar", files)
    index = index_shards(shard)
    assert [key.decode() for key in index.key] == ["a/0", "b/0", long]
    seen = [sample["__key__"] for sample in webdataset.WebDataset(str(shard), shardshuffle=False)]  # pyright: ignore[reportAttributeAccessIssue]
    assert seen == ["a/0", "b/0", long]


def test_files_of_a_sample_need_not_be_neighbours(tmp_path: Path, npy: Callable) -> None:
    latents = {f"{i}.latent.npy": npy(np.full((4, 1, 1), i, np.float32)) for i in range(3)}
    labels = {f"{i}.cls": str(i + 5).encode() for i in range(3)}
    index = index_shards(plain_tar(tmp_path / "a.tar", latents | labels))
    assert index.label.tolist() == [5, 6, 7]
    assert [read(index, i)[0, 0, 0] for i in range(3)] == [0, 1, 2]


def test_labels_may_be_text_or_arrays(tmp_path: Path, npy: Callable) -> None:
    latent = npy(np.zeros((4, 1, 1), np.float32))
    labels = {
        "a.cls": b"3",
        "b.cls": b" 4\n",
        "c.cls": npy(np.array(5, np.int16)),
        "d.cls.npy": npy(np.array([6], np.uint8)),
    }
    latents = {f"{key}.latent.npy": latent for key in "abcd"}
    assert index_shards(plain_tar(tmp_path / "a.tar", latents | labels)).label.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("label", [b"cat", b"", b"1.5", b"9" * 30, b"\x93NUMPY\x01\x00"])
def test_a_label_that_is_no_number_is_named(tmp_path: Path, npy: Callable, label: bytes) -> None:
    files = {"x/7.latent.npy": npy(np.zeros((4, 1, 1))), "x/7.cls": label}
    shard = plain_tar(tmp_path / "a.tar", files)
    with pytest.raises(DataError, match=r"the cls of sample x/7 in .*a\.tar is b['\"].*, not a whole number"):
        index_shards(shard)


@pytest.mark.parametrize("label", [np.array(3.0), np.array([1, 2])])
def test_an_array_that_is_no_label_is_named(tmp_path: Path, npy: Callable, label: np.ndarray) -> None:
    files = {"7.latent.npy": npy(np.zeros((4, 1, 1))), "7.cls": npy(label)}
    with pytest.raises(DataError, match=r"the cls of sample 7 in .*a\.tar is b['\"].*, not a whole number"):
        index_shards(plain_tar(tmp_path / "a.tar", files))


def test_folders_files_globs_and_braces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("s-08.tar", "s-09.tar", "s-10.tar", "t-00.tar", "notes.txt"):
        (tmp_path / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path.parent))

    def names(pattern: str) -> list[str]:
        return [path.name for path in expand_shards(f"{tmp_path}/{pattern}")]

    assert names("") == ["s-08.tar", "s-09.tar", "s-10.tar", "t-00.tar"]
    assert names("s-10.tar") == ["s-10.tar"]
    assert names("s-*.tar") == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert names("s-{08..10}.tar") == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert names("{t,s}-0*.tar") == ["t-00.tar", "s-08.tar", "s-09.tar"]
    assert len(expand_shards(f"~/{tmp_path.name}")) == 4
    with pytest.raises(ConfigError, match=r"shard .*/s-11\.tar of data\.path .*\{08\.\.12\}.* is missing: restore"):
        names("s-{08..12}.tar")
    with pytest.raises(ConfigError, match=r"data\.path .* has an unbalanced brace"):
        names("s-{08..12.tar")
    for nothing in ("u-*.tar", "missing.tar"):
        with pytest.raises(ConfigError, match=r"no shards at .*: set data\.path to a folder of tars, a tar, a glob"):
            names(nothing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no shards \(\*\.tar\) in the folder .*empty"):
        names("empty")


@pytest.mark.parametrize("pattern", ["{0..99999999999}.tar", "{5..-9999999}.tar", "{a,b}" * 30])
def test_a_pattern_without_end_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tread.data.index.MOST", 1000)  # listing a million takes seconds
    with pytest.raises(ConfigError, match="stands for more than 1,000 shards: write a shorter range or a glob"):
        expand_shards(pattern)


def test_incomplete_and_doubled_samples_are_named(tmp_path: Path, npy: Callable) -> None:
    latent, shard = npy(np.zeros((4, 1, 1))), tmp_path / "a.tar"
    plain_tar(shard, {"0.latent.npy": latent, "0.cls": b"0", "1.latent.npy": latent})
    with pytest.raises(DataError, match=r"sample 1 in .*a\.tar has no cls: write"):
        index_shards(shard)
    plain_tar(shard, {"0.latent.npy": latent, "0.cls": b"0", "1.cls": b"0"})
    with pytest.raises(DataError, match=r"sample 1 in .*a\.tar has no latent\.npy: write"):
        index_shards(shard)
    plain_tar(shard, {"0.latent.npy": latent, "0.LATENT.npy": latent, "0.cls": b"0"})
    with pytest.raises(DataError, match=r"sample 0 in .*a\.tar has two latent\.npy files"):
        index_shards(shard)
    (tmp_path / "b.tar").symlink_to(tmp_path / "nowhere")
    plain_tar(shard, {"0.latent.npy": latent, "0.cls": b"0"})
    with pytest.raises(DataError, match=r"cannot open shard .*b\.tar \(No such file or directory\): restore it"):
        index_shards(tmp_path)
    plain_tar(shard, {})
    with pytest.raises(DataError, match=r"there are no samples in the 1 shard at .*a\.tar"):
        index_shards(shard)


def test_a_damaged_shard_is_named_wherever_it_is_cut(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    whole = write_tar(tmp_path / "whole.tar", samples(3)).read_bytes()
    content = 3 * 2 * 2048  # two files of four blocks: an extended header, its body, the header, the body
    cut = tmp_path / "cut.tar"
    # Cuts on a block's edge, inside a header, inside a body; exactly where the end mark begins; a gzip.
    for damaged in (*(whole[:n] for n in range(0, content + 1, 256)), b"\x1f\x8b" + whole):
        cut.write_bytes(damaged)
        with pytest.raises(DataError, match=r"shard .*cut\.tar is truncated or not a plain tar \(.+\): copy or write"):
            index_shards(cut)
    cut.write_bytes(whole[: content + 512])
    assert len(index_shards(cut)) == 3


@pytest.mark.parametrize(
    ("suffix", "compress", "tool"),
    [("gz", gzip.compress, "gunzip"), ("bz2", bz2.compress, "bunzip2"), ("xz", lzma.compress, "unxz")],
)
def test_a_compressed_shard_is_named_as_such(
    tmp_path: Path, write_tar: Callable, samples: Callable, suffix: str, compress: Callable, tool: str
) -> None:
    """By itself, by a glob, and as what a folder holds."""
    content = compress(write_tar(tmp_path / "whole.tar", samples(3)).read_bytes())
    folder = tmp_path / "compressed"
    folder.mkdir()
    shard = folder / f"a.tar.{suffix}"
    shard.write_bytes(content)
    refusal = (
        f"shard {shard} is compressed, and samples are read by their offset in a plain tar: decompress it ({tool})"
    )
    for path in (shard, folder / "*.tar*", folder):
        with pytest.raises((ConfigError, DataError), match=f"^{re.escape(refusal)} to a .tar$"):
            index_shards(path)


def test_a_changed_byte_in_any_header_is_found(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    """tarfile alone takes a header with a bad checksum for the end and returns fewer samples."""
    whole = write_tar(tmp_path / "whole.tar", samples(3)).read_bytes()
    damaged = tmp_path / "damaged.tar"
    for header in range(0, len(whole), 1024)[:6]:
        for place in (0, 50, 100, 130, 200, 257, 500):
            raw = bytearray(whole)
            raw[header + place] ^= 1
            damaged.write_bytes(raw)
            with pytest.raises(DataError, match=r"shard .*damaged\.tar is truncated or not a plain tar"):
                index_shards(damaged)


def test_the_cache_is_used_until_the_shard_changes(
    tmp_path: Path, index_cache: Path, write_tar: Callable, samples: Callable
) -> None:
    shard = write_tar(tmp_path / "a.tar", samples(3))
    first = index_shards(shard)
    (entry,) = index_cache.glob("*.npz")
    with np.load(entry) as stored:
        changed = {**stored, "label": stored["label"] + 100}
    np.savez(entry, **changed)
    assert index_shards(shard).label.tolist() == (first.label + 100).tolist()

    os.utime(shard, ns=(0, 0))
    assert index_shards(shard).label.tolist() == first.label.tolist()
    write_tar(shard, samples(20))
    os.utime(shard, ns=(0, 0))  # another size at the same time
    assert len(index_shards(shard)) == 20
    assert len(list(index_cache.glob("*.npz"))) == 3


def test_a_damaged_cache_is_made_again(
    tmp_path: Path, index_cache: Path, write_tar: Callable, samples: Callable
) -> None:
    shard = write_tar(tmp_path / "a.tar", samples(3))
    index_shards(shard)
    (entry,) = index_cache.glob("*.npz")
    good = entry.read_bytes()
    for damage in (b"", b"rubbish", good[: len(good) // 2], good[:200] + b"x" + good[201:]):
        entry.write_bytes(damage)
        assert index_shards(shard).label.tolist() == [0, 1, 2]
        assert len(entry.read_bytes()) == len(good)


def test_a_cache_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_tar: Callable, samples: Callable
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for n in range(3):
        write_tar(tmp_path / f"{n}.tar", samples(3))
    with pytest.warns(UserWarning, match=r"index of the shards could not be kept \(Not a directory\)") as caught:
        assert len(index_shards(tmp_path)) == 9
    assert len({str(warning.message) for warning in caught}) == 1


def test_the_cache_lies_in_the_home_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_tar: Callable, samples: Callable
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    index_shards(write_tar(tmp_path / "a.tar", samples(1)))
    assert len(list((tmp_path / "home" / ".cache" / "tread").glob("*.npz"))) == 1


def test_a_large_shard_is_indexed_without_keeping_its_headers(tmp_path: Path, npy: Callable) -> None:
    latent = npy(np.zeros((1, 1, 1), np.float16))
    files = {f"{i}.{suffix}": data for i in range(2000) for suffix, data in (("latent.npy", latent), ("cls", b"0"))}
    index = index_shards(plain_tar(tmp_path / "a.tar", files))
    assert len(index) == 2000
    assert read(index, 1999).shape == (1, 1, 1)
