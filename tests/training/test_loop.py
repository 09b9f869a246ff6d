"""The loop's claims: a run that was killed goes on bit for bit, and each setting does what it says."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tests.programs import ROOT, environment
from tests.tiny.runs import ROUTE, TINY, assert_same_run, final_state, go_on, losses, make_session, metrics, train
from tread.errors import ConfigError, Stopped, TrainingDiverged
from tread.kernels import checkpointing
from tread.pretrain.config import compose
from tread.pretrain.task import Batch, Pretraining
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.job import make_accelerator
from tread.training.loop import _Clock

PLAN = {"routes": [ROUTE], "selector": "l1", "schedule": {"warmup_steps": 3, "cooldown_fraction": 0.25, "levels": 2}}
VARIANTS = {
    "dense": ["model=dit", "model.tread_config=null"],
    "routed": ["optimizer.schedule=cosine", "optimizer.warmup_steps=2"],
    "accumulated": ["train.micro_steps=2"],
    "importance and schedule, edm": ["objective=edm", f"model.tread_config={json.dumps(PLAN)}"],
    "workers": ["train.workers=1"],
    "prodigy": ["optimizer.name=prodigy", "optimizer.learning_rate=1"],
    "schedule-free": ["optimizer.name=adamw-schedule-free"],
    "muon, with restarts": ["optimizer.name=muon", "optimizer.schedule=cosine_with_restarts", "optimizer.cycles=2"],
    "checkpointed, bf16": ["train.checkpointing=true", "train.precision=bf16"],
}
EIGHT = ["train.steps=8", "checkpoint.every=2", "log.every=1", "validation.every=4"]


class PowerCut(BaseException):
    """The run dies here, in the middle of a step: nothing that handles errors runs."""


def before_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Let something happen in the middle of step `step`, counted from 0."""
    loss = Pretraining.loss

    def loss_and_more(self: Pretraining, model: nn.Module, batch: Batch) -> Tensor:
        if int(batch.positions[0]) // self.config.train.batch_size == step:
            act()
        return loss(self, model, batch)

    patch.setattr(Pretraining, "loss", loss_and_more)


def cut_power() -> None:
    raise PowerCut


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_died_goes_on_bit_for_bit(tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume neither repeats a step nor loses the data position or the selections."""
    settings = [*EIGHT, *VARIANTS[variant]]
    straight = train(tmp_path / "straight", *settings)
    assert len(losses(straight)) == 8
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        before_step(patch, 5, cut_power)  # step 5 is done and written, but not in a checkpoint
        train(tmp_path / "died", *settings)
    assert [line["step"] for line in metrics(tmp_path / "died")][-1] == 5
    assert_same_run(straight, go_on(tmp_path / "died"))


def started(folder: Path, checkpoints: int, *settings: str) -> subprocess.Popen[str]:
    """A run without end in a process group of its own, which has written so many checkpoints."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TINY, "train.steps=1000000", *settings, f"output_dir={folder}"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    while len(list_checkpoints(folder / CHECKPOINTS)) < checkpoints:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.003)
    return process


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL from outside, in the middle of whatever the process is doing; checkpoints after every step."""
    folder, settings = tmp_path / "killed", ["checkpoint.every=1", "log.every=7"]
    process = started(folder, 3, *settings)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    last = int(list_checkpoints(folder / CHECKPOINTS)[-1].name.removeprefix("step-"))
    some_more = f"train.steps={last + 9}"
    assert_same_run(train(tmp_path / "straight", *settings, some_more), go_on(folder, some_more))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Signals as in a terminal: a shell lets the jobs that it starts in the background ignore SIGINT, nohup SIGHUP."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch, pytest.raises(Stopped) as stopped:
        before_step(patch, 4, lambda: signal.raise_signal(number))
        train(folder, *EIGHT, "checkpoint.every=100", "log.every=100")
    assert stopped.value.number == number
    assert [path.name for path in list_checkpoints(folder / CHECKPOINTS)] == ["step-00000005"]
    assert f"stopped at step 5 of 8; continue with: tread train resume={folder}\n" in capsys.readouterr().out
    assert signal.getsignal(number) is before
    assert_same_run(train(tmp_path / "straight", *EIGHT), go_on(folder))


def test_a_hang_up_that_nohup_has_ignored_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before_step(monkeypatch, 4, lambda: signal.raise_signal(signal.SIGHUP))
        folder = train(tmp_path / "run", *EIGHT)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(losses(folder)) == 8


def test_a_signal_in_the_last_step_is_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_step(monkeypatch, 7, lambda: signal.raise_signal(signal.SIGTERM))
    assert len(losses(train(tmp_path / "run", *EIGHT))) == 8


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("step", [4, 8])
def test_a_signal_in_a_review_saves_at_once_and_the_resume_makes_up_for_it(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ["train.steps=8", "validation.every=4", "sample.every=4", "sample.steps=1", "checkpoint.every=8"]
    whole = train(tmp_path / "whole", *every)
    drawn = Pretraining.preview

    def interrupted(self: Pretraining, at: int) -> dict[str, float]:
        if at == step:
            signal.raise_signal(signal.SIGINT)
        return drawn(self, at)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Pretraining, "preview", interrupted)
        train(tmp_path / "stopped", *every)
    picture = tmp_path / "stopped" / "samples" / f"step-{step:08}.png"
    assert not picture.exists()
    assert [path.name for path in list_checkpoints(tmp_path / "stopped" / CHECKPOINTS)] == [f"step-{step:08}"]
    assert_same_run(go_on(tmp_path / "stopped"), whole)
    assert picture.read_bytes() == (whole / "samples" / picture.name).read_bytes()


def test_a_signal_before_a_review_leaves_it_to_the_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["train.steps=8", "validation.every=4"]
    whole = train(tmp_path / "whole", *every)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        before_step(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        train(tmp_path / "stopped", *every)
    assert not any("val_loss" in line and line["step"] == 4 for line in metrics(tmp_path / "stopped"))
    assert_same_run(go_on(tmp_path / "stopped"), whole)


@pytest.mark.usefixtures("interruptible")
def test_a_second_signal_acts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before_step(monkeypatch, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", *EIGHT, "checkpoint.every=100")
    assert list_checkpoints(tmp_path / "run" / CHECKPOINTS) == []


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_reaches_the_data_workers_too_and_still_ends_well(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole process group."""
    folder = tmp_path / "run"
    process = started(folder, 1, "train.workers=1", "checkpoint.every=5")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    assert f"continue with: tread train resume={folder}" in output


def test_a_finished_run_says_so_and_more_steps_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path / "run", "train.steps=3")
    go_on(folder)
    assert "the run is at step 3 already; raise train.steps to train on." in capsys.readouterr().out
    go_on(folder, "train.steps=5")
    said = capsys.readouterr().out
    assert f"resumed from {folder}/checkpoints/step-00000003" in said
    assert "changed since the run was started: train.steps: 3 -> 5" in said
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5]
    assert_same_run(train(tmp_path / "straight", "train.steps=5"), folder)


