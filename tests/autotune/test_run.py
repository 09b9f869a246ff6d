"""`tread autotune` end to end on tiny models trained from scratch, with the time of a step by a known law."""

import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.autotune.tuned import FAST, OUT, SCRATCH, Law, gap_of, measurements, plans_by_hand, tune_cli, written
from tests.tiny.runs import train
from tread.autotune import tuning
from tread.autotune.cost import Routes, routes_of
from tread.autotune.goal import Goal
from tread.autotune.output.text import unreached
from tread.autotune.search import front
from tread.autotune.store import KINDS
from tread.autotune.subject import Subject
from tread.routing.plan import RoutePlan

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]


def test_the_choice_is_the_best_of_all_plans(law: Law, capsys: Capture) -> None:
    """From scratch: every plan of the measured windows by hand, with the law and the sums of measured gaps."""
    assert tune_cli(*SCRATCH, "--target-speedup", "1.12", "--edges", "4", *FAST) == 0
    shown = capsys.readouterr().out
    facts = measurements(OUT)
    plans = plans_by_hand(facts, law)
    gap, slowness = min((gap, -speedup) for speedup, gap, _ in plans if speedup >= 1.12)
    finalists = {one["plan"]: one for one in facts["result"]["finalists"]}
    best = min(finalists.values(), key=lambda one: (one["gap"], -one["speedup"]))
    assert (best["gap"], -best["speedup"]) == pytest.approx((gap, slowness), rel=1e-9, abs=1e-12)
    least = min(finalists.values(), key=lambda one: max(0.0, one["whole_gap"]))
    assert facts["result"]["chosen"] == least["plan"]
    by_name = {name: (speedup, gap) for speedup, gap, name in plans}
    for one in facts["result"]["front"]:
        speedup, gap = by_name[one["plan"]]
        assert one["speedup"] == pytest.approx(speedup, rel=1e-9)
        assert one["gap"] == pytest.approx(gap, abs=1e-12)
        assert not any(s > speedup + 1e-9 and g < gap + 1e-12 for s, g, _ in plans)
        assert not any(s > speedup - 1e-9 and g < gap - 1e-12 for s, g, _ in plans)
    for one in finalists.values():
        assert one["whole_gap"] == pytest.approx(gap_of(facts["losses"][one["plan"]]))
        assert one["timed_speedup"] == pytest.approx(one["speedup"], rel=1e-9)
    plan = RoutePlan.from_config(str(OUT / "tread_config.json")).resolve(8)
    assert plan.routes == routes_of(facts["result"]["chosen"])
    assert "no GPU here" in shown
    assert "after a dense start of 6 steps" in shown
    assert "rules: windows start at layer 1 or later" in shown
    command = next(line for line in shown.splitlines() if line.startswith("train with: "))
    assert command.endswith("model.tread_config=autotune/train/tread_config.json")
    assert (OUT / "report.html").is_file()


def test_the_routes_run(law: Law, tmp_path: Path) -> None:
    assert tune_cli(*SCRATCH, "--pareto", "--edges", "3", *FAST) == 0
    train(tmp_path / "run", "model.depth=8", "train.steps=1", f"model.tread_config={OUT / 'tread_config.json'}")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["facts"]["tread_config"]["routes"] == written(OUT)


def test_a_gap_is_kept_to(law: Law) -> None:
    assert tune_cli(*SCRATCH, "--pareto", "--edges", "3", *FAST) == 0
    plans = plans_by_hand(measurements(OUT), law)
    most = 0.6 * max(gap for _, gap, _ in plans)
    assert most > 1e-6
    assert tune_cli(*SCRATCH, "--max-loss-gap", str(most), "--edges", "3", *FAST) == 0
    result = measurements(OUT)["result"]
    within = [speedup for speedup, gap, _ in plans if gap <= most]
    finalist = max(result["finalists"], key=lambda one: one["speedup"])
    assert finalist["speedup"] == pytest.approx(max(within), rel=1e-9)
    chosen = next(one for one in result["finalists"] if one["plan"] == result["chosen"])
    assert chosen["whole_gap"] <= most
    below = sum(gap_of(losses) < 0 for name, losses in measurements(OUT)["losses"].items() if " " not in name)
    assert below == 0 or any(f"{below} of 10 windows have a lower loss routed" in note for note in result["notes"])


