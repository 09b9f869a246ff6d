"""Measurements of `tread autotune` that are kept: after Ctrl-C, at the end of a budget, with other settings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.autotune.tuned import FAST, OUT, SCRATCH, Law, measurements, tune_cli
from tests.tiny.runs import forget, go_on, train
from tread.autotune.goal import Goal, Options
from tread.autotune.jobs.job import read_job
from tread.autotune.run import autotune
from tread.autotune.subject import Subject
from tread.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("interrupt", [1, 9])
def test_an_interrupted_probe_goes_on(law: Law, capsys: Capture, interrupt: int) -> None:
    """The second command times what is left, and comes to what an undisturbed one comes to."""
    goal = ["--target-speedup", "1.1", "--edges", "3", *FAST]
    law.interrupt = interrupt
    assert tune_cli(*SCRATCH, *goal, "--out", "one") == 130
    shown = capsys.readouterr()
    assert "what was measured is kept in one/measurements.json: the same command goes on" in shown.out
    kept = measurements(Path("one"))
    assert sum(map(len, kept["seconds"].values())) == interrupt - 1
    law.interrupt, law.calls = None, 0
    assert tune_cli(*SCRATCH, *goal, "--out", "one") == 0
    again = law.calls
    law.calls = 0
    assert tune_cli(*SCRATCH, *goal, "--out", "two") == 0
    assert again == law.calls - (interrupt - 1)
    one, two = measurements(Path("one")), measurements(Path("two"))
    assert one["losses"] == two["losses"]
    assert one["seconds"] == two["seconds"]
    assert one["result"]["chosen"] == two["result"]["chosen"]
    assert len(one["starts"]) == 2


def test_sensitivity_that_was_interrupted_goes_on(law: Law, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    losses, asked = Subject.losses, []

    def stopping(subject: Subject, routes: Any) -> Any:
        asked.append(routes)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return losses(subject, routes)

    monkeypatch.setattr(Subject, "losses", stopping)
    goal = ["--target-speedup", "1.1", "--edges", "3", *FAST]
    assert tune_cli(*SCRATCH, *goal, "--out", "one") == 130
    assert len(measurements(Path("one"))["losses"]) == 2
    assert tune_cli(*SCRATCH, *goal, "--out", "one") == 0
    monkeypatch.setattr(Subject, "losses", losses)
    assert tune_cli(*SCRATCH, *goal, "--out", "two") == 0
    assert measurements(Path("one"))["losses"] == measurements(Path("two"))["losses"]


def options(*settings: str, **changes: Any) -> Options:
    given = {"goal": Goal(speedup=1.05), "ratios": (0.25, 0.5), "start_steps": 6, "edges": 3, "out": Path("out")}
    return Options(config=None, settings=[*SCRATCH, *settings], **(given | changes))


def test_the_budget_ends_the_timing(law: Law) -> None:
    """What does not fit is not begun; the next command has the whole budget again."""
    sentence = r"--budget-minutes 0.0416\d* ended after 2 of 5 plans were timed: what was measured is kept"
    with pytest.raises(ConfigError, match=sentence):
        autotune(options(budget_minutes=2.5 / 60), clock=law.clock)
    assert len(measurements(Path("out"))["seconds"]) == law.calls == 2
    forget()
    autotune(options())
    assert measurements(Path("out"))["result"]["chosen"]


def test_a_round_that_the_budget_cut_off_does_not_count(law: Law) -> None:
    """Its plans would look faster than the others on a device that has become quicker; all times are of one round."""
    law.watch = lambda: setattr(law, "slow", 0.01 if law.calls <= 5 else 0.005)
    autotune(options(budget_minutes=8.5 / 60), clock=lambda: float(law.calls))
    facts = measurements(Path("out"))
    assert sorted(map(len, facts["seconds"].values())) == [1, 1, 2, 2, 2]
    assert facts["result"]["cost"]["error"] < 1e-9
    assert facts["result"]["dense_seconds"] == pytest.approx(0.01 * law.of("dense"))


def test_what_the_budget_left_uncompiled_is_not_timed(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step would compile, which takes longer than is left."""
    compiled, compile_one, done = torch.compile, Subject.compile, []
    monkeypatch.setattr(torch, "compile", lambda *given, **options: compiled(*given, **options, backend="eager"))
    torch._dynamo.reset()
    monkeypatch.setattr(Subject, "compile", lambda *given: (done.append(given[1]), compile_one(*given)))
    clock = lambda: 60.0 * len(done) + law.calls  # noqa: E731
    with pytest.raises(ConfigError, match="ended after 2 of 5 plans were timed"):
        autotune(options("train.compile=true", budget_minutes=2.9), clock=clock)
    assert (len(done), law.calls) == (2, 6)


