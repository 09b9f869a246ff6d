"""The cache on disk: encoded once, right after any interruption, shared by processes, read back as batches."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tread.data.base import DataError
from tread.data.buckets import Bucket, BucketOrder
from tread.data.captioned import Sample, collect
from tread.data.entries import DataConfig, data_configs
from tread.data.finding import Skipped
from tread.routing.errors import ConfigError
from tread.train.finetune.cache import Cache, CachedSamples, Entry, Tensors
from tread.train.finetune.encode import encode_samples, encode_texts
from tread.train.finetune.families import open_family
from tread.train.finetune.hashes import identity
from tread.train.finetune.picks import Pick, PickSampler
from tread.train.finetune.source import Source
from tread.train.schema import parse

RNG = np.random.default_rng(0)


class Encoder:
    """Latents are pixels averaged over 8 x 8 cells; what it was called with is remembered."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.sizes = most, list[int]()

    def __call__(self, pixels: Tensor) -> Tensors:
        if len(pixels) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        self.sizes.append(len(pixels))
        mean = F.avg_pool2d(pixels[:, :, 0], 8)  # (B, 3, h, w)
        return {"mean": mean, "std": 0.01 + mean.abs() * 0.1}


class TextEncoder:
    """A caption is the codes of its letters."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.captions = most, list[str]()

    def __call__(self, captions: Sequence[str]) -> list[Tensors]:
        if len(captions) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        self.captions += captions
        return [{"codes": torch.tensor([float(ord(letter)) for letter in f"^{text}"])} for text in captions]


def pad(texts: Sequence[Tensors]) -> Tensors:
    return {"codes": torch.nn.utils.rnn.pad_sequence([text["codes"] for text in texts], batch_first=True)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures of two shapes, the first with a mask."""
    (tmp_path / "data").mkdir()
    for n in range(6):
        shape = (64, 64, 3) if n < 4 else (48, 96, 3)
        Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8)).save(tmp_path / "data" / f"{n}.png")
        (tmp_path / "data" / f"{n}.txt").write_text(f"picture {n}")
    return tmp_path / "data"


def samples_in(folder: Path, **changes: Any) -> tuple[list[Sample], list[DataConfig]]:
    settings = {"resolution": 64, **changes}
    configs = [parse(DataConfig, {**entry, **settings}) for entry in data_configs(str(folder))]
    return collect(configs, video=False, say=lambda text: None, progress=False).samples, configs


def encode(
    cache: Cache, folder: Path, encoder: Any, *, identity: str = "vae", batch_size: int = 2, **changes: Any
) -> tuple[list[Entry], list[Skipped]]:
    samples, configs = samples_in(folder, **changes)
    return encode_samples(
        cache,
        samples,
        configs,
        encode=encoder,
        identity=identity,
        multiple=16,
        batch_size=batch_size,
        say=lambda text: None,
        progress=False,
    )


def files(cache: Cache) -> dict[str, bytes]:
    found = sorted(cache.folder.glob("*/*/*.safetensors"))
    return {path.name: path.read_bytes() for path in found}


