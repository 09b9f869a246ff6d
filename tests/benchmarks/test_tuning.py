"""The experiment of equal seconds at tiny size, and its parts against independent computations."""

import argparse
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.tuning.__main__ import main
from benchmarks.tuning.arms import CLASSES, SCALES, TUNED, Arm
from benchmarks.tuning.experiment import Experiment
from benchmarks.tuning.model import FluxOfClasses, add_lora, random_captions
from benchmarks.tuning.plan import (
    CAPTURE_SECONDS,
    COMPILE_SECONDS,
    SAMPLES_SECONDS,
    VALIDATE_SECONDS,
    WARM_SECONDS,
    run_seconds,
)
from benchmarks.tuning.report import runs_table, save_figure, verdict
from benchmarks.tuning.run import chosen_arm, chosen_rates
from benchmarks.tuning.training import CAPTION, DROPPED, TIME, Images, Run, losses, steps_within
from tests.autotune.conftest import law
from tests.autotune.tuned import Law
from tests.tiny.quality import pictures
from tread.errors import ConfigError
from tread.routing import noise
from tread.routing.plan import RoutePlan

__all__ = ["law"]
SMOKE = SCALES["smoke"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty training and twenty test images, two and four of each class."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "data").mkdir()
    for split, count in (("train", 40), ("test", 20)):
        np.save(folder / "data" / f"{split}-0.images.npy", pictures(count, seed=len(split)))
        np.save(folder / "data" / f"{split}-0.labels.npy", np.arange(count, dtype=np.uint8) % len(CLASSES))
    return folder


def routed(work: Path, *, ratio: float = 0.5) -> Run:
    arm = Arm.parse(f"lora-{ratio:g}" if ratio else "lora-dense")
    net = FluxOfClasses(SMOKE, random_captions(), seed=0)
    torch.manual_seed(0)
    for parameter in net.parameters():  # not the identity
        parameter.data += 0.05 * torch.randn_like(parameter)
    add_lora(net, 4, ["attn.to_q", "attn.to_v"])
    data = Images.of(work / "data", "train", tuned=True, scale=SMOKE, device=CPU)
    return Run(net, arm.plan(10), data, SMOKE, dense=not ratio, seed=0)


def test_the_base_and_the_arms_see_other_classes(work: Path) -> None:
    base, tuned = (Images.of(work / "data", "train", tuned=tuned, scale=SMOKE, device=CPU) for tuned in (False, True))
    assert (len(base.pixels), len(tuned.pixels)) == (32, 8)
    assert set(tuned.labels.tolist()) == set(TUNED)
    assert not set(base.labels.tolist()) & set(TUNED)


def test_the_loss_is_that_of_kept_pixels(work: Path) -> None:
    run = routed(work)
    batch = next(run.data.batches(SMOKE.batch, 0))
    run.handle.set_step(5)  # between warm-up and cool-down
    loss = run.loss(batch)
    x, labels, where = batch
    labels = labels.masked_fill(noise.uniform(0, CAPTION, where) < DROPPED, len(CLASSES))
    run.handle.set_step(5)
    found = losses(run.net, x, labels, where, noise.uniform(0, TIME, where), 0)
    assert run.handle.kept is not None
    assert 0 < run.handle.kept.float().mean() < 1
    torch.testing.assert_close(loss, found[run.handle.kept].mean())
    run.close()
    dense = routed(work, ratio=0)
    assert dense.loss(batch).isfinite()
    assert dense.handle.kept is None


def test_arms_have_names() -> None:
    assert Arm.parse("lora-0.25@3..-4") == Arm(kind="lora", ratio=0.25, layers=(3, -4))
    assert Arm.parse("full-dense") == Arm(kind="full", ratio=0)
    for name in ("lora-dense", "full-0.5", "lora-0.4@2..7", "lora-dense+all", "lora-0.5@3..-4+dense"):
        assert Arm.parse(name).name == name
    assert [Arm.parse(f"lora-0.5{ending}").checkpointing for ending in ("", "+all", "+dense")] == [False, True, "dense"]
    with pytest.raises(ConfigError, match=r"arm 'lora-2': give lora or full, then dense or a ratio"):
        Arm.parse("lora-2")


def test_timing_learns_nothing(work: Path) -> None:
    run = routed(work)
    before = [parameter.detach().clone() for parameter in run.parameters]
    levels = run.seconds_by_scale()
    assert set(levels) == {run.handle.plan.schedule.scale(step) for step in range(10)}  # pyright: ignore[reportOptionalMemberAccess]
    assert all(torch.equal(one, two) for one, two in zip(before, run.parameters, strict=True))
    assert not run.optimizer.state


def test_steps_fill_the_seconds_at_the_times_of_the_levels() -> None:
    arm = Arm.parse("lora-0.5")
    times = {0.0: 2.0, 0.25: 1.8, 0.5: 1.5, 0.75: 1.2, 1.0: 1.0}
    steps = steps_within(300, times, arm)
    schedule = arm.plan(steps).schedule
    assert schedule is not None
    spent = sum(times[schedule.scale(step)] for step in range(steps))
    assert 297 < spent <= 300
    assert steps_within(300, {1.0: 2.0}, Arm.parse("lora-dense")) == 150


def test_every_arm_is_drawn_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    run = {"curve": [(1, 1.0, 0.5), (2, 2.0, 0.4)], "val_loss": 0.4, "samples": {"1": {"distance": 1.0, "kernel": 2.0}}}
    arms = [Arm.parse(f"lora-{ratio:g}" if ratio else "lora-dense") for ratio in ratios]
    drawn: list[tuple[str, str]] = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *_, **__: drawn.extend((line.get_color(), line.get_marker()) for line in figure.axes[0].lines),
    )
    save_figure([{"seed": 1, "runs": {arm.name: run | {"arm": arm.name} for arm in arms}}], tmp_path / "tuning.png")
    assert len(set(drawn)) == len(drawn) == len(arms)


