"""Verifying runs of `tread autotune --verify`: finalists beside dense training at equal wall-clock."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.autotune.tuned import FAST, OUT, SCRATCH, Law, config_file, measurements, tune_cli
from tests.report.conftest import Tune
from tread.autotune.verify import FALLS_APART, standing

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]


def test_finalists_of_a_fine_tune_are_run_beside_dense(law: Law, tune: Tune) -> None:
    """Also those of the schedule that the config leaves to its default, whose last steps are dense and take longer."""
    config = tune("flux", num_eval_images=2, validation_prompt=None, tread_config=None, output_dir="never")
    law.fixed = 2.0
    assert tune_cli(config_file(config), "--target-speedup", "1.01", "--ratios", "0.4", "--verify", "0.5") == 0
    facts = measurements(Path("autotune/c"))
    dense = facts["verified"]["dense"]
    share = 60 * 0.5 / len(facts["verified"])
    assert dense["steps"] == round(share / (law.fixed + 5 * (law.linear + law.square)))
    for one in facts["result"]["finalists"]:
        seconds = 0.85 * one["seconds"] + 0.15 * facts["result"]["dense_seconds"]
        assert facts["verified"][one["plan"]]["steps"] == round(share / seconds)
        assert facts["verified"][one["plan"]]["val_loss"] > 0
    assert any("last 15% of the steps dense" in note for note in facts["result"]["notes"])
    assert not Path("never").exists()


@pytest.mark.parametrize("minutes", [0.4])
def test_finalists_are_run_beside_dense(law: Law, capsys: Capture, minutes: float) -> None:
    """Equal wall-clock by the law: steps are the share of the time over the time of a step; runs are not repeated."""
    gentle = "optimizer.learning_rate=1e-4"  # a handful of steps in which nothing can fall apart
    goal = [gentle, "--target-speedup", "1.05", "--edges", "3", "--verify", str(minutes), *FAST]
    assert tune_cli(*SCRATCH, *goal) == 0
    facts = measurements(OUT)
    finalists = [one["plan"] for one in facts["result"]["finalists"]]
    assert list(facts["verified"]) == ["dense", *finalists]
    share = 60 * minutes / (1 + len(finalists))
    dense = law.fixed + 8 * (law.linear + law.square)
    assert facts["verified"]["dense"]["steps"] == round(share / dense)
    for one in facts["result"]["finalists"]:
        assert facts["verified"][one["plan"]]["steps"] == max(1, round(share / one["seconds"]))
        assert facts["verified"][one["plan"]]["steps"] >= facts["verified"]["dense"]["steps"]
    runs = sorted((OUT / "verify").iterdir())
    assert len(runs) == 1 + len(finalists)
    assert all((run / "checkpoints").is_dir() for run in runs)
    before = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs}
    assert tune_cli(*SCRATCH, *goal) == 0
    assert {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs} == before
    assert "never promotes one" in capsys.readouterr().out


def test_a_finalist_that_falls_apart_is_rejected(law: Law, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Validation losses are as written: the first finalist is just above the limit, then all of them are."""
    from tread.autotune.jobs.pretraining import PretrainTuning

    worse: list[float] = [0.0, FALLS_APART + 0.001, FALLS_APART - 0.001, 0.0]
    made: list[Path] = []

    def run(_: Any, tread_config: Any, steps: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        made.append(folder)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": steps, "val_loss": 1 + worse[len(made) - 1]}) + "\n")

    monkeypatch.setattr(PretrainTuning, "train", run)
    goal = ["--target-speedup", "1.02", "--edges", "3", "--verify", "1", *FAST]
    assert tune_cli(*SCRATCH, *goal) == 0
    result = measurements(OUT)["result"]
    first, second, _ = result["finalists"]
    assert (first["rejected"], second["rejected"]) == (True, False)
    assert result["chosen"] == second["plan"]
    worse[:] = [0.0, 0.5, 0.5, 0.5]
    made.clear()
    assert tune_cli(*SCRATCH, *goal, "--out", "other") == 2
    assert "every finalist fell apart in its verifying run" in capsys.readouterr().err
    assert not Path("other/tread_config.json").exists()


def test_an_unverified_plan_stands() -> None:
    assert standing(["a", "b"], {}) == ["a", "b"]
    assert standing(["a", "b"], {"a": {"against_dense": 0.1}, "b": {"against_dense": -0.1}}) == ["b"]
