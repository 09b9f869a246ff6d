"""Python's collector leaves alone what a run built, while it trains and no longer."""

import gc
from pathlib import Path

import pytest

from tests.tiny.runs import TINY, forget
from tread.pretrain.config import compose
from tread.pretrain.task import Pretraining, pretrain
from tread.training.loop import SETTLED


@pytest.mark.parametrize("dies", [False, True])
def test_what_stays_is_frozen_after_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    gc.unfreeze()
    frozen: list[int] = []
    set_step = Pretraining.set_step

    def watch(self: Pretraining, step: int) -> None:
        frozen.append(gc.get_freeze_count())
        if dies and step == SETTLED:
            raise InterruptedError
        set_step(self, step)

    monkeypatch.setattr(Pretraining, "set_step", watch)
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