def test_the_whole_experiment(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rehearsed, cut short in the base, gone on with; then other seeds at the rates that the first one chose."""
    common = ["--work", str(work), "--out", str(tmp_path), "--smoke", "--base-seconds", "0.05", "--seconds", "0.1"]
    arms, chosen = ["--arms", "lora-dense", "lora-0.5", "full-0.5"], tmp_path / "tuning-s0.json"
    first = ["run", *common, *arms, "--rates", "1e-3", "3e-3", "--guidance"]
    assert main([*first, "--rehearse"]) == 0
    assert not chosen.exists()
    assert "raise --budget-seconds" not in capsys.readouterr().out
    assert main([*first, "--budget-seconds", "0"]) == 1
    assert "what does not fit is not begun; raise --budget-seconds" in capsys.readouterr().out
    assert (work / "base.unfinished.pt").is_file()
    assert main(first) == 0
    assert not (work / "base.unfinished.pt").exists()
    runs = json.loads(chosen.read_text())["runs"]
    names = ["lora-dense", "lora-0.5", "full-0.5"]
    assert list(runs) == [f"{name}-{rate}" for name in names for rate in (0.001, 0.003)]
    assert all(np.isfinite(run["val_loss"]) and not run["samples"] for run in runs.values())
    assert all(runs[f"{name}-0.001"]["steps"] == runs[f"{name}-0.003"]["steps"] for name in names)
    assert np.isfinite(json.loads((tmp_path / "tuning-base.json").read_text())["runs"]["base"]["val_loss"])
    with Image.open(tmp_path / "tuning-base.png") as picture:
        assert picture.size[1] > picture.size[0]
    capsys.readouterr()
    assert main([*first, "--plan"]) == 0
    assert capsys.readouterr().out.count("done") == 7
    best = ["--rates", "best", "--chosen-by", str(chosen)]
    assert main(["run", *common, "--seeds", "1", "2", "--arms", "lora-dense", "lora-0.5", *best]) == 0
    lowest = min((f"lora-dense-{rate}" for rate in (0.001, 0.003)), key=lambda name: runs[name]["val_loss"])
    losses = []
    for seed in (1, 2):
        other = json.loads((tmp_path / f"tuning-s{seed}.json").read_text())["runs"]
        assert len(other) == 2
        assert set(other[lowest]["samples"]) == {"1", "1.5"}
        losses.append(other[lowest]["val_loss"])
    assert losses[0] != losses[1]
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n<!-- tuning: generated -->\n<!-- end of tuning -->\n")
    kept = [str(tmp_path / f"tuning-s{seed}.json") for seed in (0, 1, 2)]
    assert main(["report", *kept, "--docs", str(tmp_path), "--samples", str(tmp_path)]) == 0
    text = page.read_text()
    assert re.search(r"- LoRA, 0.5 over 2..-2: ahead of dense in loss for \d, .* in both for \d of 2 seeds", text)
    assert "| LoRA, dense | 2 |" in text
    assert "| LoRA, dense | 0 |" not in text
    for name in ("tuning.png", "tuning-samples.png"):
        assert f"](results/{name})" in text
        with Image.open(tmp_path / "results" / name) as picture:
            assert picture.size[0] > picture.size[1]


def plan_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    common = ["--work", str(tmp_path), "--out", str(tmp_path)]
    assert main(["run", *common, "--plan", "--rates", "1e-3", "3e-3", "3e-4", *options]) == 0
    return {line[:24].strip(): line[24:].strip() for line in capsys.readouterr().out.splitlines()}


def test_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An arm is compiled once; what is done takes no time."""

    def in_all(*options: str) -> float:
        return float(plan_of(tmp_path, capsys, *options)["in all"].split()[0])

    warm = in_all("--guidance", "--compiled")
    assert in_all("--guidance") - warm == COMPILE_SECONDS["dense"] + 2 * COMPILE_SECONDS["routed"]
    assert in_all("--guidance", "1", "--compiled") - warm == 9 * SAMPLES_SECONDS
    assert in_all("--compiled") - warm == 27 * SAMPLES_SECONDS
    (tmp_path / "tuning-s0.json").write_text(json.dumps({"runs": {"lora-0.5@3..-4-0.001": {}}}))
    (tmp_path / "base.pt").touch()
    later = plan_of(tmp_path, capsys, "--guidance", "--compiled")
    again, ready = 90 + VALIDATE_SECONDS + CAPTURE_SECONDS, 90 + VALIDATE_SECONDS + WARM_SECONDS["routed"]
    assert [later[f"s0 lora-0.5@3..-4-{rate}"] for rate in ("0.001", "0.003", "0.0003")] == [
        "done",
        f"{ready:.0f} s",
        f"{again:.0f} s",
    ]
    assert later["base"] == "done"


def test_another_run_starts_where_the_first_did(work: Path) -> None:
    """As fresh as a run of its own, to the bit, with its own seed and routes."""
    found = []
    for runs in (((0.3, 0), (0.1, 1)), ((0.1, 1),)):
        run = routed(work)
        start = [parameter.detach().clone() for parameter in run.parameters]
        for rate, seed in runs:
            run.start_again(start, Arm.parse("lora-0.25").plan(6), seed)
            run.train(3, rate)
        found.append([parameter.detach().clone() for parameter in run.parameters])
        assert run.step == 3
        assert run.handle.plan.seed == 1
        assert run.handle.plan.routes[0].selection_ratio == 0.25
        run.close()
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(found[0], start, strict=True))


