"""Encoding: what it writes reads back, killed runs resume to the same bytes, bad images shift nothing."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset

from tests.tiny.autoencoders import real_autoencoder
from tread.data.images import ImageFolder
from tread.data.latents import Latents, sample_moments
from tread.data.shards import encode
from tread.data.vae import load_vae
from tread.errors import ConfigError, DataError

SETTINGS: dict[str, Any] = {"size": 16, "batch_size": 2, "shard_size": 4, "device": "cpu"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_latents_read_back_are_the_vaes(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    result = encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS)
    assert (result.shards, result.written, result.skipped) == (2, 6, 0)
    assert str(result) == (
        f"6 images in 2 shards at {tmp_path / 'out'}; train with data.path={tmp_path / 'out'} data.vae=sd "
        "data.kind=moments data.num_classes=2"
    )
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]
    data = Latents(tmp_path / "out", vae="sd", kind="moments", num_classes=2)
    images, vae = ImageFolder(image_folder, size=16), load_vae(tiny_vae, device="cpu")
    assert (len(data), data.shape) == (6, (4, 8, 8))
    for i, file in enumerate((tmp_path / "out" / "files.txt").read_text().splitlines()):
        x, label = images[i]
        stored, stored_label = data[i]
        assert (file, label) == (images.files[i], stored_label)
        torch.testing.assert_close(stored, vae.encode(x[None])[0], rtol=2e-3, atol=2e-3)  # float16
    x = torch.stack([data[i][0] for i in range(6)])
    ready = data.prepare(x, 0, torch.arange(6))
    # What the model sees, undone, is a draw around the mean; without its noise it decodes as the VAE does.
    sure = torch.cat([x[:, :4], torch.full_like(x[:, 4:], -30.0)], 1)
    decoded = vae.decode(data.scaling.to_latent(data.prepare(sure, 0, torch.arange(6))))
    pixels = torch.stack([images[i][0] for i in range(6)])
    torch.testing.assert_close(decoded, vae.decode(vae.encode(pixels)[:, :4]), rtol=1e-2, atol=1e-2)
    assert not torch.isclose(ready, data.prepare(sure, 0, torch.arange(6))).all()


def test_webdataset_reads_the_shards(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS)
    urls = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode())  # pyright: ignore[reportAttributeAccessIssue]
    assert [sample["__key__"] for sample in samples] == [f"{i:08d}" for i in range(6)]
    assert [sample["cls"] for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert {(sample["latent.npy"].shape, sample["latent.npy"].dtype.name) for sample in samples} == {
        ((8, 8, 8), "float16")
    }


def test_samples_are_one_draw_from_the_moments(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    encode(image_folder, tiny_vae, tmp_path / "m", **SETTINGS)
    encode(image_folder, tiny_vae, tmp_path / "s", **SETTINGS, kind="sample")
    encode(image_folder, tiny_vae, tmp_path / "t", **SETTINGS, kind="sample", seed=1)
    moments = Latents(tmp_path / "m", vae="sd", num_classes=2)
    drawn = Latents(tmp_path / "s", vae="sd", num_classes=2)
    again = Latents(tmp_path / "t", vae="sd", num_classes=2)
    assert (moments.kind, drawn.kind) == ("moments", "sample")
    word = int.from_bytes(b"enco")
    for i in range(6):
        expected = sample_moments(moments[i][0][None], 0, word, torch.tensor([i]))[0]
        torch.testing.assert_close(drawn[i][0], expected, rtol=5e-3, atol=5e-3)
        assert not torch.isclose(drawn[i][0], again[i][0]).all()


KILLED = """
import os, signal, sys
from tread.data.shards import encode

