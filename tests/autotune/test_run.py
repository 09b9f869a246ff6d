"""`tread autotune` end to end on tiny models, with the time of a step by a known law."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.autotune.tuned import FAST, SCRATCH, Law, config_file, gap_of, measurements, tune_cli, written
from tests.report.conftest import Tune
from tests.tiny.runs import forget, train
from tread.autotune.cost import routes_of
from tread.autotune.goal import Goal
from tread.autotune.rules import Rules
from tread.autotune.run import Options, autotune
from tread.autotune.text import unreached
from tread.autotune.verify import FALLS_APART, standing
from tread.cli import main
from tread.errors import ConfigError
from tread.routing.plan import RoutePlan

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]
OUT = Path("autotune/train")


def plans_by_hand(facts: dict[str, Any], law: Law) -> list[tuple[float, float, str]]:
    """Speed-up by the law, sum of measured gaps, and name, of every plan that can be made of measured windows."""
    rules = Rules(depth=8, tokens=64, adapts=False)
    dense = law.fixed + 8 * (law.linear + law.square)
    windows = [name for name in facts["losses"] if " " not in name]
    found = []
    for some in [*combinations(windows, 1), *combinations(windows, 2)]:
        routes = sorted((routes_of(name)[0] for name in some), key=lambda route: route.start_layer_idx)
        overlap = len(routes) == 2 and routes[0].end_layer_idx >= routes[1].start_layer_idx
        if overlap or rules.broken(routes):
            continue
        seconds = law.fixed + law.window * len(routes) + 8 * (law.linear + law.square)
        for route in routes:
            kept, layers = 1 - route.selection_ratio, route.end_layer_idx - route.start_layer_idx + 1
            seconds -= layers * (law.linear * (1 - kept) + law.square * (1 - kept**2))
        gap = sum(max(0.0, gap_of(facts["losses"][name])) for name in some)
        found.append((dense / seconds, gap, " ".join(sorted(some, key=lambda name: int(name.split("..")[0])))))
    return found


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
    assert "rules: windows start at layer 2 or later" in shown
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
    front = [{"plan": "2..5@0.5", "speedup": 1.5, "gap": 0.04}, {"plan": "4..5@0.25", "speedup": 1.05, "gap": 0.013}]
    assert unreached(Goal(gap=0.01), front, fastest=False) == (
        "no plan within the rules reaches a loss gap of at most 1.00%: the gentlest there is, 0.25 over 4..5, has "
        "steps 1.05 times as fast as dense at a loss gap of 1.30%. Ask for that; all measurements are kept."
    )


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
    assert "no plan within the rules" in (OUT / "report.html").read_text()


def test_a_busy_device_is_told(law: Law, capsys: Capture) -> None:
    """Steps of finalists take longer than the fit of the probes says: another program has begun."""
    law.watch = lambda: setattr(law, "fixed", 2.0 if law.calls > 15 else 0.25)
    assert tune_cli(*SCRATCH, "--target-speedup", "1.05", "--edges", "3", *FAST) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "something else may use this device" in line]
    chosen = next(one for one in measurements(OUT)["result"]["finalists"])
    assert f"was timed at {chosen['timed_speedup']:.2f} times" in note
    assert chosen["timed_speedup"] < 1


def test_windows_that_save_nothing(law: Law, capsys: Capture) -> None:
    law.window = 10.0
    assert tune_cli(*SCRATCH, "--pareto", "--edges", "3", *FAST) == 2
    assert "no window within the rules saves time on this machine" in capsys.readouterr().err


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
    from tread.autotune.subject import Subject

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


def test_the_budget_ends_the_sensitivity(law: Law) -> None:
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


def test_other_settings_are_another_tuning(law: Law, capsys: Capture) -> None:
    goal = ["--target-speedup", "1.05", "--edges", "3", *FAST]
    assert tune_cli(*SCRATCH, *goal) == 0
    assert tune_cli(*SCRATCH, *goal, "train.batch_size=8") == 2
    assert "has measurements of something else (train.batch_size: 4 -> 8)" in capsys.readouterr().err
    assert tune_cli(*SCRATCH, *goal, "output_dir=elsewhere", "log.every=7") == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.depth=4"], "the model has 4 layers: a window that leaves the first two"),
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


def test_a_longer_start_measures_losses_again_and_times_nothing(law: Law, capsys: Capture) -> None:
    given = ["--target-speedup", "1.05", "--edges", "3", "--ratios", "0.25,0.5"]
    assert tune_cli(*SCRATCH, *given, "--start-steps", "0") == 2
    assert tune_cli(*SCRATCH, *given, "--start-steps", "3") == 0
    assert law.calls == 15 + len(measurements(OUT)["result"]["finalists"])
    windows = [name for name in measurements(OUT)["losses"] if " " not in name]
    assert law.asked == 2 * len(windows) + len(measurements(OUT)["losses"]) - len(windows)


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


def test_a_fine_tune(law: Law, tune: Tune, capsys: Capture) -> None:
    """A LoRA on FLUX: no ratio above an adapter's, the schedule of the config stays, and the routes run."""
    schedule = {"warmup_steps": 2, "cooldown_fraction": 0.25}
    route = {"selection_ratio": 0.3, "start_layer_idx": 1, "end_layer_idx": 1}
    config = tune(
        "flux", tread_config={"routes": [route], "schedule": schedule}, max_train_steps=4, validation_prompt=None
    )
    assert tune_cli(config_file(config), "--target-speedup", "1.01") == 0
    shown = capsys.readouterr().out
    facts = measurements(Path("autotune/c"))
    assert set(facts["losses"]) == {"2..2@0.25", "2..2@0.4", "3..3@0.25", "3..3@0.4"}
    assert set(facts["result"]["cost"]["layers"]) == {"transformer_blocks", "single_transformer_blocks"}
    assert "at most 0.4 is dropped while an adapter is trained" in shown
    assert "the schedule runs the last 25% of the steps dense" in shown
    assert "dense start" not in shown
    told = json.loads(Path("autotune/c/tread_config.json").read_text())["tread_config"]
    assert told["schedule"] == schedule
    command = next(line for line in shown.splitlines() if line.startswith("train with: tread finetune c.json"))
    forget()
    main([*command.removeprefix("train with: tread ").split(), "output_dir=run"])
    record = json.loads(Path("run/run.json").read_text())
    assert record["facts"]["tread_config"]["routes"] == told["routes"]


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


def test_a_model_to_fine_tune_that_is_too_shallow(law: Law, tune: Tune, capsys: Capture) -> None:
    assert tune_cli(config_file(tune("sd3")), "--pareto") == 2
    assert "the model has 4 layers" in capsys.readouterr().err


def test_too_few_images(law: Law, tune: Tune, capsys: Capture) -> None:
    assert tune_cli(config_file(tune("flux", train_batch_size=7)), "--pareto") == 2
    assert "6 samples of one size to train on, and a measurement needs a batch of 7" in capsys.readouterr().err


def test_a_gpu_that_is_too_small(law: Law, tune: Tune, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's error, wherever it comes from, names what the config could change; measurements stay."""
    from tread.training.loop import Session

    step, taken = Session.step, []

    def failing(session: Session, *arguments: Any) -> Any:
        taken.append(1)
        if len(taken) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(session, *arguments)

    monkeypatch.setattr(Session, "step", failing)
    assert tune_cli(config_file(tune("flux")), "--pareto") == 2
    error = capsys.readouterr().err
    assert "not enough memory on" in error
    assert "set base_model_precision to 'int8'" in error
    assert sum(map(len, measurements(Path("autotune/c"))["seconds"].values())) == 3


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
