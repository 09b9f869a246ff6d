"""Latents: scaling, moments, the choice between the two kinds, workers, and bad samples."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tread.data import latents as latents_file
from tread.data.latents import VAES, Latents, decide_kind, sample_moments
from tread.data.order import Order, StepSampler, Visited
from tread.errors import ConfigError, DataError


def test_samples_come_back_as_written_and_scaled(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    written = samples(7)
    write_tar(tmp_path / "s-0.tar", written[:4])
    write_tar(tmp_path / "s-1.tar", written[4:])
    data = Latents(tmp_path, vae="sd", num_classes=3)
    assert (len(data), data.shape, data.kind) == (7, (4, 2, 3), "sample")
    for i, sample in enumerate(written):
        x, label = data[i]
        assert x.dtype == torch.float32
        assert label == sample["cls"]
        np.testing.assert_array_equal(x.numpy(), sample["latent.npy"].astype(np.float32))
    x = torch.stack([data[i][0] for i in range(7)])
    torch.testing.assert_close(data.prepare(x, 0, torch.arange(7)), x * 0.18215, rtol=0, atol=0)


@pytest.mark.parametrize("pattern", ["train-*.tar", "train-{0..1}.tar", "{train-0,train-1}.tar", "train-[01].tar"])
def test_only_the_split_that_the_pattern_names_is_read(
    tmp_path: Path, write_tar: Callable, samples: Callable, pattern: str
) -> None:
    """The other split has another size, labels out of range and a shard that is no tar: none of it is opened."""
    written = samples(7)
    write_tar(tmp_path / "train-0.tar", written[:4])
    write_tar(tmp_path / "train-1.tar", written[4:])
    write_tar(tmp_path / "val-0.tar", [sample | {"cls": 999} for sample in samples(3, (4, 8, 8), first=50)])
    (tmp_path / "val-1.tar").write_bytes(b"no tar")
    data = Latents(f"{tmp_path}/{pattern}", vae="sd", num_classes=3)
    assert [*data.contents()] == ["train-0.tar", "train-1.tar"]
    assert len(data) == 7
    for i, sample in enumerate(written):
        np.testing.assert_array_equal(data[i][0].numpy(), sample["latent.npy"].astype(np.float32))
    with pytest.raises(DataError, match=r"val-1\.tar is truncated or not a plain tar"):
        Latents(tmp_path, vae="sd", num_classes=3)


@pytest.mark.parametrize(
    ("vae", "channels", "scale", "shift"),
    [("sd", 4, 0.18215, 0), ("sdxl", 4, 0.13025, 0), ("sd3", 16, 1.5305, 0.0609), ("flux", 16, 0.3611, 0.1159)],
)
def test_named_vaes(vae: str, channels: int, scale: float, shift: float) -> None:
    x = torch.randn(2, channels, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(VAES[vae].to_model(x), (x - shift) * scale)
    torch.testing.assert_close(VAES[vae].to_latent(VAES[vae].to_model(x)), x)
    assert VAES[vae].channels == channels


def test_moments_have_the_right_mean_and_spread() -> None:
    count = 20_000
    mean = torch.tensor([[3.0, -1.0]]).view(1, 2, 1, 1)
    logvar = torch.tensor([[0.0, -2.0]]).view(1, 2, 1, 1)
    moments = torch.cat([mean, logvar], dim=1).expand(count, 4, 1, 1)
    drawn = sample_moments(moments, 0, 1, torch.arange(count))
    assert drawn.shape == (count, 2, 1, 1)
    standard = (drawn - mean) / (0.5 * logvar).exp()
    torch.testing.assert_close(standard.mean(0), torch.zeros(2, 1, 1), rtol=0, atol=0.03)
    torch.testing.assert_close(standard.std(0), torch.ones(2, 1, 1), rtol=0, atol=0.03)
    assert abs(np.corrcoef(standard[:, 0, 0, 0], standard[:, 1, 0, 0])[0, 1]) < 0.03


def test_moments_agree_with_diffusers_given_the_same_noise() -> None:
    """With mean 0 and logvar 0 the draw is the noise itself; diffusers' distribution does the rest."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    moments = 40 * torch.randn(3, 8, 2, 2, generator=torch.Generator().manual_seed(0))  # beyond both clamps
    positions = torch.tensor([5, 0, 9])
    eps = sample_moments(torch.zeros(3, 8, 2, 2), 3, 1, positions)
    reference = DiagonalGaussianDistribution(moments)
    torch.testing.assert_close(sample_moments(moments, 3, 1, positions), reference.mean + reference.std * eps)


