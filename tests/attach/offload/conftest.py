"""Fixtures: fresh compilers, and slots that turn to NaN as soon as their layer is done."""

from collections.abc import Iterator

import pytest
import torch

from tests.attach.attached import Attach
from tread.kernels.offload.ring import Slot


@pytest.fixture(autouse=True)
def fresh(attach: Attach) -> Iterator[None]:
    """Everything is detached, and then nothing is compiled any more."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is NaN from the moment that its layer is done with it, and has to be fetched again."""
    release = Slot.release

    def poison(slot: Slot) -> None:
        release(slot)
        slot.block.fill_(255)
        slot.holds = None

    monkeypatch.setattr(Slot, "release", poison)
