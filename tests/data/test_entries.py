"""Data entries: shorthands, defaults, and one sentence for each mistake."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tread.config.schema import parse
from tread.data.captioned.entries import DataConfig, VideoConfig, data_configs
from tread.errors import ConfigError


def test_a_place_a_mapping_and_a_list_of_both_are_entries(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").touch()
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "data" / "train-0.parquet").touch()
    assert data_configs("photos") == [{"instance_data_dir": "photos"}]
    assert data_configs({"instance_data_dir": "photos", "repeats": 2}) == [
        {"instance_data_dir": "photos", "repeats": 2}
    ]
    assert data_configs(["photos/all.CSV", {"id": "b"}]) == [{"metadata_file": "photos/all.CSV"}, {"id": "b"}]
    for name in ("saved", "hub"):
        place = str(tmp_path / name)
        assert data_configs(place) == [{"type": "huggingface", "dataset_name": place}]


def test_shorthands_that_are_neither_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data has the entry 3; it must be a path or a mapping"):
        data_configs([3])
    with pytest.raises(ConfigError, match=r"data is an empty list; it must name at least one folder"):
        data_configs([])


def test_an_entry_of_the_existing_trainers_form_is_parsed() -> None:
    entry = {
        "id": "minecraft",
        "type": "local",
        "dataset_type": "video",
        "instance_data_dir": "clips",
        "caption_strategy": "instanceprompt",
        "instance_prompt": "minecraft",
        "crop": True,
        "crop_style": "random",
        "crop_aspect": "square",
        "resolution": 480,
        "resolution_type": "pixel_area",
        "minimum_image_size": 128,
        "maximum_image_size": 1536,
        "target_downsample_size": 1024,
        "repeats": 4,
        "video": {"num_frames": 61, "min_frames": 61},
    }
    config = parse(DataConfig, entry)
    assert (config.name, config.repeats, config.video.num_frames) == ("minecraft", 4, 61)
    assert parse(DataConfig, {"instance_data_dir": "a/photos"}).name == "photos"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, r"data entry 'data' of type 'local' has no instance_data_dir"),
        ({"type": "huggingface", "id": "x"}, r"data entry 'x' of type 'huggingface' has no dataset_name"),
        ({"type": "csv", "instance_data_dir": "a"}, r"of type 'csv' has no metadata_file"),
        (
            {"metadata_file": "a.xlsx"},
            r"metadata_file of data entry 'a.xlsx' is 'a.xlsx'; it must end with .csv, .jsonl",
        ),
        ({"instance_data_dir": "a", "caption_strategy": "jsonl"}, r"is 'jsonl'; that needs metadata_file"),
        ({"instance_data_dir": "a", "caption_strategy": "huggingface"}, r"needs type 'huggingface'; write 'textfile'"),
        ({"instance_data_dir": "a", "caption_strategy": "instanceprompt"}, r"that needs instance_prompt"),
        (
            {"type": "huggingface", "dataset_name": "a", "caption_strategy": "textfile"},
            r"has no \.txt files; write 'huggingface'",
        ),
        ({"instance_data_dir": "a", "repeats": 0}, r"repeats of data entry 'a' is 0; it must be at least 1"),
        ({"instance_data_dir": "a", "resolution": 0}, r"resolution of data entry 'a' is 0\.0; it must be above 0"),
        (
            {"instance_data_dir": "a", "resolution": 1.0},
            r"it counts pixels; for megapixels, use resolution_type 'area'",
        ),
        (
            {"instance_data_dir": "a", "resolution": 512, "resolution_type": "area"},
            r"with resolution_type 'area' it counts megapixels",
        ),
        ({"instance_data_dir": "a", "video": {"num_frames": 0}}, r"video\.num_frames is 0; it must be at least 1"),
        ({"instance_data_dir": "a", "crop_style": "corner"}, r"crop_style is 'corner'; it must be one of 'center'"),
    ],
)
def test_mistakes_name_the_setting(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(DataConfig, entry)


def test_the_page_lists_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for cls, prefix in ((DataConfig, ""), (VideoConfig, "video.")):
        for field in dataclasses.fields(cls):
            if field.name != "video":
                assert f"| `{prefix}{field.name}` | `{json.dumps(field.default)}` |" in page
