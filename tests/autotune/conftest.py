"""Each test runs on the CPU, in a folder of its own, as a fresh process would; no test looks at a clock."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.autotune.tuned import Law
from tests.report.conftest import alone, tune
from tread.autotune import run
from tread.autotune.cost import Routes
from tread.autotune.subject import Subject

__all__ = ["alone", "tune"]


@pytest.fixture
def law(monkeypatch: pytest.MonkeyPatch) -> Law:
    """The time of a step by a known law, from what the step dropped: a step must be run to be timed."""
    known = Law()
    made, losses = Subject.__init__, Subject.losses

    def remember(subject: Subject, *arguments: Any) -> None:
        made(subject, *arguments)
        known.subject = subject

    def timer(step: Callable[[], Any]) -> float:
        known.calls += 1
        if known.calls == known.interrupt:
            raise KeyboardInterrupt
        known.watch()
        for _ in range(known.steps):
            step()
        return known.seconds()

    def counting(subject: Subject, routes: Routes) -> list[tuple[float, float]]:
        known.asked += 1
        return losses(subject, routes)

    monkeypatch.setattr(Subject, "__init__", remember)
    monkeypatch.setattr(Subject, "losses", counting)
    monkeypatch.setattr(run, "steady", lambda device: timer)
    return known
