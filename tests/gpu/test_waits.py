"""Between two log lines no step of a trainer waits for the device.

Real sessions with real loaders run as `fit` runs them: a step, then its numbers set aside. The log line itself reads
them, which is the one wait there is; that it is seen shows that the others would be.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from benchmarks.profile import STEPS, host_waits, warned_waits
from PIL import Image

from tread.training.loop import Session
from tread.training.metrics import Metrics, read_metrics

WARM = 3
"""Steps before anything is counted: memory is claimed, layers are compiled, counts are read once."""
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}], "schedule": None}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate remembers its first use in a process."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    """The inside of `fit`: called, it does one step."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session, self.task = session, session.task
        self.metrics = Metrics(folder, session.accelerator, start_step=0, advice="")
        self.batches = self.task.batches(0)
        self.done = 0

    def __call__(self) -> None:
        values = self.session.step(self.done, self.batches)
        self.done += 1
        self.metrics.add(self.done, {"tokens_kept": self.task.kept_share}, values)


def between_log_lines(session: Session, folder: Path, device: str) -> None:
    step = Training(session, folder)
    for _ in range(2):
        for _ in range(WARM):
            step()
        if device == "cuda":
            found = host_waits(step)
            assert found == {}, warned_waits(step)
            assert host_waits(step.metrics.flush), "the log line's own wait was not seen"
        else:
            for _ in range(STEPS):
                step()
            step.metrics.flush()
    lines = read_metrics(folder)
    assert len(lines) == step.done
    assert all(line["tokens_kept"] < 1 for line in lines)


def write_images(folder: Path) -> Path:
    """Random pictures of two classes."""
    rng = np.random.default_rng(0)
    for i in range(8):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    return folder


def pretraining(folder: Path, device: str, *settings: str) -> Session:
    pytest.importorskip("hydra")
    from tread.pretrain.config import compose
    from tread.pretrain.task import Pretraining

    config = compose(
        [
            *["data=images", f"data.path={write_images(folder / 'images')}", "data.size=16", f"output_dir={folder}"],
            *["model=tread", "model.depth=5", "model.width=32", "model.heads=4", "train.batch_size=4"],
            *["model.tread_config=" + json.dumps(ROUTES), "train.steps=100", "validation.samples=0", "sample.every=0"],
            *["log.trackers=none", *settings],
        ]
    ).config
    task = Pretraining(config, Accelerator(cpu=device == "cpu", mixed_precision="bf16"), folder)
    return Session(task, config, task.accelerator)


def finetuning(folder: Path, real_data: Path, device: str, *, masked: bool, workers: int = 0) -> Session:
    """A LoRA on a tiny FLUX."""
    import tread
    from tread.finetune.data.prepare import prepare
    from tread.finetune.families import open_family
    from tread.finetune.run import job_config, load_models
    from tread.finetune.settings import FinetuneConfig
    from tread.finetune.source import Source
    from tread.finetune.task import Finetuning

    pytest.importorskip("transformers")
    pipelines: Any = importlib.import_module("finetune.tiny")
    pictures: Any = importlib.import_module("finetune.test_task")
    pipelines.TINY["flux"](folder / "flux")
    pictures.write_images(folder / "images", masked=masked)
    config = FinetuneConfig(
        model_family="flux",
        pretrained_model_name_or_path=str(folder / "flux"),
        data={"instance_data_dir": str(folder / "images"), "resolution": 64},
        cache_dir=str(folder / "cache"),
        output_dir=str(folder),
        max_train_steps=100,
        mixed_precision="bf16",
        train_batch_size=2,
        dataloader_num_workers=workers,
        num_eval_images=1,
        compile=False,
        report_to="none",
        tread_config=ROUTES,
    )
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16")
    family = open_family("flux", Source(config.pretrained_model_name_or_path))
    data = prepare(config, family, accelerator, folder)
    models = load_models(config, family, accelerator.device)
    handles: Any = {part: tread.attach(model, ROUTES) for part, model in models.items()}
    task = Finetuning(config, accelerator, folder, family=family, models=models, handles=handles, data=data)
    return Session(task, job_config(config), accelerator)


def test_pretraining(tmp_path: Path) -> None:
    between_log_lines(pretraining(tmp_path, "cpu", "train.compile=false"), tmp_path, "cpu")


@pytest.mark.slow
@pytest.mark.realdata
def test_finetuning(tmp_path: Path, real_data: Path) -> None:
    between_log_lines(finetuning(tmp_path, real_data, "cpu", masked=True), tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_pretraining_on_the_gpu(tmp_path: Path, workers: int) -> None:
    """Without workers eagerly and in two micro-steps; with them compiled."""
    more = ["train.compile=true"] if workers else ["train.compile=false", "train.micro_steps=2"]
    session = pretraining(tmp_path, "cuda", f"train.workers={workers}", *more)
    between_log_lines(session, tmp_path, "cuda")


@pytest.mark.gpu
@pytest.mark.realdata
@pytest.mark.parametrize("masked", [False, True])
def test_finetuning_on_the_gpu(tmp_path: Path, real_data: Path, masked: bool) -> None:
    """With masks by two workers, and without either."""
    session = finetuning(tmp_path, real_data, "cuda", masked=masked, workers=2 if masked else 0)
    between_log_lines(session, tmp_path, "cuda")
