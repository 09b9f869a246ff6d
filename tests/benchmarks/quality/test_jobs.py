"""Arms are configs of the product; what is asked of a run, and how long it takes, is known beforehand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality.arms import ARMS, BY_NAME, SCALES, arm_of, config_of
from benchmarks.quality.jobs import COMPILE_SECONDS, in_order, kind_of, looks, missing_ways, plan, weights_file
from benchmarks.quality.results import RESULTS, Results
from benchmarks.quality.run import blank, steps_of, work
from benchmarks.quality.studies import describe
from tests.programs import ROOT
from tests.tiny.quality import SMOKE, job_of, spec_of
from tread.errors import ConfigError
from tread.pretrain.config import compose
from tread.routing.plan import RoutePlan


def test_every_arm_is_a_config_of_its_own(prepared: Path) -> None:
    assert len(BY_NAME) == len(ARMS)
    plans = set()
    for arm in ARMS:
        config = config_of(arm, 0, SCALES["full"], prepared / "data", steps=100)
        assert (config.model.tread_config is None) == (arm.ratio == 0)
        assert arm.ideal_speedup(config, 256) >= 1
        optimizer = config.optimizer
        plans.add(
            json.dumps([config.model.tread_config, config.model.width, optimizer.learning_rate, optimizer.schedule])
        )
    assert len(plans) == len(ARMS)
    rates = [config_of(arm, 0, SCALES["full"], prepared, steps=1).optimizer.learning_rate for arm in ARMS[:6]]
    assert rates == [6e-4, 6e-4, 1.2e-3, 1.2e-3, 3e-4, 3e-4]
    assert [arm.name for arm in ARMS[2:4]] == ["dense-0.0012", "routed-0.0012"]
    routed = config_of(BY_NAME["routed"], 0, SCALES["full"], prepared, steps=100)
    assert round(BY_NAME["routed"].ideal_speedup(routed, 256), 2) == 1.44  # as `tread plan` says
    assert round(BY_NAME["cooldown-20"].ideal_speedup(routed, 256), 2) == 1.32  # a fifth of the steps has none


def test_windows_are_an_arm_by_their_name(prepared: Path) -> None:
    arm = arm_of("0.6@6..9+0.4@2..5")
    routes = config_of(arm, 0, SCALES["full"], prepared, steps=100).model.tread_config
    assert routes is not None
    assert [str(route) for route in RoutePlan.from_config(routes).routes] == ["route 2..5 at 0.4", "route 6..9 at 0.6"]
    assert describe(arm) == "0.4 over 2..5 and 0.6 over 6..9"
    assert kind_of(arm) == kind_of(arm_of("0.6@2..5+0.4@6..8")) != kind_of(arm_of("0.6@2..5"))
    assert arm_of("routed") is arm_of("0.5@2..8") is BY_NAME["routed"]  # one arm is not run under two names
    assert arm_of(".60@2..8") is BY_NAME["ratio-0.6"]
    assert arm_of("0.5@2..6") is BY_NAME["layers-2-6"]
    assert arm_of("0.40@2..5+.6@6..9") == arm
    assert arm.name == "0.4@2..5+0.6@6..9"
    for name in ("rooted", "0.5@2", "1.5@2..8", "0.5@2..8+", "-0.5@2..8"):
        with pytest.raises(ConfigError, match="or windows such as"):
            arm_of(name)


def test_the_recipe_has_the_settings_of_the_headline(prepared: Path) -> None:
    ours = config_of(BY_NAME["routed"], 0, SCALES["full"], prepared, steps=3000)
    recipe = compose([str(ROOT / "recipes" / "cifar10-s-2.yaml"), "data.path=somewhere"])
    assert (recipe.optimizer, recipe.ema, recipe.objective) == (ours.optimizer, ours.ema, ours.objective)
    same = "batch_size", "micro_steps", "compile", "class_dropout", "checkpointing", "steps"
    assert [getattr(recipe.train, name) for name in same] == [getattr(ours.train, name) for name in same]
    assert recipe.data == {"name": "images", "path": "somewhere", "size": 32, "flip": True}
    sizes = [f"model.{name}={value}" for name, value in (("depth", 12), ("width", 16), ("heads", 2))]
    small = compose([str(ROOT / "recipes" / "cifar10-s-2.yaml"), "data.path=somewhere", *sizes])
    model = replace(ours.model, width=16, heads=2)
    from tread.pretrain.build import build_model

    first, second = (build_model(one, (3, 32, 32), 10, checkpointing=False) for one in (small.model, model))
    assert first.state_dict().keys() == second.state_dict().keys()
    assert first.grid == second.grid == (16, 16)
    for config in (small.model, model):
        assert config.tread_config is not None
    plans = [first.route(one.tread_config).plan for one in (small.model, model) if one.tread_config is not None]
    assert plans[0] == plans[1]


def test_steps_of_a_cool_down(tmp_path: Path) -> None:
    results = Results(tmp_path)
    job = job_of("cooldown-20", seconds=30)
    with pytest.raises(ValueError, match="run those first, or give --steps"):
        steps_of(BY_NAME["cooldown-20"], job, results)
    for name, speed in (("dense", 20.0), ("routed", 40.0)):
        results.write(name, blank(job_of(name)) | {"status": "done", "steps_per_second": speed})
    steps = steps_of(BY_NAME["cooldown-20"], job, results)
    assert steps is not None
    assert 0.8 * steps / 40 + 0.2 * steps / 20 == pytest.approx(30, abs=0.05)
    assert steps_of(BY_NAME["cooldown-20"], replace(job, steps=7), results) == 7
    assert steps_of(BY_NAME["routed"], job, results) is None


def test_ways_to_sample() -> None:
    every = ("cfg", "sg", "cfg+sg", "ag", "ag+sg")

    def names(arm: str, at: str, **changes: object) -> list[str]:
        return [guide.name for guide in looks(BY_NAME[arm], job_of(arm, **changes)).get(at, [])]

    assert names("dense", "end", guides=every) == ["unguided", "cfg", "ag"]
    assert names("dense", "equal-steps") == []
    assert names("routed", "end", guides=every, marks=()) == ["unguided", "cfg", "sg", "cfg+sg"]
    assert names("routed", "mark") == names("routed", "equal-steps") == ["unguided"]
    assert names("ratio-0.25", "end") == ["unguided"]
    assert names("dense", "annealed") == []
    assert names("dense", "annealed", anneal=0.1, guides=every) == ["unguided"]
    assert names("routed-0.0003", "end") == ["unguided", "cfg"]
    assert names("routed-0.0003", "equal-steps") == []


def test_all_runs_are_made_before_any_is_guided(tmp_path: Path) -> None:
    results, jobs = Results(tmp_path), [job_of(arm) for arm in ("dense", "dense-0.0012", "dense-0.0003")]
    results.write(jobs[0].name, {"status": "done"})
    asked = []
    for job in in_order(jobs, results):
        asked.append((job.arm, job.guides))
        if job.arm != "dense-0.0003":  # that one does not fit
            results.write(job.name, {"status": "done"})
    assert asked == [("dense-0.0012", ()), ("dense-0.0003", ()), ("dense", ("cfg",)), ("dense-0.0012", ("cfg",))]


def test_what_needs_an_earlier_model_is_not_asked_of_a_run_without_one(found: Results, tmp_path: Path) -> None:
    job = job_of("dense", guides=("cfg", "ag"))
    kept = [weights_file(tmp_path, job, at) for at in ("end", "mark")]
    kept[0].parent.mkdir()
    asked = []
    for path in kept:
        path.touch()
        asked.append([guide.name for guide in missing_ways(job, found, tmp_path)])
    assert asked == [[], ["ag"]]


def test_what_does_not_fit_is_not_begun(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert work(spec_of(prepared, tmp_path, job_of("dense"), seconds=2.0)) == 0
    assert "needs about" in capsys.readouterr().out
    assert not (tmp_path / RESULTS).exists()


def test_a_plan_says_that_its_budget_is_too_small(prepared: Path, tmp_path: Path) -> None:
    needs = float(plan(spec_of(prepared, tmp_path, job_of("dense")), SMOKE).splitlines()[-1].split()[2])
    short = plan(spec_of(prepared, tmp_path, job_of("dense"), seconds=needs - 5), SMOKE).splitlines()
    assert short[-1].endswith("s: what does not fit is not begun; raise --budget-minutes")
    assert plan(spec_of(prepared, tmp_path, job_of("dense"), seconds=needs + 5), SMOKE).splitlines() == short[:-1]


def test_compiling_takes_time_too(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiling, kinds = replace(SMOKE, compile=True), ("dense", "l1-1", "layers-1-7", "cooldown-10", "cooldown-20")
    spec = spec_of(prepared, tmp_path, *(job_of(arm, marks=(), guides=()) for arm in kinds))
    without, with_it = (
        [float(line.split()[1]) for line in plan(spec, scale).splitlines()[1:-1]] for scale in (SMOKE, compiling)
    )
    added = [round((more - less) / COMPILE_SECONDS) for less, more in zip(without, with_it, strict=True)]
    assert added == [1, 1, 0, 1, 0]
    monkeypatch.setitem(SCALES, "smoke", compiling)
    assert work(spec_of(prepared, tmp_path, job_of("dense"), seconds=COMPILE_SECONDS)) == 0
    assert "needs about" in capsys.readouterr().out
    assert not (tmp_path / RESULTS).exists()
