"""The sound of clips: its samples at a rate, where it begins and ends, and clips without any."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny.pictures import write_clip
from tread.data.captioned.sounds import clip_rate, has_sound, read_sound
from tread.errors import DataError

FRAMES = np.zeros((5, 32, 32, 3), dtype=np.uint8)
RATE = 16000


def ramps(count: int, channels: int = 2) -> np.ndarray:
    """Other values at each place and ear."""
    return np.stack([np.linspace(-0.9, 0.9 - ear / 4, count) for ear in range(channels)])


def test_samples_are_those_of_the_clip(tmp_path: Path) -> None:
    sound = ramps(8000)
    path = write_clip(tmp_path / "a.mkv", FRAMES, sound, 10)
    found = read_sound(path, 0.25, RATE)
    assert found.shape == (2, 4000)
    np.testing.assert_allclose(found.numpy(), sound[:, :4000], atol=1e-4)
    assert (has_sound(path), clip_rate(path)) == (True, 10)


def test_silence_follows_a_sound_that_ends_early(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", FRAMES, ramps(1600), 10)
    found = read_sound(path, 0.5, RATE)
    assert found.shape == (2, 8000)
    assert (found[:, :1500] != 0).all(0).float().mean() > 0.99
    assert torch.equal(found[:, 1600:], torch.zeros(2, 6400))


def test_one_channel_is_both_ears_and_other_rates_are_resampled(tmp_path: Path) -> None:
    time = np.arange(24000) / 48000
    path = write_clip(tmp_path / "a.mkv", FRAMES, np.sin(2 * np.pi * 440 * time)[None] / 2, 10, sampled=48000)
    found = read_sound(path, 0.4, RATE)
    assert torch.equal(found[0], found[1])
    expected = np.sin(2 * np.pi * 440 * np.arange(6400) / RATE) / 2
    np.testing.assert_allclose(found[0, 100:-100], expected[100:-100], atol=5e-3)


def test_packets_follow_each_other_without_clicks(tmp_path: Path) -> None:
    """Matroska rounds their times to milliseconds, 44 samples."""
    sound = ramps(22050)
    path = write_clip(tmp_path / "a.mkv", FRAMES, sound, 10, sampled=44100)
    np.testing.assert_allclose(read_sound(path, 0.5, 44100).numpy(), sound, atol=1e-4)


def test_what_has_no_sound(tmp_path: Path) -> None:
    mute = write_clip(tmp_path / "mute.mkv", FRAMES, None, 10)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert [has_sound(mute), has_sound(tmp_path / "a.png")] == [False, False]
    (tmp_path / "broken.mp4").write_bytes(b"no clip")
    with pytest.raises(DataError, match=r"broken\.mp4"):
        has_sound(tmp_path / "broken.mp4")
