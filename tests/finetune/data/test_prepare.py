"""Preparing data: one encoder in memory at a time, none beside the transformer."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch import nn

from tests.finetune.tasks import make_config, make_task
from tests.tiny.pictures import write_gradients, write_noise
from tests.tiny.pipelines import TINY, PipelineFolder
from tread.finetune.data.prepare import prepare
from tread.finetune.families import open_family
from tread.finetune.model.source import Source

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["flux-kl", "qwen_image", "wan"])
def test_each_stage_has_what_it_needs_and_no_more(
    pipeline_folder: PipelineFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    data = write_gradients(tmp_path / "images", masked=False)
    config = make_config(pipeline_folder(name), data, model_family=TINY[name].family)
    weights: dict[str, weakref.ref[nn.Parameter]] = {}
    beside: dict[str, list[str]] = {}
    """By what is loaded: what is still there."""
    pipeline, transformer = Source.pipeline, Source.transformer

    def note(part: str) -> None:
        beside[part] = [other for other, weight in weights.items() if weight() is not None]

    def load_pipeline(self: Source, *parts: str, **options: Any) -> Any:
        models = [part for part in parts if part in self.parts and ("encoder" in part or part == "vae")]
        note(models[0])
        loaded = pipeline(self, *parts, **options)
        weights.update({part: weakref.ref(next(getattr(loaded, part).parameters())) for part in models})
        return loaded

    def load_transformer(self: Source, part: str, **options: Any) -> nn.Module:
        note(part)
        return transformer(self, part, **options)

    monkeypatch.setattr(Source, "pipeline", load_pipeline)
    monkeypatch.setattr(Source, "transformer", load_transformer)
    make_task(config, tmp_path)
    assert beside == {"text_encoder": [], "vae": [], "transformer": []}


def test_one_batch_is_of_the_most_frequent_bucket_that_is_trained_on(
    pipeline_folder: PipelineFolder, tmp_path: Path
) -> None:
    """Of two wide and three tall pictures beside four square ones for validation."""
    shapes = {"trained": ((48, 96), (96, 48), (48, 96), (96, 48), (96, 48)), "held": ((64, 64),) * 4}
    folders = {name: str(write_noise(tmp_path / name, sizes)) for name, sizes in shapes.items()}
    entries = [
        {"instance_data_dir": folders["trained"], "resolution": 64},
        {"instance_data_dir": folders["held"], "resolution": 64, "dataset_type": "eval"},
    ]
    config = make_config(pipeline_folder("flux"), tmp_path, cache_dir=str(tmp_path / "cache"))
    config = replace(config, data=tuple(entries))
    family = open_family("flux", Source(config.pretrained_model_name_or_path))
    data = prepare(config, family, Accelerator(cpu=True), tmp_path, batches=1)
    assert [Path(str(entry.sample.media)).name for entry in data.train.entries] == ["1.png", "3.png"]
    assert len(list((tmp_path / "cache" / "latents").rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("name", ["flux", "qwen_image"])
def test_captions_that_are_cut_off_are_told(
    pipeline_folder: PipelineFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The stock pipeline only logs it, and commands do not show the logs of libraries."""
    data = write_gradients(tmp_path / "images", masked=False)
    caption = " ".join(["a photo of a cat"] * 200)
    min(data.glob("*.txt")).write_text(caption)
    config = make_config(
        pipeline_folder(name), data, model_family=TINY[name].family, cache_dir=str(tmp_path / "cache"),
        tokenizer_max_length=64,
    )  # fmt: skip
    family = open_family(config.model_family, Source(config.pretrained_model_name_or_path), 64)
    prepare(config, family, Accelerator(cpu=True), tmp_path)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "cut off" in line]
    assert line.startswith("1 caption has more than the 64 tokens that are read, so the end is cut off (the first has ")
    assert line.endswith("shorten it, or raise tokenizer_max_length if the model allows it.")
    prepare(config, family, Accelerator(cpu=True), tmp_path)  # nothing is encoded, so nothing is told again
    assert "cut off" not in capsys.readouterr().out