def test_latents_are_those_of_the_pixels(folder: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    encoder = Encoder()
    entries, skipped = encode(cache, folder, encoder)
    assert skipped == []
    assert [entry.bucket for entry in entries] == [Bucket(64, 64)] * 4 + [Bucket(96, 48)] * 2
    assert sorted(encoder.sizes) == [2, 2, 2]
    for n in (1, 3):
        pixels = torch.from_numpy(np.array(Image.open(folder / f"{n}.png"))).permute(2, 0, 1)
        expected = F.avg_pool2d(pixels.float()[None] / 127.5 - 1, 8)[0]
        stored = cache.load("latents", entries[n].latents)
        assert stored["mean"].dtype == torch.float16
        torch.testing.assert_close(stored["mean"].float(), expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(stored["std"].float(), 0.01 + expected.abs() * 0.1, atol=1e-3, rtol=1e-3)


def test_what_is_there_is_not_encoded_again_and_what_is_damaged_is(folder: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, folder, Encoder())
    before = files(cache)
    assert encode(Cache(tmp_path / "cache"), folder, Encoder(most=0))[0] == entries  # never called
    path = cache.path("latents", entries[2].latents)
    for content in (path.read_bytes()[:-1], path.read_bytes()[:5], b""):
        path.write_bytes(content)
        again = Encoder()
        encode(cache, folder, again)
        assert again.sizes == [1]
        assert files(cache) == before


def test_a_changed_picture_crop_or_encoder_is_another_item(folder: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    first, _ = encode(cache, folder, Encoder())
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / "0.png")
    second, _ = encode(cache, folder, Encoder())
    assert [a.latents == b.latents for a, b in zip(first, second, strict=True)] == [False] + [True] * 5
    other, _ = encode(cache, folder, Encoder(), identity="another vae")
    square, _ = encode(cache, folder, Encoder(), crop=True)
    assert not {e.latents for e in second} & {e.latents for e in other}
    assert [a.latents == b.latents for a, b in zip(second, square, strict=True)] == [True] * 4 + [False] * 2
    (folder / "1.png").rename(folder / "renamed.png")
    (folder / "1.txt").rename(folder / "renamed.txt")
    renamed, _ = encode(cache, folder, Encoder(most=0))  # the content is known
    assert {e.latents for e in renamed} == {e.latents for e in second}


def test_a_killed_run_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    whole = Cache(tmp_path / "whole")
    encode(whole, folder, Encoder())

    class Killed(Encoder):
        def __call__(self, pixels: Tensor) -> Tensors:
            if len(self.sizes) == 2:
                raise KeyboardInterrupt
            return super().__call__(pixels)

    cache = Cache(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        encode(cache, folder, Killed())
    assert len(files(cache)) == 4
    rest = Encoder()
    encode(Cache(tmp_path / "cache"), folder, rest)
    assert sum(rest.sizes) == 2
    assert files(cache) == files(whole)


def test_memory_that_does_not_suffice_halves_the_batch(folder: Path, tmp_path: Path) -> None:
    cache, small = Cache(tmp_path / "cache"), Encoder(most=1)
    encode(cache, folder, small, batch_size=4)
    assert small.sizes == [1] * 6
    whole = Cache(tmp_path / "whole")
    encode(whole, folder, Encoder(), batch_size=4)
    assert files(cache) == files(whole)
    with pytest.raises(ConfigError, match=r"not enough memory for the autoencoder at 64x64: lower resolution or video"):
        encode(Cache(tmp_path / "none"), folder, Encoder(most=0))


def test_two_processes_share_the_work_and_agree(folder: Path, tmp_path: Path) -> None:
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:2000])  # its header is whole
    barrier = threading.Barrier(2)

    class Rank:
        def __init__(self, index: int) -> None:
            self.process_index, self.num_processes = index, 2

        def wait_for_everyone(self) -> None:
            barrier.wait(timeout=30)

    encoders = [Encoder(), Encoder()]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(encode, Cache(tmp_path / "cache", Rank(n)), folder, encoders[n]) for n in range(2)]
        results = [job.result() for job in running]
    assert results[0] == results[1]
    alone = Cache(tmp_path / "alone")
    assert results[0][0] == encode(alone, folder, Encoder())[0]
    assert [len(entries) for entries, _ in results] == [5, 5]
    assert [Path(name).name for name, _ in results[0][1]] == ["3.png"]
    assert [sum(encoder.sizes) for encoder in encoders] == [3, 2]
    assert files(Cache(tmp_path / "cache")) == files(alone)


def test_what_cannot_be_decoded_is_left_out_and_listed(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "2.png").read_bytes()
    (folder / "2.png").write_bytes(whole[:3000])
    cache = Cache(tmp_path / "cache")
    entries, skipped = encode(cache, folder, Encoder())
    assert len(entries) == 5
    assert len(skipped) == 1
    assert Path(skipped[0].name).name == "2.png"
    assert skipped[0].reason.startswith("cannot read ")
    assert encode(cache, folder, Encoder()) == (entries, skipped)  # told again, not forgotten
    (folder / "2.png").write_bytes(whole)
    assert len(encode(cache, folder, Encoder())[0]) == 6


