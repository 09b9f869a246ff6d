"""An error in mid-run costs the step it is in and none before, and nothing that is half changed is kept."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny.runs import assert_same_run, go_on, losses, make_session, metrics, train, write_images
from tests.training.test_loop import EIGHT, before_step
from tread.data.images import ImageFolder
from tread.data.order import Order
from tread.data.readable import SKIPPED_FILE
from tread.pretrain.task import Pretraining
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.metrics import Metrics, read_metrics
from tread.training.optimizers.ema import EMA
from tread.training.session import Session


def fail_once(patch: pytest.MonkeyPatch, owner: type, method: str, call: int) -> None:
    """Let call number `call` of a method raise."""
    whole, calls = getattr(owner, method), itertools.count(1)

    def fails(self: object, *arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("out of luck")
        return whole(self, *arguments, **named)

    patch.setattr(owner, method, fails)


@pytest.mark.parametrize(
    ("owner", "method", "call", "log"),
    [(Pretraining, "loss", 12, 100), (Pretraining, "preview", 1, 100), (Metrics, "write", 3, 5)],
)
def test_an_error_saves_the_last_whole_step_and_says_how_to_go_on(
    tmp_path: Path,
    owner: type,
    method: str,
    call: int,
    log: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the second micro-step after step 5; in its picture, while the model has its averaged weights; in the log."""
    settings = [*EIGHT, "checkpoint.every=100", f"log.every={log}", "validation.every=0", "train.micro_steps=2"]
    settings += ["sample.every=5", "sample.steps=2", "sample.per_class=1"]
    folder = tmp_path / "failed"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        fail_once(patch, owner, method, call)
        train(folder, *settings)
    assert [path.name for path in list_checkpoints(folder / CHECKPOINTS)] == ["step-00000005"]
    assert f"step 5 is saved, continue with: tread train resume={folder}\n" in capsys.readouterr().out
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5]
    assert_same_run(train(tmp_path / "straight", *settings), go_on(folder))


@pytest.mark.parametrize(("every", "failing"), [(4, 1), (4, 2), (100, 1)])
def test_what_an_error_kept_from_being_made_is_made_on_resume(
    tmp_path: Path, every: int, failing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation and picture of step 4, or of step 8, the last."""
    settings = [*EIGHT, "checkpoint.every=100", f"validation.every={every}", f"sample.every={every}"]
    settings += ["sample.steps=2", "sample.per_class=1"]
    folder, straight = tmp_path / "failed", train(tmp_path / "straight", *settings)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        fail_once(patch, Pretraining, "validate", failing)
        train(folder, *settings)
    assert f"step {4 if (every, failing) == (4, 1) else 8} is saved" in capsys.readouterr().out
    assert_same_run(straight, go_on(folder))
    pictures = [sorted(path.name for path in (run / "samples").iterdir()) for run in (straight, folder)]
    assert pictures[0] == pictures[1]
    go_on(folder)
    assert "the run is at step 8 already" in capsys.readouterr().out, "nothing is made twice"


def test_reviews_that_a_resume_makes_first_are_no_time_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock by which a step takes a second and a validation a thousand."""
    now = 0.0

    def takes(owner: type, method: str, seconds: float) -> None:
        whole = getattr(owner, method)

        def slow(self: object, *arguments: Any, **named: Any) -> Any:
            nonlocal now
            now += seconds
            return whole(self, *arguments, **named)

        monkeypatch.setattr(owner, method, slow)

    settings = [*EIGHT, "checkpoint.every=100", "log.every=2", "validation.every=4"]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        fail_once(patch, Pretraining, "validate", 1)
        train(tmp_path / "run", *settings)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    takes(Session, "step", 1.0)
    takes(Pretraining, "validate", 1000.0)
    go_on(tmp_path / "run")
    speeds = {line["step"]: line["images_per_second"] for line in read_metrics(tmp_path / "run") if len(line) == 3}
    assert (speeds[6], speeds[8]) == (8.0, 8.0)


def test_a_result_that_fails_after_the_checkpoint_does_not_deny_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_once(monkeypatch, Pretraining, "loss", call=4)
    fail_once(monkeypatch, Pretraining, "saved", call=1)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "run", *EIGHT, "checkpoint.every=100")
    assert "step 3 is saved, continue with: " in capsys.readouterr().out
    assert len(losses(tmp_path / "run")) == 3


def test_an_unreadable_image_is_listed_and_the_run_goes_on(tmp_path: Path) -> None:
    """It trains as if a copy of the next image were there, at any number of workers and after a resume."""
    data = write_images(tmp_path / "data", "a", count=20, size=8)
    settings = ["data=images", f"data.path={data}", "data.size=8", "train.batch_size=4", "validation.samples=4"]
    task, _ = make_session(tmp_path / "run", *settings)
    places = task.train_set.indices
    sample = int(Order(len(places), task.config.train.seed).indices(torch.tensor([9])))  # of the third batch
    files = ImageFolder(data, size=8).files
    broken, stand_in = (data / files[places[place % len(places)]] for place in (sample, sample + 1))
    broken.write_bytes(broken.read_bytes()[:60])
    train(tmp_path / "run", *settings, "train.steps=3", "train.workers=1")
    go_on(tmp_path / "run", "train.steps=6", "train.workers=0")
    assert (tmp_path / "run" / SKIPPED_FILE).read_text().startswith(f"cannot read image {broken} (")
    broken.write_bytes(stand_in.read_bytes())
    train(tmp_path / "copy", *settings, "train.steps=6")
    assert losses(tmp_path / "run") == losses(tmp_path / "copy")
    assert not (tmp_path / "copy" / SKIPPED_FILE).exists()


def test_an_error_amid_a_change_of_the_weights_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_once(monkeypatch, EMA, "update", call=5)  # the weights have taken a step that their average has not
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "run", *EIGHT, "checkpoint.every=3")
    assert [path.name for path in list_checkpoints(tmp_path / "run" / CHECKPOINTS)] == ["step-00000003"]
    assert "an error" not in capsys.readouterr().out


def test_an_error_after_a_loss_that_is_no_number_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = ["optimizer.learning_rate=1e20", "optimizer.warmup_steps=0", "optimizer.clip=null"]
    fail_once(monkeypatch, Pretraining, "loss", call=8)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "run", *EIGHT, "checkpoint.every=100", "log.every=100", "validation.every=0", *wild)
    assert list_checkpoints(tmp_path / "run" / CHECKPOINTS) == []


def test_an_error_right_after_a_checkpoint_leaves_that_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[int] = []

    def fail() -> None:
        written.append((tmp_path / "run" / CHECKPOINTS / "step-00000004").stat().st_ino)
        raise RuntimeError("out of luck")

    before_step(monkeypatch, 4, fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "run", *EIGHT)
    assert [path.stat().st_ino for path in list_checkpoints(tmp_path / "run" / CHECKPOINTS)][-1:] == written
    assert "step 4 is saved, continue with: " in capsys.readouterr().out


def test_a_save_that_fails_after_an_error_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_folder() -> None:
        (tmp_path / "run" / CHECKPOINTS).write_text("in the way")
        raise RuntimeError("out of luck")

    before_step(monkeypatch, 2, break_folder)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "run", *EIGHT, "checkpoint.every=100")
    assert "another came while it was saved: cannot write the checkpoint" in capsys.readouterr().out
