"""Preparing data: one encoder in memory at a time, none beside the transformer."""

import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.finetune.tasks import make_config, make_task
from tests.tiny.pictures import write_gradients
from tests.tiny.pipelines import TINY, PipelineFolder
from tread.finetune.source import Source

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
