"""Names of cached items: contents are hashed once and again when they change, and encoders are told apart."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from tread.data.captioned.tables import Cell, Media
from tread.finetune.data import hashes
from tread.finetune.data.hashes import Alone, ContentHashes, digest, identity
from tread.finetune.model.source import Source


@pytest.fixture
def files(tmp_path: Path) -> list[Media]:
    paths = [tmp_path / f"{n}.bin" for n in range(4)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]) * 1000)
    return [*paths]


class Rank(Alone):
    """One of two processes, the other of which has run already."""

    def __init__(self, index: int) -> None:
        self.process_index, self.num_processes = index, 2


def test_hashes_are_blake2b_of_the_content(files: list[Media], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    cell = Cell(datasets.Dataset.from_dict({"x": [{"bytes": b"abc"}]}), "x", 0, "cell")
    missing = tmp_path / "missing"
    found = ContentHashes(tmp_path, Alone()).of([*files, cell, missing, files[0]], progress=False)
    expected = {place: hashlib.blake2b(bytes([n]) * 1000, digest_size=20).hexdigest() for n, place in enumerate(files)}
    assert found == {**expected, cell: hashlib.blake2b(b"abc", digest_size=20).hexdigest()}


def test_a_file_is_read_once_and_again_when_it_changes(
    files: list[Media], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ContentHashes(tmp_path, Alone()).of(files, progress=False)
    read: list[Path] = []
    real = hashes.content_hash
    monkeypatch.setattr(hashes, "content_hash", lambda path: read.append(path) or real(path))
    assert ContentHashes(tmp_path, Alone()).of(files, progress=False) == first
    assert read == []
    changed = tmp_path / "2.bin"
    changed.write_bytes(b"x" * 1000)
    os.utime(changed, ns=(1, 1))  # a clock may be too coarse to see the change
    second = ContentHashes(tmp_path, Alone()).of(files, progress=False)
    assert read == [changed]
    assert second[changed] == hashlib.blake2b(b"x" * 1000, digest_size=20).hexdigest()
    assert {place for place in files if first[place] != second[place]} == {changed}


def test_a_cell_is_read_once_and_again_when_its_dataset_changes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found: list[list[str]] = []
    for last in (b"abc", b"abc", b"abd"):
        datasets.Dataset.from_dict({"x": [{"bytes": b"first"}, {"bytes": last}]}).save_to_disk(tmp_path / "d")
        table = datasets.load_from_disk(tmp_path / "d")
        cells: list[Media] = [Cell(table, "x", row, f"x[{row}]") for row in range(2)]
        found.append(list(ContentHashes(tmp_path, Alone()).of(cells, progress=False).values()))
    assert found[0] == found[1] == [hashlib.blake2b(b, digest_size=20).hexdigest() for b in (b"first", b"abc")]
    assert found[2] == [found[0][0], hashlib.blake2b(b"abd", digest_size=20).hexdigest()]


def test_processes_hash_their_share_and_know_all(files: list[Media], tmp_path: Path) -> None:
    ContentHashes(tmp_path, Rank(1)).of(files, progress=False)
    assert len(json.loads((tmp_path / "hashes-1.json").read_text())) == 2
    both = ContentHashes(tmp_path, Rank(0)).of(files, progress=False)
    assert len(json.loads((tmp_path / "hashes-0.json").read_text())) == 2
    assert both == ContentHashes(tmp_path / "..", Alone()).of(files, progress=False)
    (tmp_path / ".." / "hashes-0.json").unlink()


def test_a_damaged_memory_costs_time_only(files: list[Media], tmp_path: Path) -> None:
    first = ContentHashes(tmp_path, Alone()).of(files, progress=False)
    path = tmp_path / "hashes-0.json"
    path.write_bytes(path.read_bytes()[:-10])
    assert ContentHashes(tmp_path, Alone()).of(files, progress=False) == first


def test_names_depend_on_every_word_and_on_their_bounds() -> None:
    names = [digest("a", "b"), digest("ab"), digest("b", "a"), digest("a", "b", ""), digest('a", "b')]
    assert len(set(names)) == 5
    assert digest("a", 1) == digest("a", "1")


def test_an_encoder_is_its_files_and_settings_not_its_place(tmp_path: Path) -> None:
    def model(name: str, weights: bytes, config: str = "{}") -> Source:
        folder = tmp_path / name
        (folder / "vae").mkdir(parents=True)
        (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", "vae": ["diffusers", "X"]}))
        (folder / "vae" / "config.json").write_text(config)
        (folder / "vae" / "model.safetensors").write_bytes(weights)
        return Source(str(folder))

    weights = bytes(range(256)) * 4096  # 1 MiB
    tuned = bytes(byte ^ 1 for byte in weights)
    first = identity(model("a", weights), ["vae"], "bf16")
    assert first == identity(model("b", weights), ["vae"], "bf16")
    others = [
        identity(model("c", tuned), ["vae"], "bf16"),
        identity(model("d", weights, '{"scaling_factor": 2}'), ["vae"], "bf16"),
        identity(Source(str(tmp_path / "a")), ["vae"], "fp32"),
        identity(Source(str(tmp_path / "a")), ["vae", "text_encoder"], "bf16"),
    ]
    assert len({first, *others}) == 5
