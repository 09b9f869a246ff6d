"""The quality experiment at tiny size: what it trains is what the product trains, and its figures are the product's."""

import gc
import io
import json
import shutil
import tarfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.quality import run as running
from benchmarks.quality.__main__ import main
from benchmarks.quality.arms import ARMS, BY_NAME, ENDLESS, SCALES, config_of
from benchmarks.quality.images import Cifar10, load, mosaic, pack, tiles, unpack
from benchmarks.quality.jobs import COMPILE_SECONDS, Job, Spec, looks, missing_ways, plan, weights_file
from benchmarks.quality.judge import Judge, by_class, extract, load_judge_network, read_reference_facts
from benchmarks.quality.report import guidance_table, report
from benchmarks.quality.results import GRIDS, RESULTS, Results, read_grids, run_name, snapshot
from benchmarks.quality.run import blank, check_compiled, make_run, run, steps_of, work
from benchmarks.quality.training import Trial
from PIL import Image

from tread.data.base import DataError
from tread.evaluate.evaluate import compare
from tread.evaluate.statistics import Tally
from tread.routing import noise
from tread.train.compiling import Attempt, Compiled
from tread.train.config import compose
from tread.train.job import make_accelerator
from tread.train.loop import Session

ROOT = Path(__file__).resolve().parents[2]
SMOKE = SCALES["smoke"]
CPU = torch.device("cpu")
SECONDS = 0.8
"""Of the routed run."""


def pictures(count: int, seed: int) -> np.ndarray:
    """(N, 32, 32, 3), smooth enough that their features differ."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), np.uint8)
    return coarse.repeat(8, 1).repeat(8, 2)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with 200 training and 100 test images."""
    folder = tmp_path_factory.mktemp("quality")
    (folder / "parts").mkdir()
    for split, count in (("train", 200), ("test", 100)):
        Image.fromarray(mosaic(pictures(count, len(split)))).save(folder / "parts" / f"{split}-0.webp", lossless=True)
        np.save(folder / "parts" / f"{split}-0.npy", np.arange(count) % 10)
    assert main(["prepare", str(folder / "parts"), "--work", str(folder / "work"), "--smoke"]) == 0
    return folder / "work"


@pytest.fixture(scope="module")
def judge(prepared: Path) -> Judge:
    return Judge(prepared, load_judge_network(prepared, CPU, smoke=True), SMOKE)


def job_of(arm: str, **changes: object) -> Job:
    return replace(Job(arm=arm, seed=0, seconds=0.3, steps=None, marks=(0.1,), guides=("cfg",)), **changes)  # pyright: ignore[reportArgumentType]


def spec_of(prepared: Path, out: Path, *jobs: Job, seconds: float = 600.0) -> Spec:
    return Spec(jobs=jobs, scale="smoke", work=str(prepared), out=str(out), resume=(), ends=time.time() + seconds)