def test_a_dense_start_that_does_not_fit_is_not_begun(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(Subject, "start", lambda subject, steps, show: begun.append(steps))
    minutes = (15 + 6 * law.of("dense")) / 60
    sentence = r"ended before a window was measured: .* A dense start of 6 steps takes 0\.1 of them first"
    with pytest.raises(ConfigError, match=sentence):
        autotune(options(budget_minutes=minutes - 0.001), clock=law.clock)
    assert (law.calls, law.asked, begun) == (15, 0, [])
    forget()
    with pytest.raises(ConfigError, match="changes no prediction"):  # nothing was trained, as `start` is replaced
        autotune(options(budget_minutes=minutes + 0.001), clock=lambda: 0.0)
    assert begun == [6]


def test_the_budget_ends_the_sensitivity(law: Law) -> None:
    law.slow = 0.1  # the dense start needs some of the budget
    autotune(options(budget_minutes=18.5 / 60), clock=law.clock)
    result = measurements(Path("out"))["result"]
    assert (law.calls, law.asked) == (15, 3)
    assert "the budget ended after 3 of 10 windows; the same command measures the others." in result["notes"]
    assert result["measured"] == 3
    assert all(one["timed_speedup"] is None for one in result["finalists"])
    forget()
    autotune(options())
    assert measurements(Path("out"))["result"]["measured"] == law.asked == 10


def test_a_model_that_takes_longer_to_load_than_the_budget(law: Law) -> None:
    with pytest.raises(ConfigError, match="ended after 0 of 5 plans were timed"):
        autotune(options(), clock=iter([0.0, *[1e9] * 99]).__next__)
    assert law.calls == 0
    forget()
    with pytest.raises(ConfigError, match="ended before a window was measured"):
        autotune(options(budget_minutes=11 / 60), clock=lambda: 2.0 * law.calls if law.calls < 5 else 1e9)
    assert law.asked == 0


def test_a_run_that_trained_on_is_another_tuning(law: Law, tmp_path: Path, capsys: Capture) -> None:
    run = train(tmp_path / "run", "model.depth=8", "train.steps=4", "optimizer.warmup_steps=0", "validation.samples=0")
    given = [*SCRATCH, "--target-speedup", "1.02", "--edges", "3", *FAST, f"resume={run}"]
    assert tune_cli(*given) == 0
    assert tune_cli(*given) == 0
    go_on(run, "train.steps=6")
    assert tune_cli(*given) == 2
    error = capsys.readouterr().err
    assert "has measurements of something else (checkpoint: " in error


def test_other_settings_are_another_tuning(law: Law, capsys: Capture) -> None:
    goal = ["--target-speedup", "1.05", "--edges", "3", *FAST]
    assert tune_cli(*SCRATCH, *goal) == 0
    assert tune_cli(*SCRATCH, *goal, "train.batch_size=8") == 2
    assert "has measurements of something else (train.batch_size: 4 -> 8)" in capsys.readouterr().err
    assert tune_cli(*SCRATCH, *goal, "output_dir=elsewhere", "log.every=7") == 0


def test_a_longer_start_measures_losses_again_and_times_nothing(law: Law, capsys: Capture) -> None:
    given = ["--target-speedup", "1.05", "--edges", "3", "--ratios", "0.25,0.5"]
    assert tune_cli(*SCRATCH, *given, "--start-steps", "0") == 2
    assert tune_cli(*SCRATCH, *given, "--start-steps", "3") == 0
    assert law.calls == 15 + 2 * 3 * len(measurements(OUT)["result"]["finalists"])
    windows = [name for name in measurements(OUT)["losses"] if " " not in name]
    assert law.asked == 2 * len(windows) + len(measurements(OUT)["losses"]) - len(windows)


def test_settings_of_train_that_change_no_measurement_leave_it_the_same_tuning() -> None:
    kept = read_job(None, []).identity()
    for setting in (
        "train.steps=7",
        "train.epochs=2",
        "train.workers=3",
        "train.timeout_minutes=5",
        "output_dir=there",
    ):
        assert read_job(None, [setting]).identity() == kept, setting
    assert read_job(None, ["train.batch_size=8"]).identity() != kept
