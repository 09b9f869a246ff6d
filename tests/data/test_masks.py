"""Masks: the crop of their picture, the grey value as weight, and no pixel of weight lost on the way to the latents."""

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from tread.data.captioned.buckets import Bucket, Crop, bucket_of, crop_of
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.masks import MaskKind, latent_weight, looks_like_text, read_mask
from tread.data.captioned.pixels import read_pixels
from tread.errors import DataError

WHOLE = Crop(Bucket(16, 16), 0.0, 0.0, 1.0, 1.0)


def save(path: Path, image: Image.Image) -> Path:
    image.save(path)
    return path


def drawn(shape: str) -> torch.Tensor:
    """A mask of 256 x 256 with one shape."""
    image = Image.new("L", (256, 256))
    draw = ImageDraw.Draw(image)
    if shape == "letters":
        draw.text((20, 100), "TREAD 2025", fill=255, font_size=40)
    if shape == "lines":
        draw.multiline_text((10, 10), "some lines\nof handwriting\nin a letter", fill=255, font_size=32)
    if shape == "figure":
        draw.ellipse((60, 30, 190, 240), fill=255)
    if shape == "box":
        draw.rectangle((10, 110, 245, 140), fill=255)
    if shape == "pole":
        draw.rectangle((120, 0, 123, 255), fill=255)
    return torch.from_numpy(np.array(image, dtype=np.float32)) / 255


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("letters", True), ("lines", True), ("figure", False), ("box", False), ("pole", False), ("nothing", False)],
)
def test_letters_look_like_text(shape: str, expected: bool) -> None:
    assert looks_like_text(drawn(shape)) is expected
    assert looks_like_text(1 - drawn(shape)) is False


def test_a_mirrored_crop_mirrors_the_mask(tmp_path: Path) -> None:
    path = save(tmp_path / "m.png", Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)))
    straight, mirrored = (read_mask(path, replace(WHOLE, mirrored=side), "mask") for side in (False, True))
    assert torch.equal(mirrored, straight.flip(1))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**32 - 1))
def test_a_latent_weighs_nothing_only_where_no_pixel_does(factor: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # few pixels, some of the smallest weight that a file can hold
    mask = torch.rand(32, 16, generator=generator)
    mask = torch.where(mask < 0.02, 1 / 255, torch.where(mask > 0.99, 1.0, 0.0))
    weight = latent_weight(mask, factor)
    assert weight.shape == (32 // factor, 16 // factor)
    cells = mask.reshape(32 // factor, factor, 16 // factor, factor)
    assert torch.equal(weight > 0, (cells > 0).any(3).any(1))
    torch.testing.assert_close(weight, cells.mean((1, 3)))


@settings(max_examples=30, deadline=None)
@given(st.integers(5, 80), st.integers(5, 80), st.data())
def test_no_pixel_of_the_file_is_lost_by_scaling(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, data: st.DataObject
) -> None:
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[y, x] = 1  # the darkest grey that is not black
    path = save(tmp_path_factory.mktemp("mask") / "m.png", Image.fromarray(pixels))
    mask = read_mask(path, WHOLE, "mask")
    assert mask.sum() > 0
    rows, columns = torch.nonzero(mask, as_tuple=True)
    for found, at, size in ((rows, y, height), (columns, x, width)):  # where it was, and nowhere else
        assert found.min() >= np.floor(at * 16 / size) - 1
        assert found.max() <= np.ceil((at + 1) * 16 / size)


@pytest.mark.parametrize(("kind", "weight"), [("mask", 51 / 255), ("segmentation", 1.0)])
def test_what_a_grey_pixel_weighs(tmp_path: Path, kind: MaskKind, weight: float) -> None:
    grey = Image.new("L", (16, 16), 51)
    grey.paste(0, (0, 0, 8, 16))
    for name, image in (
        ("l.png", grey),
        ("rgb.png", grey.convert("RGB")),
        ("16.png", Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)),
    ):
        mask = read_mask(save(tmp_path / name, image), WHOLE, kind)
        assert (mask[:, :8] == 0).all(), name
        torch.testing.assert_close(mask[:, 8:], torch.full((16, 8), weight), msg=name)


def test_dark_colours_are_segments_and_transparency_is_black(tmp_path: Path) -> None:
    blue = Image.new("RGB", (16, 16), (0, 0, 3))  # its grey value is 0
    assert (read_mask(save(tmp_path / "a.png", blue), WHOLE, "segmentation") == 1).all()
    clear = Image.new("RGBA", (16, 16), (255, 255, 255, 0))
    clear.paste((255, 255, 255, 128), (0, 0, 8, 16))
    mask = read_mask(save(tmp_path / "b.png", clear), WHOLE, "mask")
    torch.testing.assert_close(mask[:, :8], torch.full((16, 8), 128 / 255))
    assert (mask[:, 8:] == 0).all()


def test_a_mask_of_another_size_gets_the_crop_of_its_picture(tmp_path: Path) -> None:
    picture = np.zeros((64, 192, 3), dtype=np.uint8)
    picture[16:32, 96:128] = 255
    config = DataConfig(instance_data_dir="x", resolution=64, crop=True, crop_style="random")
    crop = crop_of((192, 64), bucket_of((192, 64), config, 16), config, "a" * 40)
    shown = read_pixels(save(tmp_path / "a.png", Image.fromarray(picture)), crop)[0, ..., 0] / 255
    small = Image.fromarray(picture[::4, ::4, 0])
    mask = read_mask(save(tmp_path / "a_mask.png", small), crop, "mask")
    assert shown.sum() > 0
    assert (mask - shown).abs().mean() < 0.03


def test_a_broken_mask_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.png").write_text("no mask")
    with pytest.raises(DataError, match=r"cannot read \S+m\.png"):
        read_mask(tmp_path / "m.png", WHOLE, "mask")


@pytest.mark.realdata
def test_trimaps_of_pets_cover_the_animal(real_data: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(real_data / "oxford-pets" / "pets256_512.zip") as archive:
        archive.extract("trimaps/Abyssinian_129.png", tmp_path)
    trimap = np.asarray(Image.open(tmp_path / "trimaps" / "Abyssinian_129.png")) // 85  # stored as 85, 170, 255
    animal = Image.fromarray(np.where(trimap == 2, 0, 255).astype(np.uint8))
    size = animal.size
    config = DataConfig(instance_data_dir="x", resolution=256, resolution_type="pixel", crop=True)
    crop = crop_of(size, bucket_of(size, config, 16), config, "0" * 40)
    weight = latent_weight(read_mask(save(tmp_path / "m.png", animal), crop, "mask"), 8)
    assert weight.shape == (32, 32)
    assert 0.05 < weight.mean() < 0.95
    assert ((weight == 0) | (weight == 1)).float().mean() > 0.5  # a shape, not a blur
