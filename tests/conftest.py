"""Shared by all tests: one torch thread (two test processes, two cores), tiny pipelines, a browser, the real data."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.browser import Browser, missing

torch.set_num_threads(1)
with suppress(ImportError):  # a GPU machine may lack it
    import hypothesis

    hypothesis.settings.register_profile(
        "no clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("no clock")
pytest.register_assert_rewrite("tests.tiny", "tests.programs", "tests.attach", "tests.finetune", "tests.kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):  # a folder of that name is a keyword too
                item.add_marker(skip)


UNFREEZE = gc.unfreeze


@pytest.fixture(scope="session", autouse=True)
def frozen() -> Iterator[None]:
    """Runs unfreeze what they froze, and with it all that the tests have imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect(frozen: None) -> None:
    """Runs collect garbage, which takes 0.2 s and more with all that torch, diffusers and transformers made."""
    gc.freeze()


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector as a program has it."""
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    gc.unfreeze()


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`pipeline_folder("flux")`: a tiny FLUX as `save_pretrained` leaves it; not to be written to."""
    from tests.tiny.pipelines import TINY

    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            TINY[name](folders[name])
        return folders[name]

    return find


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, started by the first test of a page; without one such tests are skipped with the reason."""
    if reason := missing():
        pytest.skip(reason)
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images and weights: TREAD_TEST_DATA, else shared/data beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("TREAD_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set TREAD_TEST_DATA")
    return folder
