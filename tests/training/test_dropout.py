"""A task whose layers draw random numbers of their own resumes bit for bit too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tests.forks import in_ranks
from tests.tiny.runs import TINY, assert_same_run, forget, losses
from tread.pretrain.config import compose
from tread.training.checkpoint import CHECKPOINTS
from tread.training.loop import fit
from tread.training.session import Session


class WithDropout:
    """A task whose layers draw from torch's own generator, fed by a loader that draws from it as it starts."""

    def __init__(self, micro_steps: int) -> None:
        torch.manual_seed(0)
        self.micro_steps = micro_steps
        self.facts: dict[str, Any] = {}
        self.unit = "img"
        self.routing: list[Any] = []
        self.model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
        self.data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))

    def summary(self) -> str:
        return ""

    def make_fast(self) -> list[Any]:
        return []

    def batches(self, start_step: int) -> Iterator[Tensor]:
        first = start_step * self.micro_steps
        indices = [[(at * 8 + i) % 64 for i in range(8)] for at in range(first, first + 100)]
        yield from torch.utils.data.DataLoader(self.data, batch_sampler=indices)  # pyright: ignore[reportArgumentType]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - 1).square().mean()

    def reviews(self, step: int) -> dict[str, Any]:
        return {"looking": dict}

    def saved(self, checkpoint: Path) -> None: ...


def first_loss(folder: Path) -> None:
    """The loss of a rank's first step, on the same batch as every other rank's."""
    accelerator = Accelerator(cpu=True)
    session = Session(WithDropout(1), compose([*TINY, "train.steps=1"]), accelerator)
    loss = session.step(0, session.task.batches(0))["loss"]
    (folder / f"{accelerator.process_index}").write_text(str(float(loss)))


def test_each_rank_drops_others(tmp_path: Path) -> None:
    in_ranks(first_loss, tmp_path)
    assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_layers_with_dropout_resume_exactly_too(tmp_path: Path, micro_steps: int) -> None:
    def run(folder: Path, steps: int) -> None:
        forget()
        folder.mkdir(exist_ok=True)
        settings = [f"train.steps={steps}", f"train.micro_steps={micro_steps}"]
        session = Session(WithDropout(micro_steps), compose([*TINY, *settings]), Accelerator(cpu=True))
        fit(session, folder, start=session.load(folder / CHECKPOINTS))

    run(tmp_path / "straight", 6)
    run(tmp_path / "resumed", 3)
    run(tmp_path / "resumed", 6)
    assert len(set(losses(tmp_path / "straight"))) == 6
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