def test_what_does_not_fit_is_not_begun(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = argparse.Namespace(seconds=90, guidance=[1.0, 1.5], compiled=True)
    arm = Arm.parse("lora-0.5")
    first, later = (run_seconds(arm, given, first=first) for first in (True, False))
    assert first - later == WARM_SECONDS["routed"] - CAPTURE_SECONDS
    assert later == 90 + VALIDATE_SECONDS + 3 * SAMPLES_SECONDS + CAPTURE_SECONDS
    experiment = Experiment.__new__(Experiment)
    experiment.given = argparse.Namespace(**vars(given), smoke=False)
    experiment.ends = time.monotonic() + (first + later) / 2
    assert experiment.fits(arm, 1e-3, first=False)
    assert not experiment.fits(arm, 1e-3, first=True)
    assert f"lora-0.5-0.001: needs {first:.0f} s" in capsys.readouterr().out


def test_a_rate_that_diverged_is_not_chosen(tmp_path: Path) -> None:
    runs = {f"{rate}": {"arm": "lora-0.5", "rate": rate, "val_loss": loss} for rate, loss in
            ((3e-3, float("nan")), (1e-3, 0.3), (3e-4, 0.2))}  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps({"runs": runs}))
    assert chosen_rates(Arm.parse("lora-0.5"), ["best"], tmp_path / "r.json") == [3e-4]


