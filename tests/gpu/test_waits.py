"""Between two log lines no step of a trainer waits for the device.

Real sessions with real loaders run as `fit` runs them: a step, then its numbers set aside. The log line itself reads
them, which is the one wait there is; that it is seen shows that the others would be.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import Accelerator

from benchmarks.common.profile import STEPS, host_waits, warned_waits
from tests.finetune.tasks import ROUTES, make_config, make_task
from tests.tiny.pictures import write_gradients
from tests.tiny.pipelines import PipelineFolder
from tests.tiny.runs import forget, write_images
from tread.finetune.job import FinetuneJob
from tread.pretrain.config import compose
from tread.pretrain.task import Pretraining
from tread.training.metrics import Metrics, read_metrics
from tread.training.session import Session

WARM = 3
"""Steps before anything is counted: memory is claimed, layers are compiled, counts are read once."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate remembers its first use in a process."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    forget()
    yield
    forget()


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
        self.metrics.add(self.done, {"tokens_kept": self.session.kept_share}, values)


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


def pretraining(folder: Path, device: str, *settings: str) -> Session:
    images = write_images(folder / "images", "a", "b", count=4, size=16)
    config = compose(
        [
            *["data=images", f"data.path={images}", "data.size=16", f"output_dir={folder}"],
            *["model=tread", "model.depth=5", "model.width=32", "model.heads=4", "train.batch_size=4"],
            *["model.tread_config=" + json.dumps(ROUTES), "train.steps=100", "validation.samples=0", "sample.every=0"],
            *["log.trackers=none", *settings],
        ]
    )
    task = Pretraining(config, Accelerator(cpu=device == "cpu", mixed_precision="bf16"), folder)
    return Session(task, config, task.accelerator)


def finetuning(folder: Path, pipeline: Path, device: str, *, masked: bool, workers: int = 0) -> Session:
    """A LoRA on a tiny FLUX."""
    config = make_config(
        pipeline,
        write_gradients(folder / "images", masked=masked),
        output_dir=str(folder),
        max_train_steps=100,
        mixed_precision="bf16",
        dataloader_num_workers=workers,
        compile=False,
        report_to="none",
    )
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16")
    return Session(make_task(config, folder, accelerator), FinetuneJob.of(config), accelerator)


def test_pretraining(tmp_path: Path) -> None:
    between_log_lines(pretraining(tmp_path, "cpu", "train.compile=false"), tmp_path, "cpu")


def test_finetuning(tmp_path: Path, pipeline_folder: PipelineFolder) -> None:
    between_log_lines(finetuning(tmp_path, pipeline_folder("flux"), "cpu", masked=True), tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_pretraining_on_the_gpu(tmp_path: Path, workers: int) -> None:
    """Without workers eagerly and in two micro-steps; with them compiled."""
    more = ["train.compile=true"] if workers else ["train.compile=false", "train.micro_steps=2"]
    session = pretraining(tmp_path, "cuda", f"train.workers={workers}", *more)
    between_log_lines(session, tmp_path, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_finetuning_on_the_gpu(tmp_path: Path, pipeline_folder: PipelineFolder, masked: bool) -> None:
    """With masks by two workers, and without either."""
    session = finetuning(tmp_path, pipeline_folder("flux"), "cuda", masked=masked, workers=2 if masked else 0)
    between_log_lines(session, tmp_path, "cuda")
