"""Runs to report on: tiny real ones, made once, and ones whose every number a test has written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.report.conftest import alone
from tests.tiny.pictures import write_shapes
from tests.tiny.pipelines import PipelineFolder
from tests.tiny.runs import train
from tests.training.conftest import use_cpu

__all__ = ["alone"]

SCHEDULE = {"warmup_steps": 4, "cooldown_fraction": 0.25, "levels": 2}
ROUTES = [
    {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2},
    {"selection_ratio": 0.25, "start_layer_idx": 3, "end_layer_idx": 3},
]
DRAWN = ["sample.every=4", "sample.steps=1", "sample.per_class=2", "sample.classes=4", "validation.every=4"]
SIXTEEN = ["train.steps=16", "log.every=2", *DRAWN]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `routed` and `dense`, 16 steps each, as `tread train` left them; not to be written to."""
    folder = tmp_path_factory.mktemp("runs")
    config = json.dumps({"routes": ROUTES, "schedule": SCHEDULE})
    with pytest.MonkeyPatch.context() as patch:  # before the fixture of the test that asks first
        use_cpu(patch)
        train(folder / "routed", *SIXTEEN, f"model.tread_config={config}")
        train(folder / "dense", *SIXTEEN, "model=dit", "model.tread_config=null")
    return folder


@pytest.fixture
def routed(runs: Path, tmp_path: Path) -> Path:
    """A copy of the routed run, to change."""
    return Path(shutil.copytree(runs / "routed", tmp_path / "copy"))


@pytest.fixture
def tune_config(pipeline_folder: PipelineFolder, tmp_path: Path) -> dict[str, Any]:
    """The config of a fine-tune of a tiny FLUX on six images, with two prompts."""
    return {
        "model_family": "flux",
        "pretrained_model_name_or_path": str(pipeline_folder("flux")),
        "data": {"instance_data_dir": str(write_shapes(tmp_path / "data")), "resolution": 64},
        **{"tokenizer_max_length": 32, "train_batch_size": 2, "mixed_precision": "no", "report_to": "none"},
        **{"validation_prompt": ["a red circle", "<b>bold</b>"], "validation_num_inference_steps": 1},
        **{"validation_steps": 2, "max_train_steps": 4, "eval_steps_interval": 2, "num_eval_images": 2},
        **{"logging_steps": 2, "cache_dir": str(tmp_path / "cache"), "output_dir": str(tmp_path / "tuned")},
        "tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]},
    }


def write_run(
    folder: Path, lines: list[dict[str, Any]], *, facts: dict[str, Any] | None = None, **settings: Any
) -> Path:
    """A pretraining run with these metrics and settings; `facts` go to its record."""
    folder.mkdir(parents=True)
    given = {"model": {"name": "tread"}, "train": {"steps": 100, "batch_size": 10}, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(given))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"step": 0, "command": "tread train", "device": "cpu", "processes": 1, "versions": {"torch": "2"}}
    (folder / "run.json").write_text(json.dumps({"facts": facts or {}, "starts": [start]}))
    return folder