def test_the_table_says_how_much_worse_than_dense() -> None:
    def run(arm: str, loss: float, distance: float, steps: int) -> dict[str, object]:
        samples = {"1": {"FD": distance, "KD": distance / 100}}
        return {
            "arm": arm,
            "rate": 1e-3,
            "val_loss": loss,
            "samples": samples,
            "steps": steps,
            "seconds": 90.0,
            "peak_gib": 4.25,
        }

    runs = {
        "a": run("lora-dense", 0.2, 10, 100),
        "b": run("lora-0.5", 0.21, 9, 180),
        "c": run("lora-0.5", 0.22, 5, 180),
    }
    table = runs_table([{"seed": 3, "runs": runs}])
    assert "| LoRA, 0.5 over 2..-2 | 3 | 180 | 90.0 | 4.2 | 9.0 | 90.0 | 0.21000 | -10.0% | -10.0% | +5.0% |" in table
    better = {"a": runs["a"], "b": run("lora-0.5", 0.186, 8, 180)}
    seeds = [{"seed": 1, "runs": better}, {"seed": 2, "runs": runs}]
    assert "| LoRA, 0.5 over 2..-2 | mean |  |  |  | 8.5 | 85.0 | 0.19800 | -15.0% | -15.0% | -1.0% |" in runs_table(
        seeds
    )
    words = "ahead of dense in loss for 1, in FD-EffLite0 for 2 and in both for 1 of 2 seeds."
    assert verdict(seeds) == f"- LoRA, 0.5 over 2..-2: {words}"


def test_the_tuner_chooses_a_window(law: Law, work: Path, tmp_path: Path) -> None:
    """In the plain loop of the experiment, on the base of a run, within the rules for adapters."""
    net = FluxOfClasses(SMOKE, random_captions(), seed=0)
    torch.manual_seed(0)
    for parameter in net.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    (tmp_path / "data").symlink_to(work / "data")
    torch.save(net.state_dict(), tmp_path / "base.pt")
    work_of = ["--work", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"--arms chosen needs .*chosen/tread_config.json: run `choose` first"):
        main(["run", *work_of, "--plan", "--arms", "chosen", "--rates", "1e-3"])
    assert (tmp_path / "results").is_dir()  # not in the current folder
    assert main(["choose", *work_of, "--target-speedup", "1.01", "--smoke"]) == 0
    (route,) = RoutePlan.from_config(str(tmp_path / "chosen" / "tread_config.json")).routes
    assert route.start_layer_idx >= 2
    assert route.selection_ratio <= 0.5
    window = f"{route.start_layer_idx}..{route.end_layer_idx}"
    assert chosen_arm(tmp_path).name == f"lora-{route.selection_ratio:g}@{window}"