replace = os.replace
def killed_at_the_second_shard(source, target):
    if str(target).endswith("shard-000001.tar"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed_at_the_second_shard
encode(*sys.argv[1:], size=16, batch_size=2, shard_size=2, device="cpu")
"""


def test_a_killed_run_resumes_to_the_same_bytes(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "shard_size": 2}
    (image_folder / "cat" / "1.png").write_bytes(b"broken, in the first shard")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = encode(image_folder, tiny_vae, whole, **settings)
    command = [sys.executable, "-c", KILLED, str(image_folder), tiny_vae, str(killed)]
    process = subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert [path.name for path in sorted(killed.glob("*.tar"))] == ["shard-000000.tar"]
    assert len(list(killed.glob(".shard-000001.tar.*.tmp"))) == 1
    finished = (killed / "shard-000000.tar").stat()

    resumed = encode(image_folder, tiny_vae, killed, **settings)
    assert contents(killed) == contents(whole)
    assert (resumed.written, resumed.skipped) == (result.written, result.skipped) == (5, 1)
    kept = (killed / "shard-000000.tar").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (finished.st_ino, finished.st_mtime_ns)


def encode_on_rank(rank: int, world: int, arguments: tuple[Any, ...], settings: dict[str, Any], answers: Any) -> None:
    """As under torchrun; the answer says which shards this process gave their names."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    named: list[str] = []
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        named.extend([Path(target).name] if str(target).endswith(".tar") else [])
        if settings.get("killed_at") == Path(target).name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = noted
    encode(*arguments, **{name: value for name, value in settings.items() if name != "killed_at"})
    answers.put(named)


def on_ranks(world: int, arguments: tuple[Any, ...], settings: dict[str, Any]) -> list[list[str]]:
    """The shards that each of `world` processes wrote; a killed one says nothing."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    ranks = [
        context.Process(target=encode_on_rank, args=(rank, world, arguments, settings, answers))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [answers.get() for rank in ranks if rank.exitcode == 0]


def test_ranks_write_each_shard_once_and_a_killed_one_goes_on(
    image_folder: Path, tiny_vae: str, tmp_path: Path
) -> None:
    """Three ranks, one of which is killed in its second shard; then two finish, to the bytes of one process."""
    settings = {**SETTINGS, "shard_size": 1, "kind": "sample", "shuffle": True}
    (image_folder / "cat" / "1.png").write_bytes(b"broken")
    (image_folder / "dog" / "0.png").write_bytes(b"broken")
    encode(image_folder, tiny_vae, tmp_path / "alone", **settings)
    arguments = (image_folder, tiny_vae, tmp_path / "out")
    first = on_ranks(3, arguments, settings | {"killed_at": "shard-000004.tar"})
    assert sorted(first) == [["shard-000000.tar", "shard-000003.tar"], ["shard-000002.tar", "shard-000005.tar"]]
    assert len(list((tmp_path / "out").glob(".*.tmp"))) == 1
    assert on_ranks(2, arguments, settings) in ([["shard-000004.tar"], []], [[], ["shard-000004.tar"]])
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert len((tmp_path / "out" / "skipped.txt").read_text().splitlines()) == 2


def test_a_rank_that_is_done_says_what_is_missing(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "shard_size": 2, "world": 2}
    out = tmp_path / "out"
    said = str(encode(image_folder, tiny_vae, out, **settings, rank=0))
    assert said == f"this rank is done; 2 of 3 shards are at {out}, and other ranks write the rest"
    assert "6 images in 3 shards" in str(encode(image_folder, tiny_vae, out, **settings, rank=1))
    with pytest.raises(ConfigError, match="rank is 2 of a world of 2; ranks are 0"):
        encode(image_folder, tiny_vae, out, **settings, rank=2)
    with pytest.raises(ConfigError, match="rank and world go together"):
        encode(image_folder, tiny_vae, out, **SETTINGS, rank=1)


def test_shuffled_shards_have_the_labels_of_their_files(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS, shuffle=True)
    plain, data = ImageFolder(image_folder, size=16), Latents(tmp_path / "out", vae="sd", num_classes=2)
    files = (tmp_path / "out" / "files.txt").read_text().splitlines()
    assert files != plain.files
    assert sorted(files) == sorted(plain.files)
    assert [data[i][1] for i in range(6)] == [plain.labels[plain.files.index(file)] for file in files]


def test_a_finished_run_is_left_alone(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    first = encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS) == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")} == before


def test_a_bad_image_is_listed_and_moves_nothing(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "shard_size": 2}
    encode(image_folder, tiny_vae, tmp_path / "good", **settings)
    (image_folder / "cat" / "0.png").write_bytes(b"broken")
    result = encode(image_folder, tiny_vae, tmp_path / "bad", **settings)
    assert (result.written, result.skipped) == (5, 1)
    assert f"1 unreadable and listed in {tmp_path / 'bad' / 'skipped.txt'}" in str(result)
    (line,) = (tmp_path / "bad" / "skipped.txt").read_text().splitlines()
    assert line.startswith("cat/0.png\tcannot read image ")
    good, bad = contents(tmp_path / "good"), contents(tmp_path / "bad")
    for name in ("shard-000001.tar", "shard-000002.tar", "files.txt", "manifest.json"):
        assert good[name] == bad[name]
    assert good["shard-000000.tar"] != bad["shard-000000.tar"]
    data = Latents(tmp_path / "bad", vae="sd", num_classes=2)
    assert [data[i][1] for i in range(5)] == [0, 0, 1, 1, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such names")
def test_file_names_that_are_not_utf8(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    folder = image_folder / os.fsdecode(b"caf\xe9")
    (image_folder / "dog").rename(folder)
    (folder / "0.png").write_bytes(b"broken")
    result = encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS)
    assert (result.written, result.skipped) == (5, 1)
    assert encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS) == result, "called again"
    written = contents(tmp_path / "out")
    assert written["files.txt"].splitlines()[0] == b"caf\xe9/0.png"
    assert written["skipped.txt"].startswith(b"caf\xe9/0.png\tcannot read image ")
    assert json.loads(written["classes.json"]) == [folder.name, "cat"]


def test_a_shard_of_bad_images_is_empty_and_a_folder_of_them_an_error(
    image_folder: Path, tiny_vae: str, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "shard_size": 3}
    for path in (image_folder / "cat").iterdir():
        path.write_bytes(b"broken")
    assert encode(image_folder, tiny_vae, tmp_path / "half", **settings).written == 3
    assert len(Latents(tmp_path / "half", vae="sd", num_classes=2)) == 3
    for path in (image_folder / "dog").iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"none of 6 images in .* could be read: see .*skipped\.txt"):
        encode(image_folder, tiny_vae, tmp_path / "none", **settings)
    assert len((tmp_path / "none" / "skipped.txt").read_text().splitlines()) == 6


def test_an_image_repaired_before_the_resume_is_no_longer_listed(
    image_folder: Path, tiny_vae: str, tmp_path: Path
) -> None:
    good = (image_folder / "dog" / "2.png").read_bytes()
    encode(image_folder, tiny_vae, tmp_path / "good", **SETTINGS)
    (image_folder / "dog" / "2.png").write_bytes(b"broken")
    encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS)
    (tmp_path / "out" / "shard-000001.tar").unlink()
    (image_folder / "dog" / "2.png").write_bytes(good)
    assert encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS).skipped == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "good")


def test_an_image_that_disappears_stops_the_job(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    (image_folder / "dog" / "1.png").unlink()
    (image_folder / "dog" / "1.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"image .*dog/1\.png has disappeared: restore it and resume"):
        encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS)
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["shard-000000.tar"]
    assert not list((tmp_path / "out").glob(".*.tmp"))


def test_another_jobs_folder_is_refused(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    encode(image_folder, tiny_vae, out, **SETTINGS)
    before = contents(out)
    with pytest.raises(ConfigError, match=r"another job \(size 16 there, 32 here\): choose another folder"):
        encode(image_folder, tiny_vae, out, **{**SETTINGS, "size": 32})
    with pytest.raises(ConfigError, match=r"kind moments there, sample here; seed 0 there, 1 here"):
        encode(image_folder, tiny_vae, out, **SETTINGS, kind="sample", seed=1)
    with pytest.raises(ConfigError, match=r"dtype float32 there, bfloat16 here"):
        encode(image_folder, tiny_vae, out, **SETTINGS, dtype="bfloat16")
    shutil.copy(image_folder / "cat" / "0.png", image_folder / "cat" / "3.png")
    with pytest.raises(ConfigError, match=r"images 6 there, 7 here; files_sha256 \w+ there, \w+ here"):
        encode(image_folder, tiny_vae, out, **SETTINGS)
    assert contents(out) == before
    (out / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged \(.+\): delete .* and encode again"):
        encode(image_folder, tiny_vae, out, **SETTINGS)
    (out / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"holds shards that tread encode did not write"):
        encode(image_folder, tiny_vae, out, **SETTINGS)


def test_impossible_jobs_are_refused(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    for name in ("size", "batch_size", "shard_size"):
        with pytest.raises(ConfigError, match=rf"^{name} is 0; it must be at least 1"):
            encode(image_folder, tiny_vae, tmp_path / "out", **{**SETTINGS, name: 0})
    with pytest.raises(ConfigError, match=r"kind is 'mean'\. .*Choose one of: sample, moments"):
        encode(image_folder, tiny_vae, tmp_path / "out", **{**SETTINGS, "kind": "mean"})
    with pytest.raises(ConfigError, match=r"size is 15; it must be a multiple of 2, by which .* shrinks images"):
        encode(image_folder, tiny_vae, tmp_path / "out", **{**SETTINGS, "size": 15})
    with pytest.raises(ConfigError, match=r"would lie among the images"):
        encode(image_folder, tiny_vae, image_folder / "shards", **SETTINGS)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*file/out \(Not a directory\): choose another folder"):
        encode(image_folder, tiny_vae, tmp_path / "file" / "out", **SETTINGS)
    assert not (tmp_path / "out").exists()


def test_a_vae_that_overflows_names_the_image(image_folder: Path, tiny_vae: str, tmp_path: Path) -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    model = AutoencoderKL.from_pretrained(tiny_vae)
    model.get_parameter("quant_conv.weight").data.mul_(1e6)
    model.save_pretrained(tiny_vae)
    with pytest.raises(DataError, match=r"NaN or infinite latents for .*cat/0\.png in float32: encode with dtype"):
        encode(image_folder, tiny_vae, tmp_path / "out", **SETTINGS)
    assert not list((tmp_path / "out").glob("*.tar"))


@pytest.mark.realdata
def test_real_photos_survive_the_round_trip(real_data: Path, tmp_path: Path) -> None:
    """12 photos of pets through the real taesd: the mean squared error of its reconstructions stays small."""
    real_autoencoder(real_data / "taesd", "taesd").save_pretrained(tmp_path / "taesd")
    with zipfile.ZipFile(real_data / "oxford-pets/pets256_512.zip") as archive:
        names = [name for name in archive.namelist() if name.startswith("images/")][::44]
        for name in names:
            breed = Path(name).stem.rpartition("_")[0]
            target = tmp_path / "pets" / breed / Path(name).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
    with pytest.raises(ConfigError, match=r"is an AutoencoderTiny, which has no moments: use --kind sample"):
        encode(tmp_path / "pets", tmp_path / "taesd", tmp_path / "out", size=128, device="cpu")
    result = encode(tmp_path / "pets", tmp_path / "taesd", tmp_path / "out", size=128, kind="sample", device="cpu")
    assert result.written == len(names)
    images = ImageFolder(tmp_path / "pets", size=128)
    data = Latents(tmp_path / "out", vae="none", kind="sample", num_classes=images.num_classes)
    assert data.shape == (4, 16, 16)
    x = torch.stack([data[i][0] for i in range(len(data))])
    decoded = load_vae(tmp_path / "taesd", device="cpu").decode(data.prepare(x, 0, torch.arange(len(data))))
    pixels = torch.stack([images[i][0] for i in range(len(data))])
    psnr = 10 * torch.log10(4 / (decoded.clamp(-1, 1) - pixels).square().mean((1, 2, 3)))
    assert psnr.min() > 16
    assert psnr.mean() > 20