def test_latents_that_are_no_numbers_are_left_out(folder: Path, tmp_path: Path) -> None:
    class Overflowing(Encoder):
        def __call__(self, pixels: Tensor) -> Tensors:
            return {"mean": super().__call__(pixels)["mean"] + 1e6}

    with pytest.raises(
        DataError, match=r"none of the 6 samples could be encoded; the first, \S+0\.png: the autoencoder"
    ):
        encode(Cache(tmp_path / "cache"), folder, Overflowing())


def test_enlarged_pictures_are_said(folder: Path, tmp_path: Path) -> None:
    samples, configs = samples_in(folder, resolution=128)
    said: list[str] = []
    cache = Cache(tmp_path / "cache")
    encode_samples(
        cache, samples, configs, encode=Encoder(), identity="v", multiple=16, say=said.append, progress=False
    )
    assert said[0].startswith("6 of 6 samples are smaller than their bucket and are enlarged (the first is ")
    assert "0.png, 64x64 to 128x128); lower resolution, or set minimum_image_size" in said[0]


def test_a_mask_is_a_weight_beside_the_latents(folder: Path, tmp_path: Path) -> None:
    mask = np.zeros((64, 64), dtype=np.uint8)
    mask[0, 0], mask[32:, 32:] = 1, 255
    Image.fromarray(mask).save(folder / "0_mask.png")
    Image.new("L", (64, 64)).save(folder / "1_mask.png")
    cache = Cache(tmp_path / "cache")
    entries, skipped = encode(cache, folder, Encoder())
    assert [(Path(name).name, reason.partition(" is ")[2]) for name, reason in skipped] == [
        ("1.png", "black wherever the picture is used")
    ]
    data = CachedSamples(
        cache, entries, encode_texts(cache, ["picture 0", "picture 2"], encode=TextEncoder(), identity="t")
    )
    weight = data[Pick(0)][0]["weight"]
    assert weight.shape == (1, 8, 8)
    assert weight[0, 0, 0] > 0  # one nearly black pixel in a cell of 64
    assert (weight[0, 4:, 4:] == 1).all()
    assert weight.count_nonzero() == 17
    batch = data.collate([data[0, False], data[1, False]], pad)
    assert torch.equal(batch["weight"][1], torch.ones(1, 8, 8))  # the one without a mask
    assert "weight" not in data.collate([data[1, False]], pad)
    mask[:] = 255
    Image.fromarray(mask).save(folder / "0_mask.png")
    changed, _ = encode(cache, folder, Encoder(most=0))  # the latents are as they were
    assert changed[0].latents == entries[0].latents
    assert changed[0].weight != entries[0].weight


def test_pairs_are_aligned_and_batched_by_both_sizes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    for n in range(6):
        size = (96, 48) if n == 0 else Image.open(folder / f"{n}.png").size
        Image.fromarray(RNG.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(tmp_path / "before" / f"{n}.png")
    before: dict[str, Any] = {"conditioning_data_dir": str(tmp_path / "before"), "conditioning_type": "reference"}
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, folder, Encoder(), crop=True, crop_style="random", **before)
    assert {entry.group for entry in entries} == {(Bucket(64, 64), Bucket(64, 64))}
    entries, _ = encode(cache, folder, Encoder(), **before)
    assert [entry.group for entry in entries[:2]] == [
        (Bucket(64, 64), Bucket(96, 48)),
        (Bucket(64, 64), Bucket(64, 64)),
    ]
    texts = encode_texts(cache, [f"picture {n}" for n in range(6)], encode=TextEncoder(), identity="t", progress=False)
    data = CachedSamples(cache, entries, texts)
    batch = data.collate([data[Pick(1)], data[Pick(2)]], pad)
    assert sorted(batch) == ["mean", "reference.mean", "reference.std", "std", "text.codes"]
    pixels = torch.from_numpy(np.array(Image.open(tmp_path / "before" / "2.png"))).permute(2, 0, 1)
    expected = F.avg_pool2d(pixels.float()[None] / 127.5 - 1, 8)
    torch.testing.assert_close(batch["reference.mean"][1:], expected, atol=1e-3, rtol=1e-3)


