"""The experiment at tiny size, and its measures on curves whose answer is known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.finetune_spike.__main__ import main
from benchmarks.finetune_spike.arms import ARMS, SCALES, arm_config
from benchmarks.finetune_spike.measure import Run, read_runs, run_seconds, spike_of, step_seconds
from benchmarks.finetune_spike.prepare import HELD_OUT, wordllama, write_images
from tread.autotune.jobs.job import read_job
from tread.autotune.subject import Subject

STEPS = 100


def curve(excess, *, kept=None, laps=()):
    """A run whose loss is `excess` above that of `curve(0)`."""
    base = 1 + 0.3 * np.sin(np.arange(STEPS))
    return Run(
        name="",
        facts={},
        loss=base * (1 + np.broadcast_to(excess, STEPS)),
        kept=np.ones(STEPS) if kept is None else np.asarray(kept),
        validation={},
        laps=list(laps),
    )


def test_a_spike_that_ends():
    excess = np.where(np.arange(STEPS) < 40, 0.2, 0.01)
    spike = spike_of(curve(excess), curve(0.0))
    assert spike.height == pytest.approx(0.2)
    assert (spike.peak, spike.lasting) == (pytest.approx(0.2), pytest.approx(0.01))
    # a window that begins at step 38 has two or three steps of the spike in it, which is little enough
    assert 36 <= (spike.settled or 0) <= (spike.length or 0) <= 40


def test_a_spike_that_stays():
    spike = spike_of(curve(np.where(np.arange(STEPS) < 30, 0.2, 0.05)), curve(0.0))
    assert spike.length is None
    assert spike.lasting == pytest.approx(0.05)
    assert 0 < (spike.settled or 0) <= 30


def test_what_stays_is_measured_where_the_ratio_is_full():
    kept = np.where(np.arange(STEPS) < 80, 0.5, 1.0)
    spike = spike_of(curve(np.where(kept < 1, 0.1, 0.0), kept=kept), curve(0.0))
    assert spike.lasting == pytest.approx(0.1)
    assert 60 < (spike.length or 0) <= 80


def test_no_spike():
    spike = spike_of(curve(0.015), curve(0.0))
    assert (spike.settled, spike.length) == (0, 0)


def test_time_leaves_out_first_laps_and_mixed_ones():
    at = np.arange(STEPS)
    kept = np.where((at >= 25) & (at < 45), 0.5, 1.0)
    speeds = [9.0, 2.0, 7.0, 1.0, 7.0]  # the first lap compiles, the third and the fifth have both ratios
    run = curve(0.0, kept=kept, laps=[(10 * (i + 1), seconds) for i, seconds in enumerate(speeds)])
    per_step = step_seconds([run])
    assert per_step == {0.5: 1.0, 1.0: 2.0}
    assert run_seconds(run, per_step)[-1] == 80 * 2 + 20
    between = curve(0.0, kept=np.full(STEPS, 0.75))
    assert run_seconds(between, per_step)[-1] == STEPS * 1.5


def test_arms_differ_in_what_they_say(tmp_path):
    scale = SCALES["h200"]
    arms = {arm.name: arm for arm in ARMS}
    assert len(arms) == len(ARMS)
    bare, shipped = (arm_config(tmp_path, scale, arms[f"lora-0.5{end}"], compiled=False) for end in ("", "-schedule"))
    assert isinstance(bare.tread_config, dict)
    assert bare.tread_config["schedule"] is None
    # the scheduled arm is what a user gets who says nothing about the schedule
    silent = {"routes": bare.tread_config["routes"]}
    assert replace(bare, tread_config=silent).plan() == shipped.plan()
    for arm in ARMS:
        plan = arm_config(tmp_path, scale, arm, compiled=False).plan()
        assert plan is None or plan.resolve(scale.double_layers + scale.single_layers)


@pytest.mark.realdata
def test_text_is_the_table(real_data):
    tokenizer, encoder = wordllama(real_data / "wordllama")
    ids = tokenizer(["pig face"], padding="max_length", max_length=8, return_tensors="pt").input_ids
    table = load_file(real_data / "wordllama" / "l2_supercat_256.safetensors")["embedding.weight"].float()
    found = encoder.float()(ids)[0][0].detach()  # (8, 256)
    words = table[ids[0]]
    expected = words / words.square().mean(-1, keepdim=True).sqrt()
    real = ids[0] != tokenizer.pad_token_id
    assert 0 < real.sum() < 8
    torch.testing.assert_close(found[real], expected[real])
    assert not found[~real].any()


@pytest.mark.realdata
def test_held_out_images_are_in_no_other_folder(real_data, tmp_path):
    counts = write_images(real_data / "emoji3d", tmp_path, SCALES["h200"])
    assert sum(counts.values()) == 1868
    folders = {name: {path.stem for path in (tmp_path / name).glob("*.webp")} for name in counts}
    assert {name: len(found) for name, found in folders.items()} == counts
    captions = (real_data / "emoji3d" / "captions.csv").read_text(encoding="utf-8")
    for line in captions.splitlines():
        if line.endswith(f"{HELD_OUT[0]},0"):
            assert line.split(".")[0] in folders["tune"] | folders["eval"]


@pytest.mark.realdata
def test_its_steps_can_be_predicted(real_data, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["prepare", str(real_data), str(out), "--smoke"]) == 0
    assert main(["config", str(out)]) == 0
    job = read_job(capsys.readouterr().out.split()[-1], [])
    subject = Subject(job.open(tmp_path / "tuning", (0.5,)))
    assert subject.summary().startswith("FluxTransformer2DModel of 7 layers")
    subject.loop.close()


@pytest.mark.realdata
def test_the_whole_experiment(real_data, tmp_path, capsys):
    out, arms = tmp_path / "out", ["--arms", "lora-dense", "lora-0.5-schedule"]
    assert main(["prepare", str(real_data), str(out), "--smoke"]) == 0
    assert main(["run", str(out), "--budget-seconds", "0"]) == 1
    assert not (out / "runs").exists()

    assert main(["run", str(out), *arms]) == 0
    runs = read_runs(out / "results")
    assert set(runs) == {"base", "lora-dense", "lora-0.5-schedule"}
    dense, routed = runs["lora-dense"], runs["lora-0.5-schedule"]
    assert dense.kept.min() == 1
    assert routed.kept.tolist() == [1.0, *[0.5] * 6, 1.0]  # warm-up, ratio 0.5, cool-down
    # the same sample, noise and time: only the routing differs
    assert routed.loss[0] == dense.loss[0]
    assert routed.loss[1] != dense.loss[1]
    assert dense.final < runs["base"].final

    note = out / "results" / "lora-dense" / "run.json"
    before = note.stat().st_mtime_ns
    assert main(["run", str(out), *arms]) == 0
    assert note.stat().st_mtime_ns == before  # what is done is not done again

    capsys.readouterr()
    json_path, figures = tmp_path / "found.json", tmp_path / "figures"
    assert main(["report", str(out / "results"), "--json", str(json_path), "--figures", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in printed.splitlines()[2:]] == ["lora-dense", "lora-0.5-schedule"]
    found = json.loads(json_path.read_text())["arms"]
    assert found[0]["spike"] is None
    mean = routed.loss.mean() / dense.loss.mean() - 1
    assert found[1]["spike"]["height"] == pytest.approx(mean)
    assert found[1]["above_dense"] == pytest.approx(routed.final / dense.final - 1)
    assert {path.name for path in figures.iterdir()} == {"loss.png", "spike.png", "schedule.png", "pictures.png"}
