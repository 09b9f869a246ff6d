"""Folders of pictures and clips, each with its caption in a file beside it."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SHAPES = {
    "a red circle": ("ellipse", "red"),
    "two dogs": ("rectangle", "brown"),
    "a photo of a very blue square on white paper": ("rectangle", "blue"),
    "green": ("ellipse", "green"),
    "an orange ball that rolls": ("ellipse", "orange"),
    "a picture of a black box, seen from above": ("rectangle", "black"),
}
"""By caption: captions of several lengths, and what to draw."""


def write_noise(folder: Path, shapes: Sequence[tuple[int, int]] = ((64, 64),) * 4 + ((48, 96),) * 2) -> Path:
    """Random pixels of each shape (rows, columns): `0.png` is "picture 0"."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, shape in enumerate(shapes):
        Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return folder


def write_gradients(folder: Path, *, masked: bool) -> Path:
    """Two gradients of 64 x 64, with masks of the left third of the first and a corner of the second."""
    folder.mkdir()
    for i, box in enumerate([(0, 0, 20, 63), (40, 40, 63, 63)]):
        Image.linear_gradient("L").rotate(90 * i).resize((64, 64)).convert("RGB").save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"picture {i}")
        if masked:
            mask = Image.new("L", (64, 64))
            ImageDraw.Draw(mask).rectangle(box, fill=128 + 64 * i)
            mask.save(folder / f"{i}_mask.png")
    return folder


def write_shapes(folder: Path) -> Path:
    """Six shapes on transparent ground, 128 x 128: `0.png`, `1.png`, ..."""
    folder.mkdir()
    for number, caption in enumerate(SHAPES):
        draw(caption, at=10 * number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    return folder


def write_clips(folder: Path) -> Path:
    """Two shapes that move from left to right in 16 frames of 64 x 64, as GIF."""
    folder.mkdir()
    for number, caption in enumerate(list(SHAPES)[:2]):
        first, *rest = (draw(caption, at=4 * frame).convert("RGB").resize((64, 64)) for frame in range(16))
        first.save(folder / f"{number}.gif", save_all=True, append_images=rest, duration=60)
        (folder / f"{number}.txt").write_text(caption)
    return folder


def write_sounding(folder: Path, *, rate: int = 24) -> Path:
    """Two lossless clips of 16 frames of 64 x 64, with a tone at each ear."""
    folder.mkdir()
    for number, caption in enumerate(list(SHAPES)[:2]):
        shape = [draw(caption, at=4 * frame).convert("RGB").resize((64, 64)) for frame in range(16)]
        seconds = np.arange(16000) / 16000
        tones = [np.sin(2 * np.pi * pitch * seconds) / 2 for pitch in (300 + 200 * number, 1000)]
        write_clip(folder / f"{number}.mkv", np.stack([np.asarray(frame) for frame in shape]), np.stack(tones), rate)
        (folder / f"{number}.txt").write_text(caption)
    return folder


def write_clip(
    path: Path, frames: np.ndarray, sound: np.ndarray | None, rate: int | Fraction, sampled: int = 16000
) -> Path:
    """A lossless clip of frames, uint8 (F, H, W, 3), and sound in [-1, 1], (channels, N)."""
    import av

    with av.open(str(path), "w") as container:
        video: Any = container.add_stream("ffv1", rate=rate)
        video.width, video.height, video.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        layout = "stereo" if sound is not None and len(sound) == 2 else "mono"
        audio: Any = None if sound is None else container.add_stream("pcm_s16le", rate=sampled, layout=layout)
        for pixels in frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        if sound is not None:
            samples = (sound * 32767).round().astype(np.int16).T  # (N, channels)
            for start in range(0, len(samples), 1024):  # a packet, as AAC has them
                packed = np.ascontiguousarray(samples[start : start + 1024]).reshape(1, -1)
                frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
                frame.sample_rate, frame.pts = sampled, start
                container.mux(audio.encode(frame))
            container.mux(audio.encode())
    return path


def draw(caption: str, *, at: int) -> Image.Image:
    """The shape of a caption on transparent ground, `at` pixels from the left."""
    shape, colour = SHAPES[caption]
    image = Image.new("RGBA", (128, 128))
    getattr(ImageDraw.Draw(image), shape)((at, 20, at + 60, 100), fill=colour)
    return image