def test_a_checkpoint_is_no_run_but_one_can_go_back_to_it(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "train.steps=4", "checkpoint.every=2")
    before = metrics(folder)
    with pytest.raises(ConfigError, match=r"step-00000002.* one of its checkpoints: .* move the later checkpoints"):
        go_on(folder / CHECKPOINTS / "step-00000002")
    (folder / CHECKPOINTS / "step-00000004").rename(tmp_path / "moved")
    assert metrics(go_on(folder)) == before


def test_a_half_written_checkpoint_is_passed_over_and_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = train(tmp_path / "straight", *EIGHT, "checkpoint.keep=1")
    folder = train(tmp_path / "run", *EIGHT, "checkpoint.keep=2")
    os.truncate(folder / CHECKPOINTS / "step-00000008" / "optimizer.safetensors", 100)
    capsys.readouterr()
    go_on(folder, "checkpoint.keep=1")
    said = capsys.readouterr().out
    assert "step-00000008 is not whole: optimizer.safetensors has 100 of" in said
    assert f"resumed from {folder}/checkpoints/step-00000006" in said
    assert_same_run(straight, folder)


def test_a_loss_that_is_no_number_stops_the_run_and_is_never_saved(tmp_path: Path) -> None:
    """Metrics are due long after the checkpoint: the checkpoint has to look by itself."""
    folder = tmp_path / "run"
    wild = ["optimizer.learning_rate=1e20", "optimizer.warmup_steps=0", "optimizer.clip=null"]
    with pytest.raises(
        TrainingDiverged, match=r"no longer finite at step \d+\. Lower optimizer\.learning_rate"
    ) as error:
        train(folder, "train.steps=8", "checkpoint.every=1", "log.every=8", *wild)
    (diverged,) = re.findall(r"at step (\d+)", str(error.value))
    assert list_checkpoints(folder / CHECKPOINTS)[-1].name == f"step-{int(diverged) - 1:08d}"
    assert all(tensor.isfinite().all() for part in final_state(folder).values() for tensor in part.values())
    assert len(losses(folder)) == int(diverged) - 1


def test_checkpoints_come_every_n_steps_and_at_the_end(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "train.steps=7", "checkpoint.every=2", "checkpoint.keep=3")
    assert [path.name[-1] for path in list_checkpoints(folder / CHECKPOINTS)] == ["4", "6", "7"]


