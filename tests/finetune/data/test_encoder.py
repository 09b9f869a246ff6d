"""Text encoders larger than the GPU: their weights wait in host memory, and captions are read as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup
from torch import Tensor, nn

from tests.tiny.pipelines import FIRST, TINY
from tread.finetune.data import encoder
from tread.finetune.data.encoder import Encoder
from tread.finetune.families import open_family
from tread.finetune.model.source import Source

CPU = torch.device("cpu")
SOME = ("flux", "qwen_image")
CASES = [name if name in SOME else pytest.param(name, marks=pytest.mark.contract) for name in FIRST]


@pytest.fixture
def distant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that a computation cannot read: what is offloaded reads as NaN."""
    stored: dict[int, Tensor] = {}

    def tensors(group: Any) -> list[Tensor]:
        own = [x for module in group.modules for x in (*module.parameters(), *module.buffers())]
        return [*own, *group.parameters, *group.buffers]

    def offload(group: Any) -> None:
        for x in tensors(group):
            stored.setdefault(id(x), x.data.clone())
            x.data = torch.full_like(x.data, float("nan")) if x.is_floating_point() else x.data

    def onload(group: Any) -> None:
        for x in tensors(group):
            x.data = stored[id(x)]

    monkeypatch.setattr(ModuleGroup, "_offload_to_memory", offload)
    monkeypatch.setattr(ModuleGroup, "_onload_from_memory", onload)


@pytest.mark.usefixtures("distant")
@pytest.mark.parametrize("name", CASES)
def test_captions_are_read_by_weights_that_are_copied_layer_by_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TINY[name](tmp_path)
    family = open_family(TINY[name].family, Source(str(tmp_path)))
    said: list[str] = []
    weights: list[list[Tensor]] = []
    parts = (*family.text_parts, *family.needed_parts)

    def encode(free: float) -> list[dict[str, Tensor]]:
        monkeypatch.setattr(encoder, "free_bytes", lambda _: free)
        text = Encoder(lambda: family.source.pipeline(*parts, given=family.stand_ins()), lambda: None, CPU, said.append)
        models = [part for part in text.pipeline.components.values() if isinstance(part, nn.Module)]
        weights.append([weight for model in models for weight in model.parameters()])
        with torch.no_grad():
            return family.encode_text(text.pipeline, ["a cat on a mat"])

    (whole,) = encode(float("inf"))
    assert said == []
    (copied,) = encode(0)
    assert ["would not fit on the GPU" in line for line in said] == [True] * bool(weights[0])
    assert all(bool(weight.isnan().all()) for weight in weights[1])
    assert whole.keys() == copied.keys()
    for key, value in whole.items():
        assert copied[key].equal(value), key
