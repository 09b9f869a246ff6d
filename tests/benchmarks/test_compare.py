"""New figures are judged against the committed ones by their spread."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import main


def write(path: Path, *, device: str = "a GPU", jobs: bool = False, **routed: Any) -> Path:
    """A results file with one measurement."""
    timing = {"median_ms": 100.0, "low_ms": 99.0, "high_ms": 102.0, "peak_gib": 10.0} | routed
    entry = {"name": "graphs", "row": "flux", "status": "ok", "routed": timing}
    measurements: dict[str, Any] = {"measurements": [entry, {"name": "eager", "row": "flux", "status": "failed"}]}
    facts = {"machine": {"device": device}} | ({"jobs": [measurements]} if jobs else measurements)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize(
    ("new", "verdict", "status"),
    [
        ({}, "ok", 0),
        ({"median_ms": 50.0, "low_ms": 49.0, "high_ms": 51.0}, "ok", 0),
        ({"median_ms": 106.0, "low_ms": 105.0}, "ok", 0),  # two machines differ as much
        ({"median_ms": 107.0, "low_ms": 105.1}, "slower", 1),
        ({"median_ms": 120.0, "low_ms": 100.0}, "ok", 0),  # some blocks were as fast
        ({"peak_gib": 10.1}, "ok", 0),
        ({"peak_gib": 10.3}, "more memory", 1),
        ({"low_ms": 110.0, "peak_gib": 11.0}, "slower, more memory", 1),
    ],
)
@pytest.mark.parametrize("jobs", [False, True])
def test_a_figure_may_be_worse_by_its_spread(
    new: dict[str, Any], verdict: str, status: int, jobs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "results" / "gpu-old.json", jobs=jobs)
    write(tmp_path / "results" / "gpu-other.json", device="another GPU", median_ms=1.0, low_ms=1.0, high_ms=1.0)
    found = main([str(write(tmp_path / "new.json", **new)), "--results", str(tmp_path / "results")])
    assert found == status
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"| {verdict} |")


def test_a_row_without_a_committed_figure_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    assert main([str(write(tmp_path / "new.json")), "--results", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("| new |")
