"""Each test runs on the CPU, in a folder of its own, as a fresh process would."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny.pictures import write_clips, write_shapes
from tests.tiny.pipelines import TINY, PipelineFolder
from tests.tiny.runs import forget
from tests.training.conftest import use_cpu

Tune = Callable[..., dict[str, Any]]
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_cpu(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home-cache"))
    monkeypatch.delenv("TREAD_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    forget()
    yield
    forget()


@pytest.fixture
def tune(pipeline_folder: PipelineFolder, tmp_path: Path) -> Tune:
    """`tune("flux")`: the config of a fine-tune on a tiny pipeline, with six images or two clips beside it."""

    def make(name: str, **changes: Any) -> dict[str, Any]:
        family = TINY[name].family
        write = write_clips if family == "wan" else write_shapes
        data = {"instance_data_dir": str(write(tmp_path / "data")), "resolution": 64, "video": {"num_frames": 5}}
        settings = {
            "model_family": family,
            "pretrained_model_name_or_path": str(pipeline_folder(name)),
            "data": data,
            "tokenizer_max_length": 32,
            "train_batch_size": 2,
            "mixed_precision": "no",
            "validation_prompt": "never encoded",
            "tread_config": ROUTES,
        }
        return settings | changes

    return make