def test_a_gap_that_no_plan_keeps_to() -> None:
    plans = [{"plan": "2..5@0.5", "speedup": 1.5, "gap": 0.04}, {"plan": "4..5@0.25", "speedup": 1.05, "gap": 0.013}]
    assert unreached(Goal(gap=0.01), plans, fastest=False) == (
        "no plan within the rules reaches a loss gap of at most 1.00%: the gentlest there is, 0.25 over 4..5, has "
        "steps 1.05 times as fast as dense at a loss gap of 1.30%. Ask for --max-loss-gap 0.013; all measurements are "
        "kept."
    )


@pytest.mark.parametrize(("speedup", "advice"), [(1.497, "Ask for --target-speedup 1.49"), (1.004, "Train dense")])
def test_what_is_advised_can_be_reached(speedup: float, advice: str) -> None:
    plan = {"plan": "2..5@0.5", "speedup": speedup, "gap": 0.01302}
    assert f". {advice}; all measurements are kept." in unreached(Goal(speedup=9), [plan], fastest=True)
    assert "Ask for --max-loss-gap 0.0131;" in unreached(Goal(gap=0.01), [plan], fastest=False)


def test_a_gap_is_kept_to_as_a_whole(law: Law, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Two windows together may cost more than the sum of theirs: the next plans of the front are then measured."""

    def losses(subject: Subject, routes: Routes) -> list[tuple[float, float]]:
        (route, *others) = routes
        layers = route.end_layer_idx - route.start_layer_idx + 1
        return [(1.0, 3.0 if others else 1 + 0.05 * layers**3 * route.selection_ratio**2)] * 4

    monkeypatch.setattr(Subject, "losses", losses)
    assert tune_cli(*SCRATCH, "--max-loss-gap", "0.3", "--edges", "4", *FAST) == 0
    result = measurements(OUT)["result"]
    assert all(" " in one["plan"] for one in [one for one in result["front"] if one["gap"] <= 0.3][:3])
    assert " " not in result["chosen"]
    assert all(one["whole_gap"] <= 0.3 for one in result["finalists"])

    several = lambda *given, **limits: [plan for plan in front(*given, **limits) if len(plan.routes) > 1]  # noqa: E731
    monkeypatch.setattr(tuning, "front", several)
    assert tune_cli(*SCRATCH, "--max-loss-gap", "0.5", "--edges", "4", *FAST, "--out", "several") == 2
    assert "at a loss gap of 200.00%. Ask for --max-loss-gap 2;" in capsys.readouterr().err
    assert not Path("several/tread_config.json").exists()


def test_a_target_that_no_plan_reaches(law: Law, capsys: Capture) -> None:
    assert tune_cli(*SCRATCH, "--target-speedup", "9", "--edges", "3", *FAST) == 2
    shown = capsys.readouterr()
    facts = measurements(OUT)
    fastest = max(plans_by_hand(facts, law))
    assert shown.err.splitlines()[-1].startswith(
        "tread autotune: no plan within the rules reaches steps 9 times as fast as dense ones: the fastest there is, "
    )
    assert f"has steps {fastest[0]:.2f} times as fast as dense at a loss gap of {fastest[1]:.2%}" in shown.err
    assert not (OUT / "tread_config.json").exists()
    assert "No plan within the rules" in (OUT / "report.html").read_text()


def test_a_refused_goal_leaves_no_routes_of_another(law: Law, capsys: Capture) -> None:
    """The routes that an earlier goal wrote are not the answer to this one; its figures answer it again."""
    given = [*SCRATCH, "--edges", "3", *FAST]
    assert tune_cli(*given, "--target-speedup", "1.05") == 0
    before, calls = (OUT / "tread_config.json").read_bytes(), (law.calls, law.asked)
    facts = measurements(OUT)
    assert tune_cli(*given, "--target-speedup", "9") == 2
    assert "autotune/train/tread_config.json, the answer to an earlier goal, is removed" in capsys.readouterr().err
    assert not (OUT / "tread_config.json").exists()
    assert "the answer to an earlier goal, is removed" in (OUT / "report.html").read_text()
    again = measurements(OUT)
    assert "chosen" not in again["result"]
    assert {kind: again[kind] for kind in KINDS} == {kind: facts[kind] for kind in KINDS}
    assert tune_cli(*given, "--target-speedup", "1.05") == 0
    assert (OUT / "tread_config.json").read_bytes() == before
    assert (law.calls, law.asked) == calls


def test_finalists_are_timed_beside_dense(law: Law) -> None:
    """A device that gets 2 % slower with each timing after the probes; by the law, speed-ups do not change."""
    law.watch = lambda: setattr(law, "slow", 1.02 ** max(0, law.calls - 15))
    assert tune_cli(*SCRATCH, "--target-speedup", "1.05", "--edges", "3", *FAST) == 0
    facts = measurements(OUT)
    assert law.slow > 1.3
    for one in facts["result"]["finalists"]:
        assert one["timed_speedup"] == pytest.approx(law.of("dense") / law.of(one["plan"]), rel=0.021)
        ratios = sorted(pair["dense"] / pair["routed"] for pair in facts["paired"][one["plan"]])
        assert (one["timed_speedup"], len(ratios)) == (ratios[1], 3)
        assert ratios[0] < law.of("dense") / law.of(one["plan"]) < ratios[2], "each comes first in some pairs"


def test_a_busy_device_is_told(law: Law, capsys: Capture) -> None:
    """Steps beside finalists take longer than the fit of the probes says: another program has begun. Plans that no
    longer reach the target are left out, by the law as it is then."""
    law.watch = lambda: setattr(law, "fixed", 2.0 if law.calls > 15 else 0.25)
    assert tune_cli(*SCRATCH, "--target-speedup", "1.09", "--edges", "3", *FAST) == 0
    shown = capsys.readouterr().out
    (note,) = [line for line in shown.splitlines() if "something else may use this device" in line]
    facts = measurements(OUT)
    speedups = {name: law.of("dense") / law.of(name) for name in facts["paired"]}
    chosen = next(one for one in facts["result"]["finalists"] if one["plan"] == facts["result"]["chosen"])
    assert f"was timed at {speedups[chosen['plan']]:.2f} times" in note
    assert {one["plan"] for one in facts["result"]["finalists"]} == {n for n, s in speedups.items() if s >= 1.09}
    assert min(speedups.values()) < 1.09 <= speedups[chosen["plan"]]
    (left,) = [line for line in shown.splitlines() if "timed beside dense they are less than 1.09 times" in line]
    assert left.count(" over ") >= sum(speedup < 1.09 for speedup in speedups.values())


def test_a_target_that_no_timed_plan_reaches(law: Law, capsys: Capture) -> None:
    law.watch = lambda: setattr(law, "fixed", 20.0 if law.calls > 15 else 0.25)
    assert tune_cli(*SCRATCH, "--target-speedup", "1.05", "--edges", "3", *FAST) == 2
    best = max(law.of("dense") / law.of(name) for name in measurements(OUT)["paired"])
    assert f"has steps {best:.2f} times as fast as dense" in capsys.readouterr().err
    assert not (OUT / "tread_config.json").exists()


def test_a_device_that_was_busy_is_told(law: Law, capsys: Capture) -> None:
    """Steps of the probes took longer than those of finalists: another program has ended."""
    law.watch = lambda: setattr(law, "fixed", 0.25 if law.calls > 15 else 20.0)
    assert tune_cli(*SCRATCH, "--target-speedup", "1.005", "--edges", "3", *FAST) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "something else may use this device" in line]
    assert "where the fit says 1.0" in note


def test_a_fit_that_misses_is_told(law: Law, capsys: Capture) -> None:
    """Even where no plan reaches the target; the second of five plans is slow in each of its rounds."""
    law.watch = lambda: setattr(law, "fixed", 9.0 if law.calls in (2, 9, 12) else 0.25)
    assert tune_cli(*SCRATCH, "--target-speedup", "99", "--edges", "3", *FAST) == 2
    shown = capsys.readouterr().out
    error = measurements(OUT)["result"]["cost"]["error"]
    assert f"The fit misses the time of a plan by {error:.0%}: something else may use this device" in shown


def test_windows_that_save_nothing(law: Law, capsys: Capture) -> None:
    law.window = 10.0
    assert tune_cli(*SCRATCH, "--pareto", "--edges", "3", *FAST) == 2
    assert "no window within the rules saves time on this machine: train dense." in capsys.readouterr().err


def test_times_that_are_worthless_advise_nothing(law: Law, capsys: Capture) -> None:
    """The steps of all but the dense plan were disturbed, in each of their rounds."""
    law.watch = lambda: setattr(law, "fixed", 0.25 if law.calls in (1, 10, 11) else 5.0 + law.calls)
    assert tune_cli(*SCRATCH, "--pareto", "--edges", "3", *FAST) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "train dense" not in said
    assert "saves time by these figures, which are not to be trusted: tune again, into another folder" in said


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.depth=4"], "the model has 4 layers: a window that leaves the first layer, the last and four in all"),
        (["model.mlp_ratio=1e13"], "not enough memory on this machine"),
        (["train.batch_size=2000"], "the data is too small to measure on: 1797 samples of one size"),
        (["--start-steps", "0"], "dropping tokens changes no prediction of this model"),
        (["--ratios", "0.75"], "--ratios has none of at most 0.5"),
        (["--ratios", "1.5"], "--ratios is [1.5]; give one to 5 fractions"),
        (["--edges", "1"], "--edges is 1; it must be at least 2"),
        (["--budget-minutes", "0"], "--budget-minutes is 0.0; it must be a number of minutes"),
        (["--verify", "1", "validation.samples=0"], "--verify compares validation losses, and validation.samples is 0"),
        (["--out", "file/x"], "cannot write to 'file/x'"),
        (["modle=x"], "there is no setting modle"),
    ],
    ids=["shallow", "memory", "data", "fresh", "ceiling", "ratio", "edges", "budget", "verify", "folder", "setting"],
)
def test_bad_input_is_one_sentence(law: Law, capsys: Capture, settings: list[str], sentence: str) -> None:
    Path("file").write_text("")
    assert tune_cli(*SCRATCH, "--target-speedup", "1.05", "--edges", "3", *FAST, *settings) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("tread autotune: ")
    assert sentence in error
    assert len(error) < 520


def test_a_ratio_above_the_ceiling_is_left_out_and_said(law: Law, capsys: Capture) -> None:
    given = ["--target-speedup", "1.02", "--edges", "3", "--start-steps", "2", "--ratios", "0.5,0.75"]
    assert tune_cli(*SCRATCH, *given) == 0
    assert "--ratios 0.75 left out: the rules allow at most 0.5 here" in capsys.readouterr().out
    assert {name.rpartition("@")[2] for name in measurements(OUT)["losses"]} == {"0.5"}


def test_a_trained_run_needs_no_start(law: Law, tmp_path: Path, capsys: Capture) -> None:
    """Sensitivity of its averaged weights."""
    run = train(tmp_path / "run", "model.depth=8", "train.steps=4", "optimizer.warmup_steps=0", "validation.samples=0")
    assert tune_cli(*SCRATCH, "--target-speedup", "1.02", "--edges", "3", *FAST, f"resume={run}") == 0
    shown = capsys.readouterr().out
    assert f"resumed from {run}" in shown
    assert "dense start" not in shown


def test_one_goal_is_needed(capsys: Capture) -> None:
    assert tune_cli(*SCRATCH) == 2
    assert "one of the arguments --target-speedup --max-loss-gap --pareto is required" in capsys.readouterr().err
    assert tune_cli(*SCRATCH, "--target-speedup", "0.9") == 2
    assert "--target-speedup is 0.9; it must be above 1" in capsys.readouterr().err


def test_nothing_is_compiled_in_timed_steps(law: Law, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are compiled for the lengths of all timed plans before the first one is timed; sensitivity is eager."""
    compiled, seen = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda *given, **options: compiled(*given, **options, backend="eager"))
    torch._dynamo.reset()
    counters["stats"].clear()
    law.watch = lambda: seen.append(counters["stats"]["unique_graphs"])
    given = [*SCRATCH, "train.compile=true", "--target-speedup", "1.05", "--edges", "3", "--start-steps", "3"]
    assert tune_cli(*given, "--ratios", "0.25,0.5") == 0
    assert "a first step that compiles layers for 3 lengths: 64, 48 and 32 tokens" in capsys.readouterr().out
    assert len(seen) == law.calls >= 15
    assert seen[0] >= 3
    assert set(seen) == {counters["stats"]["unique_graphs"]}
