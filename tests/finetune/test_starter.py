"""Starter configs: for every family one that is read back, fits the model and the data, and explains each key."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import tread
from tests.tiny.pictures import write_clips
from tests.tiny.pipelines import EVERY, TINY
from tread.config.fields import fields_of
from tread.errors import ConfigError
from tread.finetune.config import read_config
from tread.finetune.families import TUNE_FAMILIES, family_class, open_family
from tread.finetune.model.source import Source
from tread.finetune.preflight import look
from tread.finetune.settings import FinetuneConfig
from tread.finetune.starter import starter_config
from tread.routing.risks import RiskWarning, adapter_risks, layer_risks


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three pictures of about 150 x 100 pixels with captions that YAML could misread."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, caption in enumerate(["yes", "a sign: 'no' # 1", "1e-4"]):
        Image.new("RGB", (150 + number, 100), (90 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    return folder


def folder_of(photos: Path, name: str) -> Path:
    """A folder beside the photos with files of the same names."""
    folder = photos.with_name(name)
    folder.mkdir()
    for path in photos.glob("*.png"):
        Image.new("L", (150, 100)).save(folder / path.name)
    return folder


def read_back(text: str, tmp_path: Path, *settings: str) -> FinetuneConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_config(path, settings)


@pytest.mark.parametrize("name", TINY)
def test_a_starter_fits_its_model_and_data(
    name: str, pipeline_folder: Callable[[str], Path], photos: Path, tmp_path: Path
) -> None:
    model, tiny = pipeline_folder(name), TINY[name]
    if tiny.reference:
        folder_of(photos, "photos-reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = starter_config(tiny.family, str(model), str(photos))
    config, source = read_back(text, tmp_path), Source(str(model))
    assert ("experts: both" in text) == ("transformer_2" in source.parts)
    family = open_family(config.model_family, source)
    plan = config.plan()
    assert plan is not None
    plan = plan.resolve(source.depth)
    assert tread.attach(source.transformer("transformer", dtype=torch.float32), plan).plan.depth == source.depth
    assert adapter_risks(plan) == []
    assert layer_risks(plan) == [] or source.depth < 5
    (entry,) = config.data_entries()
    (other,) = read_back(text, tmp_path, "data=others", "resolution=32").data_entries()
    assert other == {"instance_data_dir": "others", "resolution": 32, "resolution_type": "pixel_area"}
    assert entry["resolution"] % family.multiple == 0
    assert 0 < entry["resolution"] <= 123
    assert config.train_batch_size == (1 if tiny.one_length else 3)  # all there are
    shows = tiny.reference or not family.needs_image
    assert config.prompts == (("yes",) if shows else ())
    assert ("begin with an image: set validation_prompt" in text) == (not shows)
    assert config.base_model_precision == "no_change"
    assert "fp8-matmul" in text, "words with hyphens stay whole"
    assert (config.validation_image is not None) == tiny.reference
    assert entry.get("conditioning_type") == ("reference" if tiny.reference else None)


@pytest.mark.parametrize("name", [*EVERY, "wan-i2v", "hunyuanvideo1-i2v"])
def test_a_run_of_a_starter_would_begin(
    name: str, pipeline_folder: Callable[[str], Path], photos: Path, tmp_path: Path
) -> None:
    """`tread finetune --check` finds nothing to refuse."""
    data = write_clips(tmp_path / "clips") if family_class(TINY[name].family).video else photos
    if TINY[name].reference:
        folder_of(photos, "photos-reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RiskWarning)
        found = look(read_back(starter_config(TINY[name].family, str(pipeline_folder(name)), str(data)), tmp_path))
    assert found == ([], [])


@pytest.mark.parametrize("family", TUNE_FAMILIES)
def test_a_starter_without_the_model_is_whole_and_says_so(family: str, photos: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no model at pretrained_model_name_or_path"):
        text = starter_config(family, str(tmp_path / "none"), str(photos))
    config = read_back(text, tmp_path)
    assert config.model_family == family
    assert config.max_train_steps >= 500


def test_every_key_has_its_line(photos: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no model at"):
        text = starter_config("sd3", str(tmp_path / "none"), str(photos))
    lines = text.splitlines()
    docs = {name: field.doc for name, field in fields_of(FinetuneConfig).items()}
    for key in yaml.safe_load(text):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{key}:"))
        comment = " ".join(line.removeprefix("# ") for line in lines[max(0, at - 2) : at] if line.startswith("# "))
        assert comment.endswith(docs[key][-40:]), key
    assert all(len(line) <= 120 for line in lines if str(tmp_path) not in line)


def test_masks_beside_the_data_are_used(photos: Path, tmp_path: Path) -> None:
    masks = folder_of(photos, "photos_masks")
    with pytest.warns(UserWarning, match="no model at"):
        config = read_back(starter_config("sd3", str(tmp_path / "none"), str(photos)), tmp_path)
    (entry,) = config.data_entries()
    assert (entry["conditioning_data_dir"], entry["conditioning_type"]) == (str(masks), "mask")
    for path in [*masks.iterdir()]:
        path.rename(path.with_stem(f"of-another-folder-{path.stem}"))
    with pytest.warns(UserWarning, match="no model at"):
        config = read_back(starter_config("sd3", str(tmp_path / "none"), str(photos)), tmp_path)
    assert "conditioning_data_dir" not in config.data_entries()[0]


def test_a_model_of_another_family_is_told(
    pipeline_folder: Callable[[str], Path], photos: Path, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="model_family is 'flux', but .* set model_family to 'sd3'"):
        read_back(starter_config("flux", str(pipeline_folder("sd3")), str(photos)), tmp_path)
    with pytest.raises(ConfigError, match=f"model_family is 'sdxl'. Choose one of: {', '.join(TUNE_FAMILIES)}"):
        starter_config("sdxl", str(tmp_path), str(photos))


def test_data_without_captions_or_without_anything(photos: Path, tmp_path: Path) -> None:
    for path in photos.glob("*.txt"):
        path.unlink()
    config = told(f"{photos} has no captions, so file names are used", str(photos), tmp_path)
    assert config.data_entries()[0]["caption_strategy"] == "filename"
    assert config.prompts == ("0",)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert told(str(empty), str(empty), tmp_path).data_entries()[0]["instance_data_dir"] == str(empty)


def told(words: str, data: str, tmp_path: Path) -> Any:
    with pytest.warns(UserWarning, match="no model at") as said:
        text = starter_config("sd3", str(tmp_path / "none"), data)
    assert any(words in str(warning.message) for warning in said)
    return read_back(text, tmp_path)
