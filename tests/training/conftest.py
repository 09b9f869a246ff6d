"""Every test trains on the CPU as if it were alone; `tests/kernels` and `tests/pretrain` use the same fixtures."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny.runs import forget, train


def use_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("ACCELERATE_USE_CPU", "true")
    patch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.node.get_closest_marker("gpu") is None:
        use_cpu(monkeypatch)
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished routed run of six steps with two checkpoints; the large steps give its classes a voice."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    large = ["optimizer.learning_rate=0.02", "optimizer.warmup_steps=0"]
    with pytest.MonkeyPatch.context() as patch:  # before the fixture of the test that asks first
        use_cpu(patch)
        return train(folder, "train.steps=6", "checkpoint.every=3", "validation.every=3", *large)
