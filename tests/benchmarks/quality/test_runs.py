"""Runs are the product's, stop where they were told, and go on where one failed."""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.autotune import rank
from benchmarks.quality import run as running
from benchmarks.quality.__main__ import main
from benchmarks.quality.arms import ARMS, BY_NAME, ENDLESS, config_of
from benchmarks.quality.jobs import Spec, plan
from benchmarks.quality.judge import Judge
from benchmarks.quality.report import headline_table
from benchmarks.quality.results import GRIDS, NEAREST, RESULTS, Results, known_arms, read_grids, run_name, snapshot
from benchmarks.quality.run import blank, make_run, run, work
from benchmarks.quality.studies import study_rows
from benchmarks.quality.training import Trial, check_fast
from tests.tiny.quality import SECONDS, SMOKE, job_of, spec_of
from tread.kernels.compiling import CompiledLayer
from tread.training.job import make_accelerator
from tread.training.session import Session


def test_looking_does_not_disturb_the_run(prepared: Path, found: Results) -> None:
    """Validation, sampling and the warm-up aside, a run is the product's session step by step."""
    entry = found.runs[run_name("routed", 0, SECONDS)]
    for look in (snapshot(entry, "equal-steps"), snapshot(entry, "end")):
        assert look is not None
        config = config_of(BY_NAME["routed"], 0, SMOKE, prepared / "data", steps=ENDLESS)
        task = Trial(config, make_accelerator(config), prepared, SMOKE)
        session = Session(task, config, task.accelerator)
        task.model.train()
        batches = task.batches(0)
        for step in range(look["steps"]):
            session.step(step, batches)
        with session.averaged():
            assert task.validate()["val_loss"] == look["val_loss"]
        assert sum(look["val_loss_by_time"]) / 4 == pytest.approx(look["val_loss"])  # two samples in each quarter


def test_batches_are_the_products_own(prepared: Path) -> None:
    config = config_of(BY_NAME["dense"], 0, SMOKE, prepared / "data", steps=4)
    task = Trial(config, make_accelerator(config), prepared, SMOKE)
    ours, products = list(task.batches(1)), list(super(Trial, task).batches(1))
    assert len(ours) == len(products) == 3
    for mine, theirs in zip(ours, products, strict=True):
        torch.testing.assert_close(mine, tuple(theirs), rtol=0, atol=0)


def test_a_run_stops_where_it_was_told(found: Results) -> None:
    entry = found.runs[run_name("routed", 0, SECONDS)]
    assert entry["status"] == "done"
    looks = [(look["at"], look["due"], look["steps"]) for look in entry["snapshots"]]
    assert looks == [("mark", 0.1, 2), ("equal-steps", None, 5), ("end", SECONDS, 10)]
    assert set(entry["snapshots"][-1]["samples"]) == {"unguided", "cfg"}
    assert [look["samples"]["unguided"]["count"] for look in entry["snapshots"]] == [200] * 3
    assert [point["steps"] for point in entry["curve"]] == [2, 4, 5, 6, 8, 10]
    assert (entry["steps"], entry["train_seconds"], entry["steps_per_second"]) == (10, SECONDS, 20)
    grids = read_grids(found.folder / GRIDS)
    for look in ("mark-0.1s", "equal-steps", "end"):
        for kind in ("", NEAREST):
            assert grids[f"{run_name('routed', 0, SECONDS)}-{look}{kind}"].shape == (100, 32, 32, 3)


def test_the_last_steps_of_a_cool_down_are_dense(prepared: Path, judge: Judge, tmp_path: Path) -> None:
    results, job = Results(tmp_path), job_of("cooldown-20", steps=10, marks=(), guides=())
    entry = blank(job)
    make_run(BY_NAME["cooldown-20"], job, SMOKE, prepared, results, judge, entry)
    assert entry["steps"] == 10
    config = config_of(BY_NAME["cooldown-20"], 0, SMOKE, prepared / "data", steps=10)
    task = Trial(config, make_accelerator(config), prepared, SMOKE)
    assert task.handle is not None
    kept = []
    for step in range(10):
        task.handle.set_step(step)
        task.loss(task.model.train(), next(task.batches(step)))
        kept.append(task.handle.kept_share)
    assert kept == [0.5] * 8 + [1.0] * 2


