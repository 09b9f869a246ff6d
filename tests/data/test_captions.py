"""Captions as they are encoded: trigger word, prefix and suffix; tags shuffled and dropped."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tread.data.captioned.captions import triggered, variants
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.samples import collect
from tread.errors import ConfigError

TAGS = "cat, red hat, outdoors, wind"


def made(caption: str, **settings: Any) -> tuple[str, ...]:
    return variants(caption, DataConfig(instance_data_dir="photos", **settings))


def tags(caption: str) -> list[str]:
    return caption.split(", ")


@pytest.mark.parametrize(
    ("caption", "settings", "expected"),
    [
        ("a dog", {}, "a dog"),
        ("a dog", {"trigger_word": "ohwx"}, "ohwx, a dog"),
        ("a photo of OHWX", {"trigger_word": "ohwx"}, "a photo of OHWX"),
        ("a cathedral", {"trigger_word": "cat"}, "cat, a cathedral"),
        ("a photo of [trigger], smiling", {"trigger_word": "ohwx man"}, "a photo of ohwx man, smiling"),
        ("a dog", {"caption_prefix": "photo of [trigger],", "trigger_word": "x1"}, "photo of x1, a dog"),
        ("a dog", {"caption_prefix": " a photo of  ", "caption_suffix": "in rain"}, "a photo of a dog in rain"),
        ("a dog", {"caption_suffix": ", film grain"}, "a dog, film grain"),
        ("a dog", {"trigger_word": "", "caption_suffix": "."}, "a dog."),
    ],
)
def test_trigger_prefix_and_suffix(caption: str, settings: dict[str, Any], expected: str) -> None:
    assert made(caption, **settings) == (expected,)


def test_prompts_have_the_trigger_in_its_place_alone() -> None:
    assert triggered("a photo of [trigger]", "ohwx") == "a photo of ohwx"
    assert triggered("a photo", "ohwx") == "a photo"
    assert triggered("[trigger]", None) == "[trigger]"


def test_tags_are_shuffled_into_a_bounded_number_of_orders() -> None:
    found = made(TAGS, shuffle_tags=True)
    assert len(found) == 16
    assert {tuple(sorted(tags(one))) for one in found} == {tuple(sorted(tags(TAGS)))}
    assert len(set(found)) > 8, "of 24 orders"
    assert found == made(TAGS, shuffle_tags=True), "they are a function of the caption alone"
    assert found[:3] == made(TAGS, shuffle_tags=True, caption_variants=3)
    assert [one.replace("cat", "dog") for one in found] != list(made(TAGS.replace("cat", "dog"), shuffle_tags=True))


def test_every_order_is_as_likely() -> None:
    """1,024 variants of 3 tags: each of the 6 orders is drawn 171 times, give or take four standard deviations."""
    found = made("a, b, c", shuffle_tags=True, caption_variants=1024)
    counts = [found.count(", ".join(order)) for order in itertools.permutations("abc")]
    assert sum(counts) == 1024
    assert all(abs(count - 1024 / 6) < 4 * (1024 / 6 * 5 / 6) ** 0.5 for count in counts)


def test_the_first_tags_stay() -> None:
    found = made(TAGS, shuffle_tags=True, tag_dropout=0.9, keep_tags=2, trigger_word="ohwx")
    assert all(one.startswith("ohwx, cat, red hat") for one in found)
    assert len({*found}) > 1


def test_tags_are_dropped_as_often_as_asked_and_never_all() -> None:
    found = [tags(one) for one in made(TAGS, tag_dropout=0.25, caption_variants=1024)]
    share = sum(len(one) for one in found) / (4 * 1024)
    assert abs(share - 0.75) < 4 * (0.25 * 0.75 / 4096) ** 0.5
    assert all(one == sorted(one, key=tags(TAGS).index) for one in found), "in their order"
    assert min(len(tags(one)) for one in made(TAGS, tag_dropout=0.99, caption_variants=256)) == 1
    assert all(made(TAGS, tag_dropout=0.99, caption_variants=256))


def test_tags_may_be_separated_otherwise() -> None:
    found = made("a cat | a hat, red | wind", shuffle_tags=True, tag_separator=" | ", caption_variants=4)
    assert all("a hat, red" in one for one in found)
    assert all(one.count("| ") == 2 for one in found)
    assert {*made("1girl hat", shuffle_tags=True, tag_separator=" ")} == {"1girl hat", "hat 1girl"}


def test_samples_have_all_variants_of_all_captions(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    (tmp_path / "0.txt").write_text("a, b\n\nc, d\n")
    settings = {"caption_lines": True, "shuffle_tags": True, "caption_variants": 5, "trigger_word": "x"}
    config = DataConfig(instance_data_dir=str(tmp_path), **settings)
    (sample,) = collect([config], video=False, progress=False).samples
    assert len(sample.captions) == 10
    assert {*sample.captions[:5]} <= {"x, a, b", "x, b, a"}
    assert {*sample.captions[5:]} <= {"x, c, d", "x, d, c"}


def test_a_trigger_without_a_word_is_said(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    (tmp_path / "0.txt").write_text("a photo of [trigger]")
    said: list[str] = []
    collect([DataConfig(instance_data_dir=str(tmp_path), id="a")], video=False, say=said.append, progress=False)
    assert said == ["a: captions of 1 sample have [trigger], but there is no trigger_word"]


def test_several_columns_are_several_captions(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    (tmp_path / "t.csv").write_text("file,short,long\n0.png,dog,a dog in the rain\n")
    config = DataConfig(metadata_file=str(tmp_path / "t.csv"), caption_column=("short", "long"))
    (sample,) = collect([config], video=False, progress=False).samples
    assert sample.captions == ("dog", "a dog in the rain")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tag_dropout": 1.0}, "tag_dropout of data entry 'photos' is 1.0; allowed is 0 <= value < 1"),
        ({"caption_variants": 0}, "caption_variants of data entry 'photos' is 0; allowed is 1 to 1024"),
        ({"keep_tags": -1}, "keep_tags of data entry 'photos' is -1; it must be at least 0"),
        ({"tag_separator": ""}, "tag_separator of data entry 'photos' is ''; it must be a character"),
        ({"loss_weight": -0.5}, "loss_weight of data entry 'photos' is -0.5; it must be at least 0"),
    ],
)
def test_bad_values_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig(instance_data_dir="photos", **settings)