@pytest.fixture(scope="module")
def found(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Dense and routed, as the worker makes them."""
    out = tmp_path_factory.mktemp("found")
    shutil.rmtree(prepared / "weights", ignore_errors=True)
    jobs = job_of("dense"), job_of("routed", seconds=SECONDS, marks=(0.1,)), job_of("dense", seconds=SECONDS)
    # the dense run of the same seconds is put down as one of 5 steps, which the routed one then stops at
    results = Results(out)
    dense = blank(jobs[2]) | {"status": "done", "steps": 5, "steps_per_second": 3.0}
    results.write(jobs[2].name, dense)
    assert work(spec_of(prepared, out, *jobs[:2])) == 0
    results = Results(out)
    del results.runs[jobs[2].name]
    results.write(jobs[1].name, results.runs[jobs[1].name])
    return results


def test_images_survive_packing(tmp_path: Path) -> None:
    images, test = pictures(200, 0)[..., ::-1], pictures(100, 1)
    labels = np.arange(200) % 10
    package = tmp_path / "package.tgz"
    with tarfile.open(package, "w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))

        for number in range(1, 6):  # five batches, of which the first has all the images here
            part = images if number == 1 else np.zeros_like(test)
            file = io.BytesIO()
            Image.fromarray(part.reshape(len(part), -1, 3)).save(file, "png", compress_level=1)
            add(f"data_batch_{number}.png", file.getvalue())
        file = io.BytesIO()
        Image.fromarray(test.reshape(100, -1, 3)).save(file, "png")
        add("test_batch.png", file.getvalue())
        add("train_lables.json", json.dumps([*labels.tolist(), *[7] * 400]).encode())
        add("test_lables.json", json.dumps([3] * 100).encode())
    parts = pack(package, tmp_path / "parts", size=100)
    assert [path.stem for path in parts][:3] == ["train-0", "train-1", "train-2"]
    assert (tiles(parts[1]) == images[100:]).all()
    unpack(tmp_path / "parts", tmp_path / "data")
    read, read_labels = load(tmp_path / "data", "train")
    assert (read[: len(images)] == images).all()
    assert (read_labels[: len(images)] == labels).all()
    assert (load(tmp_path / "data", "test")[0] == test).all()


def test_the_dataset_is_train_then_test(prepared: Path) -> None:
    data = Cifar10(prepared / "data")
    assert (data.trained, data.held_out, len(data)) == (200, 100, 300)
    x, label = data[203]
    assert label == 3
    expected = torch.from_numpy(pictures(100, 4)[3]).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(x, expected)


def test_every_arm_is_a_config_of_its_own(prepared: Path) -> None:
    assert len(BY_NAME) == len(ARMS)
    plans = set()
    for arm in ARMS:
        config = config_of(arm, 0, SCALES["full"], prepared / "data", steps=100)
        assert (config.model.tread_config is None) == (arm.ratio == 0)
        assert arm.ideal_speedup(config, 256) >= 1
        plans.add(json.dumps([config.model.tread_config, config.model.width]))
    assert len(plans) == len(ARMS)
    routed = config_of(BY_NAME["routed"], 0, SCALES["full"], prepared, steps=100)
    assert round(BY_NAME["routed"].ideal_speedup(routed, 256), 2) == 1.44  # as `tread plan` says


def test_the_recipe_has_the_settings_of_the_headline(prepared: Path) -> None:
    ours = config_of(BY_NAME["routed"], 0, SCALES["full"], prepared, steps=3000)
    recipe = compose([str(ROOT / "recipes" / "cifar10-s-2.yaml"), "data.path=somewhere"]).config
    assert (recipe.optimizer, recipe.ema, recipe.objective) == (ours.optimizer, ours.ema, ours.objective)
    same = "batch_size", "micro_steps", "compile", "class_dropout", "checkpointing", "steps"
    assert [getattr(recipe.train, name) for name in same] == [getattr(ours.train, name) for name in same]
    assert recipe.data == {"name": "images", "path": "somewhere", "size": 32, "flip": True}
    sizes = [f"model.{name}={value}" for name, value in (("depth", 12), ("width", 16), ("heads", 2))]
    small = compose([str(ROOT / "recipes" / "cifar10-s-2.yaml"), "data.path=somewhere", *sizes]).config
    model = replace(ours.model, width=16, heads=2)
    from tread.train.pretrain import build_model

    first, second = (build_model(one, (3, 32, 32), 10, checkpointing=False) for one in (small.model, model))
    assert first.state_dict().keys() == second.state_dict().keys()
    assert first.grid == second.grid == (16, 16)
    for config in (small.model, model):
        assert config.tread_config is not None
    plans = [first.route(one.tread_config).plan for one in (small.model, model) if one.tread_config is not None]
    assert plans[0] == plans[1]


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
    assert [look["at"] for look in entry["snapshots"]] in (
        ["mark", "equal-steps", "end"],
        ["equal-steps", "mark", "end"],
    )
    equal, end, mark = (snapshot(entry, at) for at in ("equal-steps", "end", "mark"))
    assert equal is not None
    assert end is not None
    assert mark is not None
    assert equal["steps"] == 5
    assert end["steps"] == entry["steps"] > 5
    assert (mark["due"], equal["due"], end["due"]) == (0.1, None, SECONDS)
    assert set(end["samples"]) == {"unguided", "cfg"}
    assert [look["samples"]["unguided"]["count"] for look in (mark, equal, end)] == [100, 200, 200]
    times = [point["seconds"] for point in entry["curve"]]
    assert times == sorted(set(times))
    grids = read_grids(found.folder / GRIDS)
    assert grids[f"{run_name('routed', 0, SECONDS)}-end"].shape == (100, 32, 32, 3)


def test_figures_are_those_of_tread_eval(prepared: Path, judge: Judge) -> None:
    train, test = (load(prepared / "data", split)[0] for split in ("train", "test"))
    theirs = []
    for images in (test, train):
        tally = Tally("Pixels", len(images))
        tally.add(judge.extractor(list(images)), 0)
        theirs.append(tally.statistics())
    shown = judge.vectors.numpy()
    found = judge.figures(extract(judge.extractor, test))
    expected = compare(theirs[0], theirs[1]).metrics
    assert found["FD-Pixels"] == pytest.approx(expected["FD-Pixels"], rel=1e-6)
    few = compare(theirs[0], replace(theirs[1], vectors=shown)).metrics
    assert (found["precision"], found["recall"]) == (few["precision-Pixels"], few["recall-Pixels"])
    assert found["KD-Pixels"] == few["KD-Pixels"]


def test_the_first_few_have_the_figures_of_no_more(prepared: Path, judge: Judge, found: Results) -> None:
    features = extract(judge.extractor, load(prepared / "data", "train")[0])
    features[: SMOKE.few : 2] += 3  # half of the first few are far from everything
    many, few = judge.figures(features), judge.figures(features[: SMOKE.few])
    for name in ("FD-Pixels", "precision", "recall"):
        assert many[f"{name} few"] == few[name] == few[f"{name} few"]
        assert many[name] != few[name]
    routed = replace_samples(found, unguided=many, cfg=few)
    lines = [line.split(" | ") for line in guidance_table(routed, "FD-Pixels").splitlines() if "| routed" in line]
    assert [line[1] for line in lines] == ["unguided", "cfg"]
    assert lines[0][4:7] == lines[1][4:7]


def replace_samples(results: Results, **samples: dict[str, float]) -> Results:
    """The routed run of some results with other figures at its end."""
    name = run_name("routed", 0, SECONDS)
    copied = Results(results.folder.with_name("nowhere"))
    copied.merge(json.loads(json.dumps(results.facts)))
    end = snapshot(copied.runs[name], "end")
    assert end is not None
    end["samples"] = {name: figures | {"gflops_per_sample": 1.0} for name, figures in samples.items()}
    return copied


def test_a_grid_has_a_row_for_each_class() -> None:
    labels = np.arange(200) % 10
    assert by_class(labels.reshape(200, 1))[:, 0].tolist() == np.arange(10).repeat(10).tolist()


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
        task.set_step(step)
        task.loss(task.model.train(), next(task.batches(step)), step, 0)
        kept.append(task.kept_share)
    assert kept == [0.5] * 8 + [1.0] * 2


def test_ways_to_sample(prepared: Path) -> None:
    every = ("cfg", "sg", "cfg+sg", "ag", "ag+sg")
    dense = looks(BY_NAME["dense"], job_of("dense", guides=every), SMOKE, equal=True)
    assert [guide.name for guide, _ in dense["end"]] == ["unguided", "cfg", "ag"]
    assert "equal-steps" not in dense
    routed = looks(BY_NAME["routed"], job_of("routed", guides=every, marks=()), SMOKE, equal=True)
    assert [(guide.name, count) for guide, count in routed["end"]][:2] == [("unguided", 200), ("cfg", 100)]
    assert [guide.name for guide, _ in routed["end"]] == ["unguided", "cfg", "sg", "cfg+sg"]
    short = looks(BY_NAME["ratio-0.25"], job_of("ratio-0.25"), SMOKE, equal=True)
    assert [(guide.name, count) for guide, count in short["end"]] == [("unguided", 100)]


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


def test_what_needs_an_earlier_model_is_not_asked_of_a_run_without_one(found: Results, tmp_path: Path) -> None:
    job = job_of("dense", guides=("cfg", "ag"))
    kept = [weights_file(tmp_path, job, at) for at in ("end", "mark")]
    kept[0].parent.mkdir()
    asked = []
    for path in kept:
        path.touch()
        asked.append([guide.name for guide, _ in missing_ways(job, SMOKE, found, tmp_path)])
    assert asked == [[], ["ag"]]


def test_weights_that_were_kept_draw_the_same_samples(prepared: Path, found: Results, tmp_path: Path) -> None:
    """What was sampled in training with the average swapped in is what a fresh model draws."""
    shutil.copy(found.folder / RESULTS, tmp_path / RESULTS)
    job = job_of("dense")
    results = Results(tmp_path)
    end = snapshot(results.runs[job.name], "end")
    assert end is not None
    was = end["samples"].pop("cfg")
    results.write(job.name, results.runs[job.name])
    assert work(spec_of(prepared, tmp_path, job)) == 0
    again = snapshot(Results(tmp_path).runs[job.name], "end")
    assert again is not None
    assert again["samples"]["cfg"]["FD-Pixels"] == pytest.approx(was["FD-Pixels"], rel=1e-9)


def test_what_does_not_fit_is_not_begun(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert work(spec_of(prepared, tmp_path, job_of("dense"), seconds=2.0)) == 0
    assert "needs about" in capsys.readouterr().out
    assert not (tmp_path / RESULTS).exists()


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


def test_a_run_whose_compiling_failed_counts_for_nothing(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = replace(SMOKE, compile=True)
    config = config_of(BY_NAME["dense"], 0, scale, prepared / "data", steps=4)
    task = Trial(config, make_accelerator(config), prepared, scale)
    task.compile()
    check_compiled(task, scale)
    own, attempt = noise.two_uniforms, Attempt(print)
    with monkeypatch.context() as patched:
        patched.setattr(noise, "draw_two", Compiled(own, own, attempt))
        check_compiled(task, scale)
        attempt.fail(RuntimeError("no compiler"))
        with pytest.raises(RuntimeError, match="compiling failed"):
            check_compiled(task, scale)
    compiled = task.model.blocks[-1]._compiled_call_impl
    assert isinstance(compiled, Compiled)
    compiled.attempt.fail(RuntimeError("no compiler"))
    with pytest.raises(RuntimeError, match="compiling failed"):
        check_compiled(task, scale)


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
        assert isinstance(compiled, Compiled)
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


def test_the_collector_leaves_the_clock_alone(
    prepared: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, race = [], running.race

    def watched(*arguments: Any) -> None:
        frozen.append(gc.get_freeze_count())
        race(*arguments)

    monkeypatch.setattr(running, "race", watched)
    job, before = job_of("ratio-0.25", seconds=0.05, marks=(), guides=()), gc.get_freeze_count()
    make_run(BY_NAME["ratio-0.25"], job, SMOKE, prepared, Results(tmp_path), judge, blank(job))
    assert frozen[0] > before + 10_000
    assert gc.get_freeze_count() == 0


def test_the_routed_run_needs_the_dense_one(prepared: Path, judge: Judge, tmp_path: Path) -> None:
    results, job = Results(tmp_path), job_of("routed")
    results.write("other", blank(job_of("dense", seconds=0.5)) | {"status": "done", "steps": 5})
    with pytest.raises(ValueError, match=r"^routed needs the dense run of seed 0 and 0.3 s: run that first$"):
        make_run(BY_NAME["routed"], job, SMOKE, prepared, results, judge, blank(job))


def test_a_reference_of_other_images_is_refused(prepared: Path, tmp_path: Path) -> None:
    parts, moved = prepared.parent / "parts", tmp_path / "work"
    shutil.copytree(prepared, moved, ignore=shutil.ignore_patterns("weights"))
    assert read_reference_facts(moved)["train_images"] == 200
    for kind in ("images", "labels"):
        shutil.copy(moved / "data" / f"train-0.{kind}.npy", moved / "data" / f"train-1.{kind}.npy")
    message = "the reference is of 200 images, and 400 are trained on: prepare again with --weights"
    for make in (run, work):
        with pytest.raises(DataError, match=message):
            make(spec_of(moved, tmp_path, job_of("dense")))
    assert main(["prepare", str(parts), "--work", str(moved)]) == 0
    assert not (moved / "reference.npz").exists()
    with pytest.raises(DataError, match=r"no reference in .*: prepare again with --weights"):
        run(spec_of(moved, tmp_path, job_of("dense")))


def test_a_rehearsal_is_kept_apart(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Spec] = []
    monkeypatch.setattr(running, "run", lambda spec: bool(given.append(spec)) or True)
    for options in ([], ["--rehearse"]):
        assert main(["run", "--work", str(prepared), "--out", str(tmp_path), *options]) == 0
    assert [(spec.scale, Path(spec.out)) for spec in given] == [
        ("smoke", tmp_path),
        ("rehearsal", tmp_path / "rehearsal"),
    ]


def test_results_of_unequal_scale_do_not_join(prepared: Path, tmp_path: Path) -> None:
    for name in ("full", "rehearsal", "smoke"):
        results = Results(tmp_path / name)
        results.facts["machine"] = {"scale": asdict(SCALES[name])}
        results.write("x", {"status": "done"})
    paths = [tmp_path / name / RESULTS for name in ("full", "rehearsal", "smoke")]
    with pytest.raises(ValueError, match="do not join, leave one of them out: validated 5000 and 500; samples 10000"):
        Results(tmp_path / "joined", paths[:2])
    spec = replace(spec_of(prepared, tmp_path / "joined"), resume=(str(paths[2]),))
    assert "x" in spec.results().runs
    with pytest.raises(ValueError, match="do not join"):
        replace(spec, scale="full").results()


def test_a_run_that_fails_does_not_stop_the_others(prepared: Path, tmp_path: Path) -> None:
    jobs = job_of("cooldown-10", marks=(), guides=()), job_of("ratio-0.25", seconds=0.1, marks=(), guides=())
    assert not run(spec_of(prepared, tmp_path, *jobs))
    runs = Results(tmp_path).runs
    assert [runs[job.name]["status"] for job in jobs] == ["failed", "done"]
    assert runs[jobs[0].name]["error"].startswith("ValueError: cooldown-10 needs the speeds")


def test_the_report(found: Results, tmp_path: Path) -> None:
    docs = tmp_path / "results.md"
    shutil.copy(ROOT / "docs" / "results.md", docs)
    report([found.folder / RESULTS], docs, tmp_path / "joined.json")
    page = docs.read_text(encoding="utf-8")
    routed = found.runs[run_name("routed", 0, SECONDS)]
    end = snapshot(routed, "end")
    assert end is not None
    line = next(line for line in page.splitlines() if line.startswith("| routed, equal wall-clock | 0 |"))
    assert f"| {end['samples']['unguided']['FD-Pixels']:.2f} |" in line
    assert "- 0.75 over 2..8, seed 0 (ratio-0.75)" in page
    assert "- 0.5 over 2..8, seed 1 (routed)" in page
    assert "seed 0 (routed)" not in page
    assert (tmp_path / "results" / "quality.png").is_file()
    assert json.loads((tmp_path / "joined.json").read_text())["runs"] == found.runs


def test_results_of_several_calls_join(tmp_path: Path) -> None:
    first, second = Results(tmp_path / "a"), Results(tmp_path / "b")
    first.write("x", {"status": "done", "value": 1})
    second.write("x", {"status": "failed", "value": 2})
    second.write("y", {"status": "begun"})
    joined = Results(tmp_path / "c", [tmp_path / "a" / RESULTS, tmp_path / "b" / RESULTS])
    assert joined.runs == {"x": {"status": "done", "value": 1}, "y": {"status": "begun"}}
