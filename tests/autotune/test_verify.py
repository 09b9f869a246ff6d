"""Verifying runs of `tread autotune --verify`: finalists beside dense training at equal wall-clock."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.autotune.tuned import FAST, OUT, SCRATCH, Law, config_file, measurements, tune_cli
from tests.page.conftest import write_run
from tests.report.conftest import Tune
from tread.autotune.jobs import finetuning
from tread.autotune.jobs.pretraining import PretrainTuning
from tread.autotune.verify import FALLS_APART, standing
from tread.config.schema import parse
from tread.errors import TrainingDiverged
from tread.finetune.settings import FinetuneConfig
from tread.training.metrics import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]
GENTLE = [*SCRATCH, "optimizer.learning_rate=1e-4"]
"""A handful of steps in which nothing can fall apart."""


def goal(minutes: float = 0.4) -> list[str]:
    return ["--target-speedup", "1.05", "--edges", "3", "--verify", str(minutes), *FAST]


def fake_runs(monkeypatch: pytest.MonkeyPatch, losses: list[float | None]) -> list[tuple[Path, int]]:
    """Runs that end at these validation losses, one after the other, and take a second; None diverges."""
    made: list[tuple[Path, int]] = []

    def run(_: Any, tread_config: Any, steps: int, folder: Path) -> None:
        made.append((folder, steps))
        loss = losses[len(made) - 1]
        if loss is None:
            raise TrainingDiverged("the loss is no longer finite")
        speed = {"step": steps, "images_per_second": 10 * steps}
        write_run(folder, [{"step": 1, "loss": 1.0}, speed, {"step": steps, "val_loss": loss}])

    monkeypatch.setattr(PretrainTuning, "train", run)
    return made


def test_finalists_of_a_fine_tune_are_run_beside_dense(law: Law, tune: Tune) -> None:
    """Also those of the schedule that the config leaves to its default: 10 % of the steps climb to the ratio in four
    levels, and the last 15 % are dense and take longer."""
    config = tune("flux", num_eval_images=2, validation_prompt=None, tread_config=None, output_dir="never")
    law.fixed, law.window, law.linear, law.square = 0.03, 0.001, 0.3, 0.01
    assert tune_cli(config_file(config), "--target-speedup", "1.01", "--ratios", "0.4", "--verify", "4") == 0
    facts = measurements(Path("autotune/c"))
    share = 60 * 4 / len(facts["verified"])
    dense = law.fixed + 5 * (law.linear + law.square)
    assert facts["verified"]["dense"]["steps"] == int(share / dense)

    def took(steps: int, routed: float) -> float:
        warmup, cooldown = round(0.1 * steps), round(0.15 * steps)
        levels = [step * 4 // warmup / 4 for step in range(warmup)]
        saved = sum(levels) + (steps - warmup - cooldown)
        return steps * dense - saved * (dense - routed)

    for one in facts["result"]["finalists"]:
        run, routed = facts["verified"][one["plan"]], dense / one["timed_speedup"]
        assert run["steps"] == next(steps for steps in count(1) if took(steps + 1, routed) > share)
        assert run["expected_seconds"] == pytest.approx(took(run["steps"], routed))
        assert run["steps"] < int(share / routed), "a run without its schedule would fit more"
        assert run["val_loss"] > 0
    assert any("last 15% of the steps dense" in note for note in facts["result"]["notes"])
    assert not Path("never").exists()


def test_finalists_are_run_beside_dense(law: Law, capsys: Capture) -> None:
    """Equal wall-clock by the law: steps are the share of the time over the time of a step, on a device that has become
    slower than it was for the fit; runs are not repeated, and what they took is in their own logs."""
    law.watch = lambda: setattr(law, "slow", 0.25 if law.calls <= 15 else 0.5)
    assert tune_cli(*GENTLE, *goal()) == 0
    facts = measurements(OUT)
    finalists = [one["plan"] for one in facts["result"]["finalists"]]
    assert list(facts["verified"]) == ["dense", *finalists]
    share = 60 * 0.4 / (1 + len(finalists))
    for name, one in facts["verified"].items():
        step = 0.5 * law.of(name)
        assert one["steps"] == int(share / step)
        assert one["expected_seconds"] == pytest.approx(one["steps"] * step)
        lines = read_metrics(OUT / "verify" / f"{name.replace(' ', '_')}-{one['steps']}")
        ((last, speed),) = [(line["step"], line["images_per_second"]) for line in lines if "images_per_second" in line]
        assert last == one["steps"]
        assert one["seconds"] == pytest.approx(4 * one["steps"] / speed)  # four images a step
    runs = sorted((OUT / "verify").iterdir())
    assert len(runs) == 1 + len(finalists)
    assert all((run / "checkpoints").is_dir() for run in runs)
    shown = capsys.readouterr().out
    first = facts["verified"]["dense"]
    assert f"{first['seconds'] / 60:.2f} min where {first['expected_seconds'] / 60:.2f} were expected" in shown
    assert "never promotes one" in shown
    before = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs}
    assert tune_cli(*GENTLE, *goal()) == 0
    assert {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs} == before


def test_steps_are_timed_right_before_the_runs(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning of yesterday, when the device was twice as fast, and a run that was stopped, when it was slower yet."""
    assert tune_cli(*SCRATCH, *[word for word in goal() if word not in ("--verify", "0.4")]) == 0
    law.slow = 2.0
    made = fake_runs(monkeypatch, [1.0, 1.0])  # the third run fails
    with pytest.raises(IndexError):
        tune_cli(*SCRATCH, *goal(4))
    facts = measurements(OUT)
    first = facts["result"]["finalists"][0]["plan"]
    share = 60 * 4 / (1 + len(facts["result"]["finalists"]))
    assert [steps for _, steps in made[:2]] == [int(share / (2 * law.of(name))) for name in ("dense", first)]
    law.slow, calls = 3.0, law.calls
    again = fake_runs(monkeypatch, [1.0] * 9)
    assert tune_cli(*SCRATCH, *goal(4)) == 0
    assert law.calls > calls, "the last finalists are timed again"
    assert not {folder for folder, _ in made[:2]} & {folder for folder, _ in again}
    for name, one in measurements(OUT)["verified"].items():
        assert one["steps"] == int(share / (2 * law.of(name))), "beside the dense run, whose steps took twice as long"