def test_a_run_is_annealed_after_its_end(
    prepared: Path, judge: Judge, found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures before it are those of a run that is not; after it, those of the weights at rate zero."""
    stock, rates = Session.step, list[float]()
    weights: list[torch.Tensor] = []

    def step(session: Session, number: int, batches: Iterator[Any], *, rate: float | None = None) -> Any:
        outcome = stock(session, number, batches, rate=rate)
        rates.append(session.optimizer.param_groups[0]["lr"])
        weights[:] = [parameter.detach().clone() for parameter in session.trained]
        return outcome

    monkeypatch.setattr(Session, "step", step)
    job, results = job_of("dense", guides=(), anneal=0.2), Results(tmp_path)
    make_run(BY_NAME["dense"], job, SMOKE, prepared, results, judge, blank(job))
    rate, warm = SMOKE.learning_rate, SMOKE.warmup_steps
    constant = [rate * min(1.0, (step + 1) / warm) for step in range(6)]
    assert rates == pytest.approx([*constant, rate, 0.75 * rate, 0.5 * rate, 0.25 * rate])
    entry, plain = Results(tmp_path).runs[job.name], found.runs[job.name]
    for name in ("status", "steps", "train_seconds", "steps_per_second", "curve"):
        assert entry[name] == plain[name]
    assert [look["val_loss"] for look in entry["snapshots"]] == [look["val_loss"] for look in plain["snapshots"]]
    annealed = snapshot(entry, "annealed")
    assert annealed is not None
    assert (annealed["steps"], annealed["seconds"]) == (10, 0.5)
    config = config_of(BY_NAME["dense"], 0, SMOKE, prepared / "data", steps=ENDLESS)
    task = Trial(config, make_accelerator(config), prepared, SMOKE)
    for parameter, weight in zip(task.model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    with torch.no_grad():
        assert task.validate()["val_loss"] == annealed["val_loss"] != entry["snapshots"][-1]["val_loss"]
    assert f"{job.name}-annealed" in read_grids(tmp_path / GRIDS)
    words = [line.split(" | ")[0] for line in headline_table(Results(tmp_path), "FD-Pixels").splitlines()[2:]]
    assert words == ["| dense", "| dense, annealed"]


def test_a_run_of_several_windows(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "0.25@2..4+0.5@6..8"
    job = job_of(name, marks=(), guides=())
    assert work(spec_of(prepared, tmp_path, job)) == 0
    kept = Results(tmp_path)  # as read back from disk
    assert [arm.name for arm in known_arms(kept)[-2:]] == [ARMS[-1].name, name]
    (row,) = [row for row in study_rows(kept)["windows"] if row["arm"].name == name]
    assert row["label"] == "0.25 over 2..4 and 0.5 over 6..8"
    monkeypatch.setattr(rank, "FIGURE", "FD-Pixels few")
    (arm,) = rank.read_arms([tmp_path / RESULTS], job.seconds)
    assert [(one.selection_ratio, one.start_layer_idx, one.end_layer_idx) for one in arm.routes] == [
        (0.25, 2, 4),
        (0.5, 6, 8),
    ]


def test_ways_are_added_to_a_run_that_is_done(prepared: Path, found: Results, tmp_path: Path) -> None:
    before = found.runs[run_name("dense", 0, 0.3)]
    shutil.copy(found.folder / RESULTS, tmp_path / RESULTS)
    more = job_of("dense", guides=("cfg", "ag"))
    spec = spec_of(prepared, tmp_path, more)
    assert "done" not in plan(spec, SMOKE)
    assert work(spec) == 0
    after = Results(tmp_path).runs[more.name]
    end, was = snapshot(after, "end"), snapshot(before, "end")
    assert end is not None
    assert was is not None
    assert set(end["samples"]) == {"unguided", "cfg", "ag"}
    assert end["samples"]["cfg"] == was["samples"]["cfg"]
    assert end["samples"]["ag"]["FD-Pixels"] != end["samples"]["unguided"]["FD-Pixels"]
    assert "done" in plan(spec, SMOKE)


def test_a_run_that_lacks_nothing_is_let_alone(
    prepared: Path, found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(found.folder / RESULTS, tmp_path / RESULTS)
    monkeypatch.setattr(running, "add_ways", None)
    assert work(spec_of(prepared, tmp_path, job_of("dense"))) == 0


def test_weights_that_were_kept_draw_the_same_samples(prepared: Path, found: Results, tmp_path: Path) -> None:
    """What was sampled in training with the average swapped in is what a fresh model draws."""
    shutil.copy(found.folder / RESULTS, tmp_path / RESULTS)
    job = job_of("dense")
    results = Results(tmp_path)
    end = snapshot(results.runs[job.name], "end")
    assert end is not None
    was = end["samples"].pop("unguided")
    results.write(job.name, results.runs[job.name])
    assert work(spec_of(prepared, tmp_path, job)) == 0
    again = snapshot(Results(tmp_path).runs[job.name], "end")
    assert again is not None
    assert again["samples"]["unguided"]["FD-Pixels"] == pytest.approx(was["FD-Pixels"], rel=1e-9)


def test_a_run_of_another_rate_says_so_and_can_be_guided(prepared: Path, tmp_path: Path) -> None:
    job = job_of("dense-0.0012", seconds=0.05, marks=())
    assert work(spec_of(prepared, tmp_path, job)) == 0
    entry = Results(tmp_path).runs["dense-0.0012-s0-0.05s"]
    assert entry["settings"]["optimizer"]["learning_rate"] == entry["arm"]["learning_rate"] == 0.0012
    end = snapshot(entry, "end")
    assert end is not None
    assert {name: figures["count"] for name, figures in end["samples"].items()} == {"unguided": 200, "cfg": 200}


def test_a_run_that_is_killed_leaves_its_losses(
    prepared: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(judge, "judge", killed)
    job = job_of("dense", marks=())
    with pytest.raises(KeyboardInterrupt):
        make_run(BY_NAME["dense"], job, SMOKE, prepared, Results(tmp_path), judge, blank(job))
    left = Results(tmp_path).runs[job.name]
    assert left["status"] == "begun"
    assert [point["steps"] for point in left["curve"]][-1] == left["steps"] > 0


def test_a_run_whose_compiling_failed_counts_for_nothing(prepared: Path) -> None:
    scale = replace(SMOKE, compile=True)
    config = config_of(BY_NAME["dense"], 0, scale, prepared / "data", steps=4)
    task = Trial(config, make_accelerator(config), prepared, scale)
    fast = task.make_fast()
    check_fast(fast)
    compiled = task.model.blocks[-1]._compiled_call_impl
    assert isinstance(compiled, CompiledLayer)
    compiled.attempt.fail(RuntimeError("no compiler"))
    with pytest.raises(RuntimeError, match="compiling or capturing failed"):
        check_fast(fast)
    fast[0].remove()


@pytest.mark.parametrize("late", [False, True])
def test_a_compiler_that_fails_fails_the_run(
    prepared: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Before the clock starts, or, where a shape that comes later fails, at the next look."""
    raced, race = [], running.race

    def compile_graph(graph: torch.fx.GraphModule, *_: object, **__: object) -> torch.fx.GraphModule:
        if not late:
            raise RuntimeError("no compiler")
        return graph

    def watched(session: Session, *arguments: Any) -> None:
        raced.append(session)
        assert isinstance(session.task, Trial)
        compiled = session.task.model.blocks[0]._compiled_call_impl
        assert isinstance(compiled, CompiledLayer)
        compiled.attempt.fail(RuntimeError("no compiler for this shape"))
        race(session, *arguments)

    torch.compiler.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_graph)
    monkeypatch.setattr(running, "race", watched)
    job, scale = job_of("dense", marks=(), guides=()), replace(SMOKE, compile=True)
    with pytest.raises(RuntimeError, match="a run without it compares with none"):
        make_run(BY_NAME["dense"], job, scale, prepared, Results(tmp_path), judge, blank(job))
    assert bool(raced) == late
    assert not (tmp_path / RESULTS).exists()
    torch.compiler.reset()  # nobody else shall run what was compiled here


