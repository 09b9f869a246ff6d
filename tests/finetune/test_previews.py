"""Previews: what they load, where it is while they are drawn, and that it goes with them."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.finetune.tasks import make_config, make_task
from tests.tiny.pictures import write_gradients
from tests.tiny.pipelines import TINY, PipelineFolder
from tread.finetune.model.source import Source
from tread.finetune.previews import Previews
from tread.finetune.task import Finetuning

pytestmark = pytest.mark.filterwarnings("ignore")


def task_of(name: str, pipeline_folder: PipelineFolder, folder: Path, **changes: Any) -> Finetuning:
    data = folder / "images"
    if not data.exists():
        write_gradients(data, masked=False)
    settings: dict[str, Any] = {"model_family": TINY[name].family, "validation_prompt": "a fox"}
    settings |= {"validation_num_inference_steps": 3, "validation_guidance": 1.0, "tread_config": None}
    config = make_config(pipeline_folder(name), data, **(settings | changes))
    task = make_task(config, folder)
    task.model.eval()
    return task


def placed(previews: Previews, device: str) -> Previews:
    """The same previews, drawn on a device."""
    there: Any = SimpleNamespace(is_main_process=True, device=torch.device(device), trackers=[])
    return replace(previews, accelerator=there)


class Stopped(Exception):
    """Raised with the pipeline that a preview was about to be drawn by."""


def pipeline_of(task: Finetuning, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    def stop(self: Previews, pipeline: Any, *_: Any) -> None:
        raise Stopped(pipeline)

    monkeypatch.setattr(Previews, "_call", stop)
    with pytest.raises(Stopped) as stopped:
        placed(task._previews, device).draw(task.models, 1)
    return stopped.value.args[0]


@pytest.mark.parametrize(
    ("name", "changes", "loaded"),
    [("flux", {}, {"vae"}), ("wan", {}, {"vae"}), ("wan-a14b", {"experts": "low"}, {"vae", "transformer"})],
)
def test_what_is_loaded_goes_with_the_pictures(
    pipeline_folder: PipelineFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: dict[str, Any],
    loaded: set[str],
) -> None:
    """Without waiting for Python's collector, which a long run leaves little to do."""
    task = task_of(name, pipeline_folder, tmp_path, **changes)
    seen: dict[str, weakref.ref[nn.Parameter]] = {}
    load = Source.pipeline

    def noted(self: Source, *parts: str, **options: Any) -> Any:
        pipeline = load(self, *parts, **options)
        seen.update({part: weakref.ref(next(getattr(pipeline, part).parameters())) for part in loaded})
        return pipeline

    monkeypatch.setattr(Source, "pipeline", noted)
    gc.collect()
    gc.disable()
    try:
        task.preview(1)
        assert seen.keys() == loaded
        assert [part for part, parameter in seen.items() if parameter() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("experts", ["high", "low"])
def test_an_expert_that_is_not_trained_visits_the_device(
    pipeline_folder: PipelineFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    """The meta device stands for a GPU: the pipeline computes there, and the expert's weights are elsewhere."""
    task = task_of("wan-a14b", pipeline_folder, tmp_path, experts=experts)
    monkeypatch.setattr(torch, "meta", torch.cpu, raising=False)  # diffusers asks each device for its module
    pipeline = pipeline_of(task, "meta", monkeypatch)
    other = {"high": "transformer_2", "low": "transformer"}[experts]
    assert pipeline._execution_device.type == pipeline.vae.device.type == "meta"
    assert {parameter.device.type for parameter in getattr(pipeline, other).parameters()} == {"cpu"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("experts", ["high", "low"])
def test_one_expert_draws_with_the_other(
    pipeline_folder: PipelineFolder, tmp_path: Path, experts: str, device: str
) -> None:
    """Before training, an adapter changes nothing: the pictures are those of both experts."""
    pictures = []
    for chosen in (experts, "both"):
        task = task_of("wan-a14b", pipeline_folder, tmp_path, experts=chosen)
        models = {part: model.to(device) for part, model in task.models.items()}
        ((_, path),) = placed(task._previews, device).draw(models, {"both": 2}.get(chosen, 1))
        with Image.open(tmp_path / path) as image:
            pictures.append(np.array(image.convert("RGB"), dtype=np.int64))
    alone, both = pictures
    assert abs(alone - both).max() <= 1, "of 255"
    assert alone.std() > 0, "a picture"


@pytest.mark.parametrize("tiling", [False, True])
def test_tiles_are_for_decoding_too(
    pipeline_folder: PipelineFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiling: bool
) -> None:
    task = task_of("flux-kl", pipeline_folder, tmp_path, vae_enable_tiling=tiling)
    assert pipeline_of(task, "cpu", monkeypatch).vae.use_tiling == tiling


def test_a_size_that_the_model_cannot_draw_is_told(
    pipeline_folder: PipelineFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_gradients(tmp_path / "images", masked=False)
    config = make_config(pipeline_folder("flux"), data, validation_prompt="a cat", validation_resolution="100x64")
    task = make_task(config, tmp_path)
    size = task._previews.width, task._previews.height
    assert size == (96, 64)
    assert (
        "validation_resolution is 100x64; previews are drawn at 96x64, because sides are multiples of 16.\n"
        in capsys.readouterr().out
    )