def test_a_draw_depends_on_seed_and_position_alone(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    data = Latents(write_tar(tmp_path / "a.tar", samples(6, (8, 2, 2))), vae="sd", num_classes=3)
    assert (data.kind, data.shape) == ("moments", (4, 2, 2))
    x = torch.stack([data[i][0] for i in range(6)])
    positions = torch.arange(100, 106)
    whole = data.prepare(x, 7, positions)
    assert whole.shape == (6, 4, 2, 2)
    parts = [data.prepare(x[i : i + 2], 7, positions[i : i + 2]) for i in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.isclose(data.prepare(x, 8, positions), whole).any()
    assert not torch.isclose(data.prepare(x, 7, positions + 6), whole).any()


def test_the_scale_comes_after_the_draw(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    shard = write_tar(tmp_path / "a.tar", samples(2, (32, 2, 2)))
    scaled = Latents(shard, vae="flux", num_classes=3)
    plain = Latents(shard, vae="none", kind="moments", num_classes=3)
    x, positions = scaled[0][0][None], torch.tensor([4])
    torch.testing.assert_close(scaled.prepare(x, 1, positions), (plain.prepare(x, 1, positions) - 0.1159) * 0.3611)


def test_auto_compares_the_channels_with_the_vaes() -> None:
    assert decide_kind("auto", "sd", 4) == "sample"
    assert decide_kind("auto", "sd", 8) == "moments"
    assert decide_kind("auto", "flux", 16) == "sample"
    assert decide_kind("auto", "flux", 32) == "moments"
    assert decide_kind("moments", "sdxl", 8) == "moments"
    assert decide_kind("sample", "none", 8) == "sample"
    assert decide_kind("moments", "none", 8) == "moments"


@pytest.mark.parametrize(
    ("kind", "vae", "channels", "message"),
    [
        ("auto", "none", 8, r"data\.kind=auto needs a VAE .* data\.vae is none: set data\.kind to sample"),
        ("auto", "sd", 16, r"have 16 channels, data\.vae=sd with data\.kind=auto means 4 or 8: change data\.vae"),
        ("sample", "sd", 8, r"have 8 channels, data\.vae=sd with data\.kind=sample means 4: "),
        ("moments", "flux", 16, r"have 16 channels, data\.vae=flux with data\.kind=moments means 32: "),
        ("moments", "none", 5, r"5 stored channels are not mean and logvar"),
        ("mean", "sd", 4, r"data\.kind is 'mean'\. .*Choose one of: auto, sample, moments"),
    ],
)
def test_a_kind_that_does_not_fit_is_refused(kind: Any, vae: str, channels: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide_kind(kind, vae, channels)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_read_what_the_parent_reads(
    tmp_path: Path, write_tar: Callable, samples: Callable, start_method: str
) -> None:
    for n in range(3):
        write_tar(tmp_path / f"s-{n}.tar", samples(8, first=8 * n))
    data = Latents(tmp_path, vae="sd", num_classes=3)
    data[23]  # a file open in the parent, whose offset a forked worker would move
    order = Order(24, seed=0)
    sampler = StepSampler(order, batch=4, micro_steps=1, rank=0, world=1, start_step=0, steps=12)
    loader = DataLoader(Visited(data), batch_sampler=sampler, num_workers=2, multiprocessing_context=start_method)
    for (x, labels, positions), visits in zip(loader, sampler, strict=True):
        assert torch.equal(x, torch.stack([data[visit.sample][0] for visit in visits]))
        assert labels.tolist() == [data[visit.sample][1] for visit in visits]
        assert positions.tolist() == [visit.position for visit in visits]


def test_few_files_stay_open(
    tmp_path: Path, write_tar: Callable, samples: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents_file, "_OPEN_FILES", 2)
    for n in range(5):
        write_tar(tmp_path / f"s-{n}.tar", samples(2, first=2 * n))
    data = Latents(tmp_path, vae="sd", num_classes=3)
    before = set(Path("/proc/self/fd").iterdir())
    for i in (0, 9, 4, 2, 0, 6, 8, 1):
        np.testing.assert_array_equal(data[i][0].numpy(), samples(2, first=i // 2 * 2)[i % 2]["latent.npy"])
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 2
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[7][0], data[7][0])


def test_previews_stretch_each_image(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    data = Latents(write_tar(tmp_path / "a.tar", samples(2)), vae="sd", num_classes=3)
    x = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 1000.0  # not among the three shown
    images = data.to_images(x)
    assert (images.shape, images.dtype) == ((2, 5, 6, 3), torch.uint8)
    for image, latent in zip(images, x, strict=True):
        assert (image.min(), image.max()) == (0, 255)
        assert image.flatten().argmax() == latent[:3].permute(1, 2, 0).flatten().argmax()
    assert data.to_images(x[:, :2]).shape == (2, 5, 6, 1)
    assert not data.to_images(torch.full((1, 4, 2, 2), 3.0)).any()


def test_a_label_outside_the_classes_is_found_before_training(
    tmp_path: Path, write_tar: Callable, samples: Callable
) -> None:
    write_tar(tmp_path / "a.tar", samples(3))
    broken = samples(3, first=3)
    broken[1]["cls"] = 7
    write_tar(tmp_path / "b.tar", broken)
    message = (
        r"sample 0004 in .*b\.tar has label 7, outside 0\.\.2 \(1 such sample, the largest label is 7\): "
        r"set data\.num_classes or correct the labels"
    )
    with pytest.raises(DataError, match=message):
        Latents(tmp_path, vae="sd", num_classes=3)
    assert Latents(tmp_path, vae="sd", num_classes=8)[4][1] == 7
    broken[1]["cls"] = -1
    write_tar(tmp_path / "b.tar", broken)
    with pytest.raises(DataError, match=r"has label -1, outside 0\.\.7"):
        Latents(tmp_path, vae="sd", num_classes=8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_named(tmp_path: Path, write_tar: Callable, samples: Callable, bad: float) -> None:
    broken = samples(3)
    broken[2]["latent.npy"][1, 0, 2] = bad
    data = Latents(write_tar(tmp_path / "a.tar", broken), vae="sd", num_classes=3)
    assert data[1][0].isfinite().all()
    with pytest.raises(DataError, match=r"sample 0002 in .*a\.tar has NaN or infinite values: encode it again"):
        data[2]


def test_shapes_that_differ_are_named(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    for n, shape in enumerate([(4, 2, 3), (4, 2, 4), (4, 3, 2)]):
        write_tar(tmp_path / f"s-{n}.tar", samples(2, shape, first=2 * n))
    message = r"sample 0002 in .*s-1\.tar has shape \(4, 2, 4\), the first sample has \(4, 2, 3\): keep"
    with pytest.raises(DataError, match=message):
        Latents(tmp_path, vae="sd", num_classes=3)
    data = Latents(f"{tmp_path}/s-{{0,2}}.tar", vae="sd", num_classes=3)  # of equal size: found when read
    with pytest.raises(DataError, match=r"sample 0004 in .*s-2\.tar has shape \(4, 3, 2\)"):
        data[2]


def test_float16_and_float32_may_be_mixed(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    mixed = samples(2)
    mixed[1]["latent.npy"] = mixed[1]["latent.npy"].astype(np.float32)
    data = Latents(write_tar(tmp_path / "a.tar", mixed), vae="sd", num_classes=3)
    np.testing.assert_array_equal(data[1][0].numpy(), mixed[1]["latent.npy"])


def test_arrays_in_column_order_and_with_long_headers(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    """Each twice: the second array of a header is read without parsing it again."""
    rows = samples(4)
    expected = [row["latent.npy"].copy() for row in rows]
    for row in rows[:2]:
        row["latent.npy"] = in_version(np.asfortranarray(row["latent.npy"]), (1, 0))
    for row in rows[2:]:
        row["latent.npy"] = in_version(row["latent.npy"], (2, 0))
    data = Latents(write_tar(tmp_path / "a.tar", rows), vae="sd", num_classes=3)
    for i in range(4):
        np.testing.assert_array_equal(data[i][0].numpy(), expected[i].astype(np.float32))


def in_version(array: np.ndarray, version: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version)
    return stream.getvalue()


def test_arrays_that_are_no_latents_are_named(
    tmp_path: Path, write_tar: Callable, npy: Callable, samples: Callable
) -> None:
    good = npy(np.zeros((4, 2, 2), np.float32))
    for latent, message in (
        (npy(np.zeros((4, 2, 2), np.int64)), r"latent\.npy of sample 0 in .*a\.tar is int64: store float16"),
        (npy(np.zeros((1, 4, 2, 2), np.float32)), r"has shape \(1, 4, 2, 2\), not \(channels, height, width\)"),
        (good[:-8], r"latent\.npy of sample 0 in .*a\.tar is not a readable array \(.+\): write"),
        (b"rubbish", r"latent\.npy of sample 0 in .*a\.tar is not a readable array \(.+\): write"),
        (b"", r"latent\.npy of sample 0 in .*a\.tar is not a readable array \(.+\): write"),
    ):
        shard = write_tar(tmp_path / "a.tar", [{"__key__": "0", "latent.npy": latent, "cls": 0}])
        with pytest.raises(DataError, match=message):
            Latents(shard, vae="sd", num_classes=1)


def test_a_shard_lost_after_indexing_is_named(tmp_path: Path, write_tar: Callable, samples: Callable) -> None:
    write_tar(tmp_path / "a.tar", samples(2))
    write_tar(tmp_path / "b.tar", samples(2, first=2))
    data = Latents(tmp_path, vae="sd", num_classes=3)
    (tmp_path / "b.tar").unlink()
    with pytest.raises(DataError, match=r"cannot open shard .*b\.tar \(No such file or directory\): restore it or"):
        data[3]


def test_settings_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.vae is 'sd2'\. .*Choose one of: sd, sdxl, sd3, flux, none"):
        Latents(tmp_path, vae="sd2", num_classes=1)
    with pytest.raises(ConfigError, match=r"data\.num_classes is 0; it must be at least 1"):
        Latents(tmp_path, vae="sd", num_classes=0)


@pytest.mark.parametrize("vae", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("kind", ["sample", "moments"])
@pytest.mark.parametrize("stored_scaled", [False, True])
def test_the_scale_that_latents_were_stored_in_is_looked_at(
    vae: str, kind: str, stored_scaled: bool, tmp_path: Path, write_tar: Callable
) -> None:
    scaling, draw = VAES[vae], np.random.default_rng(0)
    assert scaling.channels is not None
    shape = (scaling.channels, 4, 4)
    seen = [draw.normal(0, 0.9, shape) for _ in range(50)]  # what the model should see
    stored = seen if stored_scaled else [x / scaling.scale + scaling.shift for x in seen]
    if kind == "moments":
        stored = [np.concatenate([x, np.full(shape, -20.0)]) for x in stored]
    write_tar(
        tmp_path / "s.tar",
        [{"__key__": f"{i:03}", "latent.npy": x.astype(np.float32), "cls": 0} for i, x in enumerate(stored)],
    )
    right = Latents(tmp_path, vae=vae, num_classes=1, scaled=stored_scaled)
    wrong = Latents(tmp_path, vae=vae, num_classes=1, scaled=not stored_scaled)
    assert right.doubt() is None
    assert f"set data.scaled={str(stored_scaled).lower()}." in (wrong.doubt() or "")
    found = right.prepare(torch.stack([right[i][0] for i in range(50)]), 0, torch.arange(50))
    torch.testing.assert_close(found, torch.from_numpy(np.stack(seen)).float(), rtol=1e-3, atol=1e-3)


def test_classes_that_no_sample_has_are_named(tmp_path: Path, write_tar: Callable) -> None:
    latent = np.random.default_rng(0).normal(0, 1, (4, 4, 4)).astype(np.float32)
    samples = [{"__key__": f"{label}", "latent.npy": latent, "cls": label} for label in (0, 2, 9)]
    write_tar(tmp_path / "s.tar", samples)
    assert Latents(tmp_path, vae="none", kind="sample", num_classes=10).doubt() is None
    doubt = Latents(tmp_path, vae="none", kind="sample").doubt() or ""
    assert doubt.startswith("data.num_classes is 1000, but the largest label is 9.")
    assert doubt.endswith("set data.num_classes=10 if there are no more.")
