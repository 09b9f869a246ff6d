"""Shards, images and autoencoders made on the spot; the index cache never leaves the test's folder."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from webdataset.writer import TarWriter

from tests.tiny.autoencoders import kl_autoencoder

Sample = dict[str, Any]


@pytest.fixture(autouse=True)
def index_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tread"


@pytest.fixture
def write_tar() -> Callable[[Path, Iterable[Sample]], Path]:
    """Writes samples ({"__key__": ..., "latent.npy": ..., "cls": ...}) with webdataset's own writer."""

    def write(path: Path, samples: Iterable[Sample]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TarWriter(str(path)) as tar:
            for sample in samples:
                tar.write(sample)
        return path

    return write


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    """Random latents with keys 0000, 0001, ... and labels 0, 1, 2, 0, ..."""

    def make(count: int, shape: tuple[int, ...] = (4, 2, 3), *, first: int = 0) -> list[Sample]:
        rng = np.random.default_rng(first)
        return [
            {"__key__": f"{i:04d}", "latent.npy": rng.normal(size=shape).astype(np.float16), "cls": i % 3}
            for i in range(first, first + count)
        ]

    return make


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of three smooth 40 x 24 PNGs."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for n in range(3):
            small = Image.fromarray(rng.integers(0, 256, (3, 5, 3), dtype=np.uint8))
            small.resize((40, 24)).save(tmp_path / "images" / name / f"{n}.png")
    return tmp_path / "images"


@pytest.fixture
def tiny_vae(tmp_path: Path) -> str:
    """A random AutoencoderKL that halves each side, saved as diffusers saves one."""
    kl_autoencoder(channels=4, stages=2).save_pretrained(tmp_path / "vae")
    return str(tmp_path / "vae")


@pytest.fixture
def npy() -> Callable[[np.ndarray], bytes]:
    def dump(array: np.ndarray) -> bytes:
        stream = io.BytesIO()
        np.save(stream, array)
        return stream.getvalue()

    return dump


@pytest.fixture(scope="session")
def write_clip() -> Callable[[Path, np.ndarray], Path]:
    """Writes frames, uint8 (F, H, W, 3), as a lossless clip, so that they can be compared bit for bit."""

    def write(path: Path, frames: np.ndarray) -> Path:
        import av

        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream("ffv1", rate=10)
            stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
            for pixels in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        return path

    return write