def test_runs_that_took_unequal_times_are_told(law: Law, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def run(_: Any, tread_config: Any, steps: int, folder: Path) -> None:
        seconds = 60 if tread_config is None else 70
        lines = [{"step": 1, "loss": 1.0}, {"step": steps, "images_per_second": 10 * steps / seconds}]
        write_run(folder, [*lines, {"step": steps, "val_loss": 1.0}])

    monkeypatch.setattr(PretrainTuning, "train", run)
    assert tune_cli(*SCRATCH, *goal()) == 0
    assert "The verifying runs took 60 to 70 seconds, so their wall-clock is not equal" in capsys.readouterr().out


def test_a_finalist_that_falls_apart_is_rejected(law: Law, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Validation losses are as written: the first finalist is just above the limit, then all of them are."""
    fake_runs(monkeypatch, [1.0, 1 + FALLS_APART + 0.001, 1 + FALLS_APART - 0.001, 1.0])
    assert tune_cli(*SCRATCH, *goal()) == 0
    result = measurements(OUT)["result"]
    first, second, _ = result["finalists"]
    assert (first["rejected"], second["rejected"]) == (True, False)
    assert result["chosen"] == second["plan"]
    fake_runs(monkeypatch, [1.0, 1.5, 1.5, 1.5])
    assert tune_cli(*SCRATCH, *goal(1)) == 2
    error = capsys.readouterr().err
    assert "every finalist fell apart in its verifying run" in error
    assert "autotune/train/tread_config.json, the answer to an earlier goal, is removed" in error
    assert not (OUT / "tread_config.json").exists()


def test_a_finalist_that_diverges_is_rejected(law: Law, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """And not trained again by the same command; dense training that diverges says nothing about routes."""
    made = fake_runs(monkeypatch, [1.0, None, 1.0, 1.0])
    for _ in range(2):
        assert tune_cli(*SCRATCH, *goal()) == 0
        result = measurements(OUT)["result"]
        assert [one["rejected"] for one in result["finalists"]] == [True, False, False]
        assert result["chosen"] == result["finalists"][1]["plan"]
        assert "diverged" in (OUT / "report.html").read_text()
    assert len(made) == 4
    fake_runs(monkeypatch, [None])
    assert tune_cli(*SCRATCH, *goal(), "--out", "other") == 2
    assert "the loss is no longer finite" in capsys.readouterr().err


def test_runs_validated_on_other_samples_are_not_compared(
    law: Law, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    made = fake_runs(monkeypatch, [1.0] * 9)
    assert tune_cli(*SCRATCH, *goal()) == 0
    assert tune_cli(*SCRATCH, *goal(), "validation.samples=8") == 2
    assert "has verifying runs that were validated otherwise (validation.samples: 4 -> 8)" in capsys.readouterr().err
    assert len(made) == 4


def test_verifying_runs_are_not_uploaded(tune: Tune, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained: list[FinetuneConfig] = []
    monkeypatch.setattr(finetuning, "finetune", trained.append)
    config = tune("flux", push_to_hub=True, hub_model_id="me/mine")
    job = finetuning.FinetuneTuning(parse(FinetuneConfig, config))
    job.train(None, 3, tmp_path / "run")
    assert not trained[0].push_to_hub


def test_an_unverified_plan_stands() -> None:
    assert standing(["a", "b"], {}) == ["a", "b"]
    assert standing(["a", "b"], {"a": {"against_dense": 0.1}, "b": {"against_dense": -0.1}}) == ["b"]
    assert standing(["a"], {"a": {"against_dense": None}}) == []
