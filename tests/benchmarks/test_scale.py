"""The benchmarks of several GPUs at tiny size: the loader's ratio, the collectives for `tread plan`, the layouts."""

import json
from pathlib import Path

import pytest

from benchmarks import layouts, loader
from tests.programs import run
from tread.data import Latents


def test_the_loader_reads_and_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "loader.json"
    sizes = ["--shards", "2", "--shard-size", "20", "--batch", "4", "--workers", "1", "--ranks", "2"]
    assert loader.main([*sizes, "--window", "1", "--seconds", "0.01", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["dit_b_images_per_second"] == 4104.4  # h200-kernels.json, stream
    assert found["images_per_second"] > 0
    assert found["ratio"] == pytest.approx(found["images_per_second"] / 4104.4, abs=1e-3)
    assert found["settings"]["ranks"] == 2


def test_the_loaders_shards_are_those_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "s").mkdir()
    loader.write_shards(tmp_path / "s", 2, 3)
    data = Latents(tmp_path / "s")
    assert (len(data), data.shape, data.kind) == (6, (4, 32, 32), "moments")


def test_collectives_are_measured_between_processes(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    said = run("-m", "benchmarks.collectives", "--processes", 2, "--sizes", 4096, 65536, "--repeats", 1, "--out", out)
    found = json.loads(out.read_text())
    assert (found["backend"], found["world"], found["nodes"]) == ("gloo", 2, 1)
    names = ["all_reduce", "all_gather", "reduce_scatter"]
    assert [(row["bytes"], row["collective"]) for row in found["rows"]] == [
        (b, n) for b in (4096, 65536) for n in names
    ]
    for row in found["rows"]:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["bus_gb_per_s"] == pytest.approx(row["gb_per_s"] * (1 if row["collective"] == "all_reduce" else 0.5))
    assert said.startswith("2 ranks on 1 node by gloo")


@pytest.mark.contract
def test_layouts_are_compared_with_one_process(tmp_path: Path) -> None:
    out = tmp_path / "layouts.json"
    assert layouts.main(["--processes", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["processes"], row["layout"]) for row in rows] == [
        *((1, name) for name in ("ddp", "fsdp", "micro")),
        *((2, name) for name in ("ddp", "fsdp", "micro", "hsdp-1", "hsdp-2")),
    ]
    assert all(row["same_samples_and_tokens"] for row in rows)
    assert all(row["metrics"] < 1e-5 for row in rows)
    assert any(row["weights"] > 0 for row in rows), "two orders of a sum never round alike in every weight"
