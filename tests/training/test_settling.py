"""Python's collector leaves alone what a run built, while it trains and no longer."""

import gc
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.tiny.runs import TINY, forget
from tread.pretrain.config import compose
from tread.pretrain.run import pretrain
from tread.pretrain.task import Pretraining
from tread.training.loop import SETTLED


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("dies", [False, True])
def test_what_stays_is_frozen_after_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    frozen: list[int] = []
    loss = Pretraining.loss

    def watch(self: Pretraining, *arguments: Any) -> Tensor:
        frozen.append(gc.get_freeze_count())
        if dies and len(frozen) == SETTLED + 1:
            raise InterruptedError
        return loss(self, *arguments)

    monkeypatch.setattr(Pretraining, "loss", watch)
    forget()
    composed = compose([*TINY, f"output_dir={tmp_path}", f"train.steps={SETTLED + 2}"])
    if dies:
        with pytest.raises(InterruptedError):
            pretrain(composed)
    else:
        pretrain(composed)
    assert set(frozen[:SETTLED]) == {0}
    assert min(frozen[SETTLED:]) > 1000
    assert gc.get_freeze_count() == 0
