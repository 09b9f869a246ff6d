"""`checkpoint.every=0`: the same run with nothing saved, which is said at its start and wherever a save is due."""

import signal
from pathlib import Path

import pytest

from tests.tiny.runs import go_on, losses, metrics, train
from tests.training.test_loop import before_step, interruptible
from tests.training.test_rescue import fail_once
from tread.errors import CheckpointError, Stopped, TrainingDiverged
from tread.pretrain.sample import sample_run
from tread.pretrain.task import Pretraining
from tread.training.checkpoint import CHECKPOINTS, MANIFEST

__all__ = ["interruptible"]
UNSAVED = ["train.steps=8", "log.every=4", "validation.every=4", "checkpoint.every=0"]
START = "nothing is saved, because checkpoint.every is 0, so this run can be neither resumed nor sampled from.\n"


def fail() -> None:
    raise RuntimeError("out of luck")


def test_the_run_is_the_same_and_nothing_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path / "unsaved", *UNSAVED)
    said = capsys.readouterr().out
    assert said.count(START) == said.count("checkpoint.every") == 1
    assert metrics(folder) == metrics(train(tmp_path / "saved", *UNSAVED, "checkpoint.every=4"))
    assert "checkpoint.every" not in capsys.readouterr().out
    told = [".lock", "config.yaml", "metrics.jsonl", "report.html", "run.json"]
    assert sorted(path.name for path in folder.iterdir()) == told
    with pytest.raises(CheckpointError) as error:
        sample_run(folder, per_class=1)
    assert str(error.value) == (
        f"{folder} has no checkpoint yet; train it again with another checkpoint.every, for 0 saves none."
    )
    go_on(folder, "train.steps=2", "checkpoint.every=2")
    assert f"no checkpoint in {folder / CHECKPOINTS}: the run starts at step 0.\n" in capsys.readouterr().out
    assert [path.name for path in (folder / CHECKPOINTS).iterdir()] == ["step-00000002"]


def test_a_run_that_goes_on_unsaved_keeps_the_checkpoints_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose grid is still to be drawn, which a saved run would write again once it is."""
    folder, drawing = tmp_path / "run", ["sample.every=2", "sample.steps=1", "sample.per_class=1"]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        fail_once(patch, Pretraining, "preview", 1)
        train(folder, "train.steps=2", *drawing)
    manifest = (folder / CHECKPOINTS / "step-00000002" / MANIFEST).read_text()
    assert len(losses(go_on(folder, "train.steps=4", "checkpoint.every=0"))) == 4
    assert sorted(path.name for path in (folder / "samples").iterdir()) == ["step-00000002.png", "step-00000004.png"]
    assert [path.name for path in (folder / CHECKPOINTS).iterdir()] == ["step-00000002"]
    assert (folder / CHECKPOINTS / "step-00000002" / MANIFEST).read_text() == manifest


@pytest.mark.usefixtures("interruptible")
def test_a_signal_and_an_error_say_that_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        before_step(patch, 4, lambda: signal.raise_signal(signal.SIGTERM))
        train(tmp_path / "stopped", *UNSAVED)
    told = "nothing is saved, because checkpoint.every is 0.\n"
    assert f"stopped at step 5 of 8; {told}" in capsys.readouterr().out
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        before_step(patch, 5, fail)
        train(tmp_path / "failed", *UNSAVED)
    assert f"an error stopped the run at step 5; {told}" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path / "failed") if "loss" in line] == [1, 2, 3, 4, 5]
    for name in ("stopped", "failed"):
        assert not (tmp_path / name / CHECKPOINTS).exists()


def test_a_run_that_diverges_is_not_told_to_resume(tmp_path: Path) -> None:
    wild = ["optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "optimizer.clip=null"]
    with pytest.raises(TrainingDiverged, match=r"train\.precision=float32, and train again\.$"):
        train(tmp_path / "run", *UNSAVED, *wild)
