"""Real tokenizers, a real autoencoder, real pictures and clips: what tiny ones made by code cannot show."""

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from tests.finetune.tasks import ROUTES
from tests.finetune.trained import opened
from tests.tiny.pipelines import PipelineFolder
from tests.tiny.pipelines.flux import build
from tread.finetune.run import finetune
from tread.finetune.settings import FinetuneConfig
from tread.training.metrics import read_metrics

pytestmark = [pytest.mark.realdata, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def flux(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX with the real tokenizers and the real taef1."""
    folder = tmp_path_factory.mktemp("flux")
    build(real=real_data).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def emoji(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six captioned emoji."""
    folder = tmp_path_factory.mktemp("emoji")
    with open(real_data / "emoji3d" / "captions.csv", newline="", encoding="utf-8") as file:
        captions = {row["file"]: row["caption"] for row in csv.DictReader(file)}
    with zipfile.ZipFile(real_data / "emoji3d" / "emoji3d_256.zip") as images:
        names = [name for name in images.namelist() if Path(name).name in captions][:6]
        for name in names:
            (folder / Path(name).name).write_bytes(images.read(name))
            (folder / Path(name).with_suffix(".txt").name).write_text(captions[Path(name).name])
    return folder


def train(model: Path, family: str, data: dict[str, Any], folder: Path) -> list[float]:
    """Validation losses of a few routed steps."""
    config = FinetuneConfig(
        model_family=family,
        pretrained_model_name_or_path=str(model),
        data={"resolution": 64, **data},
        output_dir=str(folder / "run"),
        cache_dir=str(folder / "cache"),
        max_train_steps=6,
        eval_steps_interval=3,
        num_eval_images=2,
        train_batch_size=2,
        learning_rate=0.02,
        mixed_precision="no",
        report_to="none",
        tread_config=ROUTES,
    )
    return [line["val_loss"] for line in read_metrics(finetune(config)) if "val_loss" in line]


def test_texts_are_the_stock_pipeline_s(flux: Path, emoji: Path) -> None:
    family, pipeline = opened(flux, "flux")
    captions = ["", *(path.read_text() for path in sorted(emoji.glob("*.txt"))), "fünf schöne Übergrößen ☃ " * 90]
    texts = family.collate_text(family.encode_text(pipeline, captions))
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(captions, prompt_2=captions, max_sequence_length=512)
    assert_close(texts["embeds"], embeds)
    assert_close(texts["pooled"], pooled)
    assert len({tuple(row.tolist()) for row in pooled}) == len(captions)


def test_latents_of_a_photo_have_unit_scale(flux: Path, real_data: Path) -> None:
    """taef1's are FLUX's normalised latents themselves, and it is deterministic."""
    with zipfile.ZipFile(real_data / "oxford-pets/pets256_512.zip") as archive:
        name = next(name for name in archive.namelist() if name.startswith("images/"))
        with archive.open(name) as file:
            photo = Image.open(file).convert("RGB").resize((256, 256))
    family, pipeline = opened(flux, "flux")
    encoded = family.encode_pixels(
        pipeline, torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    )
    assert encoded.keys() == {"mean"}
    assert encoded["mean"].shape == (1, 16, 32, 32)
    assert 0.5 < encoded["mean"].std() < 2


def test_a_few_steps_on_emoji_lower_the_dense_loss(flux: Path, emoji: Path, tmp_path: Path) -> None:
    losses = train(flux, "flux", {"instance_data_dir": str(emoji)}, tmp_path)
    assert losses[-1] < losses[0]


def test_a_few_steps_on_a_camera_clip_lower_the_dense_loss(
    pipeline_folder: PipelineFolder, real_data: Path, tmp_path: Path
) -> None:
    data = tmp_path / "clips"
    data.mkdir()
    for number in range(2):
        (data / f"{number}.mp4").write_bytes((real_data / "video_clips" / "basketball.mp4").read_bytes())
        (data / f"{number}.txt").write_text("a game of basketball")
    losses = train(
        pipeline_folder("wan"), "wan", {"instance_data_dir": str(data), "video": {"num_frames": 5}}, tmp_path
    )
    assert losses[-1] < losses[0]