def test_accumulation_changes_nothing_but_memory(tmp_path: Path) -> None:
    settings = ["train.steps=4", "model.tread_config=null"]
    one = train(tmp_path / "one", *settings)
    four = train(tmp_path / "four", *settings, "train.micro_steps=4")
    for line, other in zip(metrics(one), metrics(four), strict=True):
        assert other == pytest.approx(line, rel=1e-5)  # the gradient's norm too, which Adam would hide
    for name, tensor in final_state(one)["model"].items():
        torch.testing.assert_close(final_state(four)["model"][name], tensor, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("how", ["true", "selective"])
def test_checkpointed_equals_not_bit_for_bit(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "LEAST", 1)  # the products of so small a model are dear too
    assert str(make_session(tmp_path, f"train.checkpointing={how}")[0].model.checkpointing).lower() == how
    assert_same_run(
        train(tmp_path / "plain", "train.steps=4"),
        train(tmp_path / "again", "train.steps=4", f"train.checkpointing={how}"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param("false", marks=pytest.mark.contract), "selective"])
def test_compiled_is_close_and_keeps_the_names(
    tmp_path: Path, checkpointing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["train.steps=3", "model.depth=4", "model.tread_config=balanced", f"train.checkpointing={checkpointing}"]
    eager, compiled = (
        train(tmp_path / "eager", *settings),
        train(tmp_path / "compiled", *settings, "train.compile=true"),
    )
    assert "compiling failed" not in capsys.readouterr().out
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)
    one, two = final_state(eager), final_state(compiled)
    for part in one:
        assert one[part].keys() == two[part].keys()


@pytest.mark.parametrize("precision", ["bf16", "bf16-stream"])
def test_bf16_computes_in_bf16_and_keeps_float32_weights(precision: str, tmp_path: Path) -> None:
    settings = ["train.steps=3", "validation.every=3", "sample.every=3", "sample.steps=2", "sample.per_class=1"]
    full = train(tmp_path / "float32", *settings)
    half = train(tmp_path / "bf16", *settings, f"train.precision={precision}")
    assert losses(half) == pytest.approx(losses(full), rel=0.02)
    assert losses(half)[1:] != losses(full)[1:]
    assert {tensor.dtype for part in final_state(half).values() for tensor in part.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("precision", "autocast", "stream"),
    [("bf16-stream", "bf16", torch.bfloat16), ("bf16", "bf16", None), ("float32", "no", None), ("auto", "no", None)],
)
def test_precision_is_autocasts_and_the_streams(precision: str, autocast: str, stream: Any, tmp_path: Path) -> None:
    config = compose([*TINY, f"train.precision={precision}"])
    accelerator = make_accelerator(config)
    assert accelerator.mixed_precision == autocast
    assert Pretraining(config, accelerator, tmp_path).model.stream is stream


@pytest.mark.parametrize("clip", [0.05, None])
def test_clipping_is_respected_and_the_norm_before_it_reported(tmp_path: Path, clip: float | None) -> None:
    """The clipping setting is not ignored."""
    setting = f"optimizer.clip={'null' if clip is None else clip}"
    task, session = make_session(tmp_path, setting, "train.steps=3")
    seen: list[Tensor] = []

    def norm(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        seen.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())

    session.optimizer.register_step_pre_hook(norm)
    batches = task.batches(0)
    for step in range(3):
        reported = float(session.step(step, batches)["grad_norm"])
        assert reported > 0.5  # well above the limit
        assert float(seen[-1]) == pytest.approx(reported if clip is None else clip, rel=1e-4)


def test_graphs_without_a_gpu_are_left_out_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, session = make_session(tmp_path, "train.graphs=true")
    assert session.fast[0].graphs is None
    assert "train.graphs needs exactly one CUDA GPU; continuing without." in capsys.readouterr().out
    assert task.config.memory_advice.startswith("Set train.graphs=false, ")
    assert "graphs" not in compose(TINY).memory_advice


def test_a_rate_of_zero_moves_nothing(tmp_path: Path) -> None:
    task, session = make_session(tmp_path, "optimizer.learning_rate=0", "train.steps=2")
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    batches = task.batches(0)
    for step in range(2):
        session.step(step, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())


def test_the_ratio_schedule_is_followed_and_shown(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", *EIGHT, f"model.tread_config={json.dumps(PLAN)}")
    # 64 tokens at ratio 0.5 in two levels over three steps; the last quarter of the eight steps is dense
    assert [line["tokens_kept"] for line in metrics(folder) if "loss" in line] == [1, 1, 0.75, 0.5, 0.5, 0.5, 1, 1]


def test_the_bar_predicts_no_time_for_reviews() -> None:
    """Seconds of validation between two steps are no slow step."""
    bar = tqdm(total=4, file=io.StringIO())
    clock = _Clock(bar)
    before = bar.last_print_t
    with clock.paused():
        time.sleep(0.05)
    assert bar.last_print_t >= before + 0.05
    with _Clock(tqdm(total=4, disable=True)).paused():  # has no such times
        pass