@pytest.mark.usefixtures("nothing_frozen")
def test_the_collector_leaves_the_clock_alone(
    prepared: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, race = [], running.race

    def watched(*arguments: Any) -> None:
        frozen.append(gc.get_freeze_count())
        race(*arguments)

    monkeypatch.setattr(running, "race", watched)
    job = job_of("ratio-0.25", seconds=0.05, marks=(), guides=())
    make_run(BY_NAME["ratio-0.25"], job, SMOKE, prepared, Results(tmp_path), judge, blank(job))
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


def test_the_routed_run_needs_the_dense_one(prepared: Path, judge: Judge, tmp_path: Path) -> None:
    results, job = Results(tmp_path), job_of("routed")
    results.write("other", blank(job_of("dense", seconds=0.5)) | {"status": "done", "steps": 5})
    with pytest.raises(ValueError, match=r"^routed needs the run dense of seed 0 and 0.3 s: run that first$"):
        make_run(BY_NAME["routed"], job, SMOKE, prepared, results, judge, blank(job))


def test_the_arms_of_a_pair_are_made_in_two_calls(prepared: Path, tmp_path: Path) -> None:
    """The routed run, made elsewhere, is looked at after the steps of the dense one, whose results it is given."""
    jobs = [job_of(arm, seed=3, guides=()) for arm in ("dense", "routed")]
    assert work(spec_of(prepared, tmp_path / "first", jobs[0])) == 0
    first = Results(tmp_path / "first")
    first.write(jobs[0].name, first.runs[jobs[0].name] | {"steps": 4})  # of the 6 that either makes by this clock
    second = spec_of(prepared, tmp_path / "second", jobs[1])
    assert work(second) == 1, "without the dense run there is nothing to be equal to"
    assert work(replace(second, resume=(str(first.folder / RESULTS),))) == 0
    runs = Results(tmp_path / "second").runs
    assert [runs[job.name]["status"] for job in jobs] == ["done", "done"]
    look = snapshot(runs[jobs[1].name], "equal-steps")
    assert look is not None
    assert (look["steps"], runs[jobs[1].name]["steps"]) == (4, 6)


def test_a_rehearsal_is_kept_apart(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Spec] = []
    monkeypatch.setattr(running, "run", lambda spec: bool(given.append(spec)) or True)
    for options in ([], ["--rehearse"]):
        assert main(["run", "--work", str(prepared), "--out", str(tmp_path), *options]) == 0
    assert [(spec.scale, Path(spec.out)) for spec in given] == [
        ("smoke", tmp_path),
        ("rehearsal", tmp_path / "rehearsal"),
    ]
    assert main(["run", "--work", str(prepared)]) == 0
    assert Path(given[2].out) == prepared / "results", "results lie beside the images they are of"


@pytest.mark.parametrize("command", [["report"], ["speedup"], ["run", "--resume"], ["report", "--grids"]])
def test_results_that_are_not_there_are_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`report` would write a page without them, and `run` would make their runs again."""
    with pytest.raises(SystemExit):
        main([*command, "nowhere.json"])
    assert "there is no file nowhere.json" in capsys.readouterr().err


def test_runs_are_in_the_order_of_their_arms(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Spec] = []
    monkeypatch.setattr(running, "run", lambda spec: bool(given.append(spec)) or True)
    command = ["run", "--work", str(prepared), "--out", str(tmp_path), "--arms", "rate", "dense", "routed", "rate"]
    assert main(command) == 0
    assert [(job.arm, job.equal_to) for job in given[0].jobs] == [
        ("dense-0.0012", None),
        ("routed-0.0012", None),
        ("dense-0.0003", None),
        ("routed-0.0003", None),
        ("dense", None),
        ("routed", "dense"),
    ]
    assert main([*command, "--equal-to", "dense-0.0003"]) == 0
    assert {(BY_NAME[job.arm].is_routed, job.equal_to) for job in given[1].jobs} == {
        (False, None),
        (True, "dense-0.0003"),
    }
    assert main([*command, "0.4@2..9", "--equal-to", "none"]) == 0
    assert given[2].jobs[-1].arm == "0.4@2..9"
    assert {job.equal_to for job in given[2].jobs} == {None}
    assert main([*command, "--equal-to", "routed"]) == 2
    assert "give none, or a dense arm: dense, dense-0.0012, dense-0.0003, b2-dense" in capsys.readouterr().err
    assert main([*command, "rooted"]) == 2
    assert "arm 'rooted': give dense, routed," in capsys.readouterr().err


def test_a_run_that_fails_does_not_stop_the_others(prepared: Path, tmp_path: Path) -> None:
    jobs = job_of("cooldown-10", marks=(), guides=()), job_of("ratio-0.25", seconds=0.1, marks=(), guides=())
    assert not run(spec_of(prepared, tmp_path, *jobs))
    runs = Results(tmp_path).runs
    assert [runs[job.name]["status"] for job in jobs] == ["failed", "done"]
    assert runs[jobs[0].name]["error"].startswith("ValueError: cooldown-10 needs the speeds")
