"""Pixels in their bucket: upright, RGB, cut and scaled as Pillow's own `fit` does it; animations and clips by frame."""

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.tiny import pictures
from tread.data.captioned.buckets import Bucket, Crop, bucket_of, crop_of
from tread.data.captioned.entries import DataConfig, VideoConfig
from tread.data.captioned.pixels import count_frames, probe, read_pixels
from tread.data.captioned.tables import Cell
from tread.errors import DataError

RNG = np.random.default_rng(0)


def whole(width: int, height: int, frames: int = 1) -> Crop:
    return Crop(Bucket(width, height, frames), 0.0, 0.0, 1.0, 1.0)


def noise_image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    channels = len(mode)
    return Image.fromarray(RNG.integers(0, 256, (height, width, channels), dtype=np.uint8), mode)


WriteClip = Callable[[Path, np.ndarray], Path]


@pytest.mark.parametrize("size", [(96, 64), (50, 200), (64, 64), (20, 30)])
def test_the_centre_is_what_pillows_fit_gives(tmp_path: Path, size: tuple[int, int]) -> None:
    image = noise_image(*size)
    image.save(tmp_path / "a.png")
    config = DataConfig(instance_data_dir="x", resolution=64)
    bucket = bucket_of(size, config, 16)
    pixels = read_pixels(tmp_path / "a.png", crop_of(size, bucket, config, "0" * 40))
    fitted = ImageOps.fit(image, (bucket.width, bucket.height), method=Image.Resampling.BICUBIC)
    assert pixels.shape == (1, bucket.height, bucket.width, 3)
    assert np.abs(pixels[0].numpy().astype(int) - np.asarray(fitted).astype(int)).max() <= 1


def test_a_cut_without_scaling_copies_pixels(tmp_path: Path) -> None:
    image = noise_image(80, 40)
    image.save(tmp_path / "a.png")
    crop = Crop(Bucket(20, 40), 0.25, 0.0, 0.5, 1.0)
    np.testing.assert_array_equal(read_pixels(tmp_path / "a.png", crop)[0].numpy(), np.asarray(image)[:, 20:40])


def test_sizes_are_those_of_the_upright_picture(tmp_path: Path) -> None:
    image = noise_image(48, 16)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.png", exif=exif)
    assert probe(tmp_path / "a.png") == (16, 48, 1)
    turned = image.transpose(Image.Transpose.ROTATE_270)
    np.testing.assert_array_equal(read_pixels(tmp_path / "a.png", whole(16, 48))[0].numpy(), np.asarray(turned))


