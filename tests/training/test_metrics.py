"""metrics.jsonl: cut back at a resume, robust to a cut-off line, never silent about a loss that is no number."""

import importlib.util
import io
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from tests.tiny.runs import train
from tread.errors import ConfigError, TrainingDiverged
from tread.finetune.job import FinetuneJob
from tread.finetune.settings import FinetuneConfig
from tread.pretrain.config import compose
from tread.training.metrics import FILE, Metrics, read_metrics, tracker_of
from tread.training.settings import JobConfig


def make(folder: Path, start_step: int = 0) -> Metrics:
    return Metrics(folder, Accelerator(cpu=True), start_step=start_step, advice="Lower the rate.")


def add(metrics: Metrics, step: int, loss: float, norm: float = 1.0) -> None:
    metrics.add(step, {"rate": step / 10}, {"loss": torch.tensor(loss), "grad_norm": torch.tensor(norm)})


def test_nothing_is_written_before_flush_and_everything_after(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    for step in (1, 2, 3):
        add(metrics, step, loss=step + 0.5)
    assert not (tmp_path / FILE).exists()
    assert metrics.flush() == {"rate": 0.3, "loss": 3.5, "grad_norm": 1.0}
    assert metrics.flush() == {}
    metrics.write(3, {"val_loss": 0.25})
    assert read_metrics(tmp_path) == [
        *({"step": step, "rate": step / 10, "loss": step + 0.5, "grad_norm": 1.0} for step in (1, 2, 3)),
        {"step": 3, "val_loss": 0.25},
    ]


def test_a_resume_cuts_back_to_its_step_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 2, 3, 4)]
    cut_off = '{"step": 2, "lo'
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines) + cut_off)
    assert read_metrics(tmp_path) == lines
    metrics = make(tmp_path, start_step=2)
    assert (tmp_path / FILE).read_text() == "".join(json.dumps(line) + "\n" for line in lines[:3])
    add(metrics, 3, loss=2.0)
    metrics.flush()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_new_run_does_not_keep_the_lines_of_one_that_never_saved(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"step": 1, "loss": 1.0}\n')
    make(tmp_path)
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["loss", "norm"])
def test_a_value_that_is_not_finite_names_its_step(tmp_path: Path, bad: float, place: str) -> None:
    metrics = make(tmp_path)
    add(metrics, 6, loss=1.0)
    add(metrics, 7, **{"loss": 1.0, place: bad})
    with pytest.raises(TrainingDiverged, match=r"no longer finite at step 7\. Lower the rate\."):
        metrics.flush()
    assert [line["step"] for line in read_metrics(tmp_path)] == [6]


def test_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretraining(name: str) -> JobConfig:
        return compose([f"log.trackers={name}"])

    def finetuning(name: Any) -> JobConfig:
        paths: dict[str, Any] = {"pretrained_model_name_or_path": "model", "data": "photos"}
        return FinetuneJob.of(FinetuneConfig(model_family="flux", report_to=name, **paths))

    for job in (pretraining, finetuning):
        assert tracker_of(job("none")) is None
        assert tracker_of(job("auto")) == tracker_of(job("tensorboard")) == "tensorboard"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for job, setting in ((pretraining, "log.trackers"), (finetuning, "report_to")):
        assert tracker_of(job("auto")) is None
        for name in ("tensorboard", "wandb"):
            with pytest.raises(ConfigError) as error:
                tracker_of(job(name))
            assert str(error.value) == (
                f"{setting} is '{name}', but {name} is missing: pip install 'tread-diffusion[track]'."
            )


def test_a_tracker_that_cannot_start_names_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(
        ConfigError,
        match=r"log\.trackers is 'wandb', which cannot start: .*(?i:api.key).* WANDB_MODE=offline.*log.trackers=none",
    ):
        train(tmp_path / "run", "train.steps=1", "log.trackers=wandb")
    assert not (tmp_path / "run").exists(), "noticed before the folder is claimed and the data read"


def test_tensorboard_gets_what_the_file_gets(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(tmp_path / "run", "train.steps=3", "validation.every=3", "log.trackers=tensorboard")
    seen = EventAccumulator(str(folder / "tread")).Reload()  # named after log.project
    for tag in ("loss", "val_loss"):
        written = [(line["step"], line[tag]) for line in read_metrics(folder) if tag in line]
        assert [(event.step, event.value) for event in seen.Scalars(tag)] == [
            (step, pytest.approx(value)) for step, value in written
        ]
        assert written


def test_tensorboard_gets_the_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pictures = ["sample.every=1", "sample.classes=2", "sample.per_class=1", "sample.steps=2"]
    folder = train(tmp_path / "run", "train.steps=2", "log.trackers=tensorboard", *pictures)
    seen = EventAccumulator(str(folder / "tread")).Reload()
    logged = seen.Images("samples")
    assert [event.step for event in logged] == [1, 2]
    with (
        Image.open(folder / "samples" / "step-00000002.png") as drawn,
        Image.open(io.BytesIO(logged[1].encoded_image_string)) as image,
    ):
        assert image.tobytes() == drawn.convert("RGB").tobytes()


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    """A run that was killed two steps after its checkpoint repeats them, and so does its log."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, log = tmp_path / "run", "log.trackers=tensorboard"
    train(folder, "train.steps=4", "checkpoint.every=2", "checkpoint.keep=2", log)
    shutil.rmtree(folder / "checkpoints/step-00000004")
    time.sleep(1)  # log files of one second are read in the order of their number as text, 10 before 9
    train(folder, "train.steps=5", "resume=latest", log)
    seen = EventAccumulator(str(folder / "tread")).Reload()
    assert [event.step for event in seen.Scalars("loss")] == [1, 2, 3, 4, 5]


def test_a_resume_goes_on_in_the_same_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb.teardown()  # it remembers the environment of an earlier use in this process
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, log = tmp_path / "run", "log.trackers=wandb"
    train(folder, "train.steps=2", log)
    train(folder, "train.steps=3", "resume=latest", log)
    other = train(tmp_path / "other", "train.steps=1", log)
    runs = [{path.name.rpartition("-")[2] for path in (one / "wandb").glob("offline-run-*")} for one in (folder, other)]
    assert [len(ids) for ids in runs] == [1, 1]
    assert runs[0] != runs[1]
