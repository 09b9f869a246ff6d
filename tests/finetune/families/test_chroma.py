"""Chroma: what its mask hides and what it only weighs down, checkpointed layers, and flash."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tread
from tests.finetune.tasks import ROUTES, make_config
from tests.finetune.trained import PROMPTS, drawn, opened, text_of
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.families.chroma import Chroma
from tread.finetune.model.source import Source
from tread.finetune.run import load_models

pytestmark = pytest.mark.filterwarnings("ignore::tread.routing.risks.RiskWarning")
Folder = Callable[[str], Path]


@pytest.fixture
def chroma(pipeline_folder: Folder) -> tuple[Chroma, Any]:
    return opened(pipeline_folder("chroma"), "chroma")


def test_the_mask_keeps_words_and_one_token_of_padding(chroma: tuple[Chroma, Any]) -> None:
    family, pipeline = chroma
    batch = text_of(family, pipeline, [*PROMPTS, ""])
    words = [len(ids) for ids in pipeline.tokenizer([*PROMPTS, ""]).input_ids]
    assert batch["text.mask"].dtype == batch["text.embeds"].dtype
    assert batch["text.mask"].sum(1).tolist() == [count + 1 for count in words]
    for row, count in zip(batch["text.mask"], words, strict=True):
        assert row[: count + 1].min() == 1


@torch.no_grad()
def test_other_padding_is_weighed_down_and_not_hidden(chroma: tuple[Chroma, Any]) -> None:
    """So it must be the pipeline's own, which a family that cut it off would lose."""
    family, pipeline = chroma
    batch = text_of(family, pipeline, ["two dogs"])
    noisy, time = drawn(1, 16, 4, 6), torch.tensor([0.5])
    changed = batch["text.embeds"].clone()
    changed[:, 300:] += 1
    answers = [
        family.predict(pipeline.transformer, noisy, time, batch | {"text.embeds": text})
        for text in (batch["text.embeds"], changed)
    ]
    assert (answers[0] - answers[1]).abs().max() > 1e-4


def test_checkpointing_keeps_the_mask(chroma: tuple[Chroma, Any]) -> None:
    """Routed, and to the bit; the stock model's own checkpointing forgets it in single layers."""
    family, pipeline = chroma
    batch = text_of(family, pipeline, PROMPTS)
    noisy, time = drawn(2, 16, 4, 6), torch.tensor([0.5, 0.9])

    def gradients(*, stock: bool = False, **settings: Any) -> list[Tensor]:
        config = make_config(Path(family.source.name_or_path), "data", model_family="chroma", compile=False, **settings)
        (model,) = load_models(config, family, torch.device("cpu")).values()
        if stock:
            model.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
        tread.attach(model, ROUTES).set_step(3)
        family.predict(model, noisy, time, batch).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    settings: dict[str, Any] = {"model_type": "full"}
    plain = gradients(gradient_checkpointing=False, **settings)
    for how in (True, "selective", "dense"):
        assert_close(gradients(gradient_checkpointing=how, **settings), plain, rtol=0, atol=0)
    off = gradients(gradient_checkpointing=False, stock=True, **settings)
    assert max((a - b).abs().max() for a, b in zip(off, plain, strict=True)) > 1e-5


def test_a_flash_is_warned_of_and_another_text_encoder_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    place = shutil.copytree(pipeline_folder("chroma"), tmp_path / "Chroma1-Flash")
    family = open_family("chroma", Source(str(place)))
    assert family.distilled
    assert (family.steps, family.guidance) == (16, 1.0)
    config = place / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace('"d_model": 16', '"d_model": 24'))
    with pytest.raises(ConfigError, match=r"text_encoder of .* width 24, but the transformer reads 16"):
        open_family("chroma", Source(str(place)))