def test_a_picture_of_another_shape_than_was_planned_for_is_refused(tmp_path: Path) -> None:
    noise_image(32, 16).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"its 32x16 pixels have another shape than its header says"):
        read_pixels(tmp_path / "a.png", whole(16, 32))


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_animations_are_clips_over_white(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGBA", (8, 8), (0, 0, 0, 0)) for _ in range(3)]
    for n, frame in enumerate(frames):
        frame.paste((255, 0, 0, 255), (n, 0, n + 1, 8))
    options = {"save_all": True, "append_images": frames[1:], "duration": 50, "disposal": 2}
    frames[0].save(tmp_path / f"a.{suffix}", **({**options, "lossless": True} if suffix == "webp" else options))
    assert probe(tmp_path / f"a.{suffix}") == (8, 8, 3)
    read = read_pixels(tmp_path / f"a.{suffix}", whole(8, 8, 3))
    for n in range(3):
        assert read[n, 4, n].tolist() == [255, 0, 0]
        assert (read[n, 4] == 255).all(-1).sum() == 7
    assert torch.equal(read_pixels(tmp_path / f"a.{suffix}", whole(8, 8)), read[:1])


def test_clips_give_their_first_frames(tmp_path: Path, write_clip: WriteClip) -> None:
    frames = RNG.integers(0, 256, (7, 16, 32, 3), dtype=np.uint8)
    path = write_clip(tmp_path / "a.mkv", frames)
    assert probe(path) == (32, 16, 7)
    np.testing.assert_array_equal(read_pixels(path, whole(32, 16, 5)).numpy(), frames[:5])
    with pytest.raises(DataError, match=r"cannot read \S+a\.mkv \(it ends after 7 of 9 frames\): remove it or"):
        read_pixels(path, whole(32, 16, 9))


@pytest.mark.parametrize(
    ("rate", "indices"),
    [
        (5.0, [0, 2, 4, 6]),
        (20.0, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]),
        (10.0, [0, 1, 2, 3, 4, 5, 6]),
        (7.5, [0, 1, 2, 4, 5, 6]),  # at 0, 0.13, 0.27, 0.4, 0.53 and 0.67 s of a clip that ends after 0.7
        (1.0, [0]),
    ],
)
@pytest.mark.parametrize("suffix", ["mkv", "webp"])
def test_a_frame_rate_chooses_the_frames_that_are_shown_then(
    tmp_path: Path, write_clip: WriteClip, rate: float, indices: list[int], suffix: str
) -> None:
    """A clip and an animation of 10 frames per second."""
    frames = RNG.integers(0, 256, (7, 16, 32, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    if suffix == "mkv":
        write_clip(path, frames)
    else:
        first, *rest = (Image.fromarray(frame) for frame in frames)
        first.save(path, save_all=True, append_images=rest, duration=100, lossless=True)
    assert count_frames(path, rate) == len(indices)
    crop = replace(whole(32, 16, len(indices)), frame_rate=rate)
    np.testing.assert_array_equal(read_pixels(path, crop).numpy(), frames[indices])
    with pytest.raises(DataError, match=f"it ends after {len(indices)} of {len(indices) + 1} frames"):
        read_pixels(path, replace(crop, bucket=Bucket(32, 16, len(indices) + 1)))


@pytest.mark.parametrize(("frames", "rate"), [(8, 24.0), (16, 24.0), (24, 24.0), (24, 20.0), (188, 25.0)])
def test_every_counted_frame_can_be_read(tmp_path: Path, frames: int, rate: float) -> None:
    """Matroska rounds times to milliseconds: film at 23.976 frames per second ends a little earlier."""
    pytest.importorskip("av")
    content = RNG.integers(0, 256, (frames, 8, 8, 3), dtype=np.uint8)
    path = pictures.write_clip(tmp_path / "a.mkv", content, None, Fraction(24000, 1001))
    count = count_frames(path, rate)
    shown = [int(n / rate * 24000 / 1001) for n in range(count)]
    crop = replace(whole(8, 8, count), frame_rate=rate)
    np.testing.assert_array_equal(read_pixels(path, crop).numpy(), content[shown])
    assert frames / (24000 / 1001) * rate - count < 0.1


@pytest.mark.parametrize("rate", [24, 30, 60])
def test_a_clip_read_at_its_own_rate_has_every_frame_once(tmp_path: Path, rate: int) -> None:
    """Rounded to milliseconds, frame 2 of 30 per second starts at 67 ms, after the 66.7 that it is read at."""
    pytest.importorskip("av")
    content = RNG.integers(0, 256, (90, 8, 8, 3), dtype=np.uint8)
    path = pictures.write_clip(tmp_path / "a.mkv", content, None, rate)
    assert count_frames(path, float(rate)) == 90
    crop = replace(whole(8, 8, 90), frame_rate=float(rate))
    np.testing.assert_array_equal(read_pixels(path, crop).numpy(), content)


def test_frames_of_any_duration_are_shown_when_a_player_shows_them(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), (40 * n, 0, 0)) for n in range(4)]
    durations = [100, 400, 50, 250]  # shown first after 0, 0.1, 0.5 and 0.55 s
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:], duration=durations)
    assert count_frames(tmp_path / "a.png", 10.0) == 8
    read = read_pixels(tmp_path / "a.png", replace(whole(8, 8, 8), frame_rate=10.0))
    assert (read[:, 0, 0, 0] // 40).tolist() == [0, 1, 1, 1, 1, 2, 3, 3]


def test_a_mirrored_crop_is_the_crop_mirrored(tmp_path: Path) -> None:
    noise_image(80, 40).save(tmp_path / "a.png")
    crop = Crop(Bucket(20, 40), 0.25, 0.0, 0.5, 1.0)
    straight, mirrored = (read_pixels(tmp_path / "a.png", replace(crop, mirrored=side)) for side in (False, True))
    assert torch.equal(mirrored, straight.flip(2))
    assert str(crop) != str(replace(crop, mirrored=True)) != str(replace(crop, frame_rate=8.0))


def test_clips_are_turned_as_the_container_says(tmp_path: Path) -> None:
    """A phone held upright writes frames that lie on their side, and a matrix in the track's header."""
    import av

    frame = np.zeros((32, 64, 3), dtype=np.uint8)
    frame[:, :32, 0] = 255  # the left half is red
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    # x' = -y, y' = x: shown by turning a quarter clockwise, so that the left half comes to the top
    content[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    assert probe(path)[:2] == (32, 64)
    read = read_pixels(path, whole(32, 64))[0]
    assert read[8, 16, 0] > 200
    assert read[56, 16, 0] < 50


def test_a_cell_of_a_dataset_is_a_file() -> None:
    image, stream = noise_image(8, 6), io.BytesIO()
    image.save(stream, "png")
    cell = Cell([{"image": {"bytes": stream.getvalue()}}], "image", 0, "dogs[0]")
    assert probe(cell) == (8, 6, 1)
    np.testing.assert_array_equal(read_pixels(cell, whole(8, 6))[0].numpy(), np.asarray(image))


def test_broken_files_are_named(tmp_path: Path) -> None:
    good = tmp_path / "good.jpg"
    noise_image(64, 64).save(good)
    (tmp_path / "cut.jpg").write_bytes(good.read_bytes()[:1500])
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.mp4").write_text("no clip")
    for name in ("empty.png", "text.mp4", "missing.webp"):
        with pytest.raises(DataError, match=rf"cannot read \S+{name} \(.+\): remove it or save it again"):
            probe(tmp_path / name)
    assert probe(tmp_path / "cut.jpg") == (64, 64, 1)  # only pixels tell
    with pytest.raises(DataError, match=r"cannot read \S+cut\.jpg"):
        read_pixels(tmp_path / "cut.jpg", whole(16, 16))


def test_a_gigantic_picture_is_to_be_scaled_down(tmp_path: Path) -> None:
    """Of 225 million pixels; it need not be saved again, as a broken one must."""
    Image.new("1", (15_000, 15_000)).save(tmp_path / "map.png")
    with pytest.raises(DataError, match=r"cannot read \S+map\.png, which has too many pixels \(.+\): scale it down$"):
        probe(tmp_path / "map.png")


@pytest.mark.realdata
def test_camera_clips(real_data: Path) -> None:
    found = {path.name: probe(path) for path in sorted((real_data / "video_clips").iterdir())}
    assert found["carphone_pristine.mp4"] == (176, 144, 120)
    assert found["v_SoccerJuggling_g23_c01.avi"] == (320, 240, 240)
    config = DataConfig(instance_data_dir="x", resolution=64, video=VideoConfig(num_frames=10))
    for name, (width, height, frames) in found.items():
        bucket = bucket_of((width, height), config, 16, frames=frames, frame_factor=4)
        pixels = read_pixels(real_data / "video_clips" / name, crop_of((width, height), bucket, config, "0" * 40))
        assert pixels.shape == (9, bucket.height, bucket.width, 3)
        steps = (pixels[1:].float() - pixels[:-1].float()).abs().mean((1, 2, 3))
        apart = (pixels[8].float() - pixels[0].float()).abs().mean()
        assert 0 < steps.mean() < apart  # it moves, and neighbours are nearer than the ends


@pytest.mark.realdata
def test_emoji_lie_on_white(real_data: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(real_data / "emoji3d" / "emoji3d_256.zip") as archive:
        name = archive.namelist()[0]
        archive.extract(name, tmp_path)
    alpha = np.asarray(Image.open(tmp_path / name))[..., 3]
    pixels = read_pixels(tmp_path / name, whole(256, 256))[0].numpy()
    assert (pixels[alpha == 0] == 255).all()
    assert (pixels[alpha == 255] < 255).any()