def test_a_random_crop_cuts_both_of_a_pair_alike(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (32, 128, 3), dtype=np.uint8)
    for name, image in (("a", Image.fromarray(pixels)), ("b", Image.fromarray(255 - pixels))):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "x.png")
    (tmp_path / "a" / "x.txt").write_text("invert")
    cache = Cache(tmp_path / "cache")
    (entry,), _ = encode(
        cache,
        tmp_path / "a",
        Encoder(),
        resolution=32,
        crop=True,
        crop_style="random",
        conditioning_data_dir=str(tmp_path / "b"),
        conditioning_type="reference",
    )
    assert entry.reference is not None
    image, reference = (cache.load("latents", key)["mean"].float() for key in (entry.latents, entry.reference))
    torch.testing.assert_close(image, -reference, atol=2e-3, rtol=0)


def test_clips_keep_their_frames_and_share_one_mask(tmp_path: Path) -> None:
    frames = [Image.fromarray(RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(8)]
    (tmp_path / "data").mkdir()
    frames[0].save(tmp_path / "data" / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    (tmp_path / "data" / "a.txt").write_text("a")
    half = Image.new("L", (32, 32))
    half.paste(255, (0, 0, 16, 32))
    half.save(tmp_path / "data" / "a_mask.png")
    configs = [DataConfig(instance_data_dir=str(tmp_path / "data"), resolution=32)]
    samples = collect(configs, video=True, say=lambda text: None, progress=False).samples

    def encoder(pixels: Tensor) -> Tensors:  # (B, 3, F, H, W)
        return {"mean": F.avg_pool3d(pixels[:, :, 1:], (4, 8, 8))}

    cache = Cache(tmp_path / "cache")
    entries, _ = encode_samples(
        cache, samples, configs, encode=encoder, identity="v", multiple=16, frame_factor=4, progress=False
    )
    assert entries[0].bucket == Bucket(32, 32, 5)
    texts = encode_texts(cache, ["a"], encode=TextEncoder(), identity="t", progress=False)
    data = CachedSamples(cache, entries, texts)
    batch = data.collate([data[Pick(0)], data[Pick(0)]], pad)
    expected = (
        torch.from_numpy(np.stack([np.asarray(frame) for frame in frames[1:5]])).float().mean(0).permute(2, 0, 1)[None]
        / 127.5
        - 1
    )
    assert batch["mean"].shape == (2, 3, 1, 4, 4)
    torch.testing.assert_close(batch["mean"][:1, :, 0], F.avg_pool2d(expected, 8), atol=1e-3, rtol=1e-3)
    assert batch["weight"].shape == (2, 1, 1, 4, 4)
    assert torch.equal(batch["weight"][0, 0, 0], torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(4, 4))


@pytest.mark.realdata
def test_a_family_encodes_through_the_cache(pipeline_folder: Any, folder: Path, tmp_path: Path) -> None:
    family = open_family("flux", Source(str(pipeline_folder("flux"))))
    pipeline = family.source.pipeline(*family.pixel_parts, *family.text_parts)
    samples, configs = samples_in(folder)
    cache = Cache(tmp_path / "cache")
    entries, _ = encode_samples(
        cache,
        samples,
        configs,
        encode=partial(family.encode_pixels, pipeline),
        identity=identity(family.source, family.pixel_parts),
        multiple=family.multiple,
        progress=False,
    )
    captions = [sample.captions[0] for sample in samples]
    texts = encode_texts(
        cache,
        ["", *captions],
        encode=partial(family.encode_text, pipeline),
        identity=identity(family.source, family.text_parts),
        batch_size=3,
        progress=False,
    )
    data = CachedSamples(cache, entries, texts)
    batch = data.collate([data[4, False], data[5, True]], family.collate_text)
    pixels = torch.from_numpy(np.array(Image.open(folder / "5.png"))).permute(2, 0, 1)[None, :, None]
    with torch.inference_mode():
        direct = family.encode_pixels(pipeline, pixels.float() / 127.5 - 1)
        text = family.collate_text(family.encode_text(pipeline, [captions[4], ""]))
    for name, tensor in direct.items():
        torch.testing.assert_close(batch[name][1:], tensor.float(), atol=2e-3, rtol=2e-3)
    for name, tensor in text.items():
        torch.testing.assert_close(batch[f"text.{name}"], tensor, atol=1e-5, rtol=1e-5)


def test_texts_are_encoded_once_each(tmp_path: Path) -> None:
    cache, encoder = Cache(tmp_path / "cache"), TextEncoder(most=2)
    captions = ["cat", "", "a dog", "cat", "bird"]
    texts = encode_texts(cache, captions, encode=encoder, identity="t", batch_size=4, progress=False)
    assert sorted(encoder.captions) == ["", "a dog", "bird", "cat"]
    assert texts[""]["codes"].tolist() == [94]
    assert texts["cat"]["codes"].tolist() == [94, 99, 97, 116]
    more = TextEncoder()
    encode_texts(cache, [*captions, "cow"], encode=more, identity="t", progress=False)
    assert more.captions == ["cow"]
    encode_texts(cache, captions, encode=more, identity="another", progress=False)
    assert len(more.captions) == 5
    with pytest.raises(DataError, match=r"\S+\.safetensors cannot be read .*: start again to encode it"):
        texts["unknown"]


def test_text_that_is_no_number_stops(tmp_path: Path) -> None:
    def broken(captions: Sequence[str]) -> list[Tensors]:
        return [{"codes": torch.tensor([float("inf")])} for _ in captions]

    with pytest.raises(DataError, match=r"the text encoder gives NaN or infinite codes for the caption 'cat'"):
        encode_texts(Cache(tmp_path / "cache"), ["cat"], encode=broken, identity="t", progress=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_the_picks(folder: Path, tmp_path: Path, workers: int) -> None:
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, folder, Encoder())
    captions = ["", *(f"picture {n}" for n in range(6))]
    data = CachedSamples(
        cache, entries, encode_texts(cache, captions, encode=TextEncoder(), identity="t", progress=False)
    )
    order = BucketOrder(data.groups, data.repeats, batch=2, seed=0)
    slices = {"batch": 2, "micro_steps": 1, "rank": 0, "world": 1, "start_step": 0, "steps": 6}
    sampler = PickSampler(order, **slices, caption_dropout=0.5, seed=0)
    loader = DataLoader(
        data, batch_sampler=sampler, collate_fn=partial(data.collate, collate_text=pad), num_workers=workers
    )
    dropped = 0
    for picks, batch in zip(sampler, loader, strict=True):
        assert batch["mean"].dtype == torch.float32
        for n, pick in enumerate(picks):
            assert torch.equal(batch["mean"][n], cache.load("latents", entries[pick.sample].latents)["mean"].float())
            codes = [int(code) for code in batch["text.codes"][n] if code]
            assert "".join(map(chr, codes)) == ("^" if pick.dropped else f"^picture {pick.sample}")
            dropped += pick.dropped
    assert 0 < dropped < 12


def test_one_of_several_captions_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"file": "data/0.png", "text": ["one", "two"]}')
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, tmp_path / "t.jsonl", Encoder())
    data = CachedSamples(
        cache, entries, encode_texts(cache, ["one", "two"], encode=TextEncoder(), identity="t", progress=False)
    )
    assert data[Pick(0, caption=4)][1]["codes"].tolist() == [94, *map(ord, "one")]
    assert data[Pick(0, caption=5)][1]["codes"].tolist() == [94, *map(ord, "two")]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache_dir '\S+/file/cache' cannot be made \(.+\); name another"):
        Cache(tmp_path / "file" / "cache")
