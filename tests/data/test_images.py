"""An image folder: classes, crops, odd formats, and files that cannot be read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tread.data.images import ImageFolder, list_images, read_image
from tread.errors import ConfigError, DataError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)  # pyright: ignore[reportArgumentType]
    return path


def test_classes_are_the_sorted_subfolders_and_files_are_sorted(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/deep/1.jpg", "a/9.webp", "b/.hidden.png", "a/.cache/x.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_images(tmp_path) == (["a/9.webp", "b/2.PNG", "b/deep/1.jpg"], [0, 1, 1], ["a", "b"])


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "disk" / "deep" / "1.png", Image.new("RGB", (4, 4))).parent
    data = tmp_path / "data"
    save(data / "a" / "0.png", Image.new("RGB", (4, 4)))
    (data / "a" / "more").symlink_to(elsewhere)
    (data / "b").symlink_to(elsewhere.parent)
    (elsewhere / "loop").symlink_to(elsewhere.parent)  # contains the link itself
    files, labels, _ = list_images(data)
    assert (files, labels) == (["a/0.png", "a/more/1.png", "b/deep/1.png"], [0, 0, 1])


def test_a_link_to_nothing_is_an_unreadable_file_and_no_class(tmp_path: Path) -> None:
    for folder in (tmp_path / "classes" / "a", tmp_path / "flat"):
        save(folder / "0.png", Image.new("RGB", (4, 4)))
        (folder / "1.png").symlink_to(tmp_path / "gone.png")
    for folder in ("classes", "flat"):
        images = ImageFolder(tmp_path / folder, size=4)
        assert len(images) == 2
        assert [line.split()[-1] for line in next(iter(images.contents().values()))][1] == "unreadable"  # pyright: ignore
        with pytest.raises(DataError, match=r"cannot read image .*1\.png"):
            images[1]
    (tmp_path / "classes" / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"classes/b is a link to nothing: restore the folder"):
        list_images(tmp_path / "classes")


def test_a_folder_without_subfolders_is_one_class(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        save(tmp_path / "flowers" / name, Image.new("RGB", (4, 4)))
    folder = ImageFolder(tmp_path / "flowers", size=2)
    assert (folder.num_classes, folder.classes, folder.files) == (1, ["flowers"], ["a.png", "b.png"])
    assert folder[1][1] == 0


def test_the_largest_centred_square_is_kept(tmp_path: Path) -> None:
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, :4], pixels[:, 4:8], pixels[:, 8:12], pixels[:, 12:] = RED, GREEN, BLUE, RED
    path = save(tmp_path / "a.png", Image.fromarray(pixels))
    np.testing.assert_array_equal(read_image(path, 8), pixels[:, 4:12])
    upright = pixels.swapaxes(0, 1)
    path = save(tmp_path / "b.png", Image.fromarray(upright))
    np.testing.assert_array_equal(read_image(path, 8), upright[4:12])


def test_shrinking_averages_instead_of_picking_pixels(tmp_path: Path) -> None:
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    small = read_image(save(tmp_path / "a.png", Image.fromarray(stripes)), 8)
    assert np.abs(small[1:-1, 1:-1].astype(int) - 127).max() <= 2


def test_values_reach_minus_one_and_one_channels_first(tmp_path: Path) -> None:
    save(tmp_path / "a.png", Image.new("RGB", (4, 4), (255, 0, 51)))
    x, label = ImageFolder(tmp_path, size=4)[0]
    assert x.dtype == torch.float32
    torch.testing.assert_close(x, torch.tensor([1.0, -1.0, -0.6]).view(3, 1, 1).expand(3, 4, 4))
    assert label == 0


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), BLUE)
    image.paste(RED, (0, 0, 8, 4))  # red above blue
    exif = Image.Exif()
    exif[0x0112] = 6  # shown by turning a quarter clockwise: red is then on the right
    read = read_image(save(tmp_path / "a.png", image, exif=exif), 8)
    assert tuple(read[4, 7]) == RED
    assert tuple(read[4, 0]) == BLUE


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    rgba = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    rgba.paste((255, 0, 0, 255), (0, 0, 2, 4))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([*RED, *GREEN])
    palette.paste(0, (0, 0, 2, 4))
    for name, image, options in (
        ("rgba.png", rgba, {}),
        ("la.png", rgba.convert("LA"), {}),
        ("palette.png", palette, {"transparency": 1}),
        ("palette.gif", palette, {"transparency": 1}),
    ):
        read = read_image(save(tmp_path / name, image, **options), 4)
        assert tuple(read[0, 3]) == WHITE, name
        assert tuple(read[0, 0]) == (RED if name != "la.png" else (76, 76, 76)), name


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16"])
def test_every_pixel_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 4), 65535, dtype=np.uint16))
        image.paste(0, (0, 0, 2, 4))
    else:
        image = Image.new("RGB", (4, 4), WHITE)
        image.paste((0, 0, 0), (0, 0, 2, 4))
        image = image.convert(mode)
    read = read_image(save(tmp_path / "a.tiff", image), 4)
    assert read.shape == (4, 4, 3)
    assert tuple(read[0, 0]) == (0, 0, 0)
    assert tuple(read[0, 3]) == WHITE


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", Image.fromarray(np.full((4, 4), 128 * 257, dtype=np.uint16)))
    assert (read_image(path, 4) == 128).all()


def test_flips_follow_the_position_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "a.png", Image.new("RGB", (4, 4)))
    folder = ImageFolder(tmp_path, size=4, flip=True)
    x = torch.arange(2000 * 12.0).view(2000, 3, 2, 2)
    positions = torch.arange(5000, 7000)
    flipped = folder.prepare(x, 7, positions)
    mirrored = (flipped == x.flip(-1)).all((1, 2, 3))
    assert torch.equal(flipped, torch.where(mirrored[:, None, None, None], x.flip(-1), x))
    assert 900 < int(mirrored.sum()) < 1100
    assert torch.equal(folder.prepare(x[500:600], 7, positions[500:600]), flipped[500:600])
    assert not torch.equal(folder.prepare(x, 8, positions), flipped)
    assert torch.equal(ImageFolder(tmp_path, size=4, flip=False).prepare(x, 7, positions), x)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    whole = save(tmp_path / "a.jpg", Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)))
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(whole.read_bytes()[:1000])
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.webp").write_text("not an image")
    folder = ImageFolder(tmp_path, size=8)
    assert folder[0][0].shape == (3, 8, 8)
    for i, name in ((1, "cut.jpg"), (2, "empty.png"), (3, "text.webp")):
        with pytest.raises(DataError, match=rf"cannot read image \S*{name} \(.+\): remove it or save it again$"):
            folder[i]


def test_float_pixels_are_refused_because_their_range_is_unknown(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tiff", Image.fromarray(np.ones((4, 4), dtype=np.float32)))
    with pytest.raises(DataError, match="floating-point pixels have no known range"):
        read_image(path, 4)


def test_folders_that_make_no_dataset_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no image folder at .*/missing"):
        ImageFolder(tmp_path / "missing", size=8)
    with pytest.raises(DataError, match=r"no images \(.*\.png.*\) in "):
        ImageFolder(tmp_path, size=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"class folder .*/empty has no images"):
        ImageFolder(tmp_path, size=8)
    save(tmp_path / "empty" / "a.png", Image.new("RGB", (4, 4)))
    save(tmp_path / "loose.png", Image.new("RGB", (4, 4)))
    with pytest.raises(DataError, match=r"1 image beside its class folders, the first is loose\.png: move"):
        ImageFolder(tmp_path, size=8)
    with pytest.raises(ConfigError, match=r"data\.size is 0"):
        ImageFolder(tmp_path, size=0)
