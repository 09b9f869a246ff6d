"""Samples read back as batches: picks and captions, masks, pairs and clips."""

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

from tests.finetune.data.encoded import RNG, Encoder, TextEncoder, encode, pad
from tread.data.captioned.buckets import Bucket
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.samples import collect
from tread.finetune.data.cache import Cache, CachedSamples, Tensors
from tread.finetune.data.encode import encode_samples, encode_texts
from tread.finetune.data.items import Shapes, items_of
from tread.finetune.data.picks import Pick, PickSampler


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_the_picks(pictures: Path, tmp_path: Path, workers: int) -> None:
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, pictures, Encoder())
    captions = ["", *(f"picture {n}" for n in range(6))]
    data = CachedSamples(
        cache, entries, encode_texts(cache, captions, encode=TextEncoder(), identity="t", progress=False)
    )
    order = data.order(2, seed=0)
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


def test_one_of_several_captions_is_read(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"file": "data/0.png", "text": ["one", "two"]}')
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, tmp_path / "t.jsonl", Encoder())
    data = CachedSamples(
        cache, entries, encode_texts(cache, ["one", "two"], encode=TextEncoder(), identity="t", progress=False)
    )
    assert data[Pick(0, caption=4)][1]["codes"].tolist() == [94, *map(ord, "one")]
    assert data[Pick(0, caption=5)][1]["codes"].tolist() == [94, *map(ord, "two")]


def test_a_mask_is_a_weight_beside_the_latents(pictures: Path, tmp_path: Path) -> None:
    mask = np.zeros((64, 64), dtype=np.uint8)
    mask[0, 0], mask[32:, 32:] = 1, 255
    Image.fromarray(mask).save(pictures / "0_mask.png")
    Image.new("L", (64, 64)).save(pictures / "1_mask.png")
    cache = Cache(tmp_path / "cache")
    entries, skipped = encode(cache, pictures, Encoder())
    assert [(Path(name).name, reason.partition(" is ")[2]) for name, reason in skipped] == [
        ("1.png", "black everywhere in the crop")
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
    Image.fromarray(mask).save(pictures / "0_mask.png")
    changed, _ = encode(cache, pictures, Encoder(most=0))  # the latents are as they were
    assert changed[0].latents == entries[0].latents
    assert changed[0].weight != entries[0].weight


def test_pairs_are_aligned_and_batched_by_both_sizes(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    for n in range(6):
        size = (96, 48) if n == 0 else Image.open(pictures / f"{n}.png").size
        Image.fromarray(RNG.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(tmp_path / "before" / f"{n}.png")
    before: dict[str, Any] = {"conditioning_data_dir": str(tmp_path / "before"), "conditioning_type": "reference"}
    cache = Cache(tmp_path / "cache")
    entries, _ = encode(cache, pictures, Encoder(), crop=True, crop_style="random", **before)
    assert {entry.group for entry in entries} == {(Bucket(64, 64), Bucket(64, 64))}
    entries, _ = encode(cache, pictures, Encoder(), **before)
    assert [entry.group for entry in entries[:2]] == [
        (Bucket(64, 64), Bucket(96, 48)),
        (Bucket(64, 64), Bucket(64, 64)),
    ]
    texts = encode_texts(cache, [f"picture {n}" for n in range(6)], encode=TextEncoder(), identity="t", progress=False)
    data = CachedSamples(cache, entries, texts)
    batch = data.collate([data[Pick(1)], data[Pick(2)]], pad)
    assert sorted(batch) == ["mean", "position", "reference.mean", "reference.std", "std", "text.codes"]
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
    keys = (entry.latents, *entry.references)
    image, reference = (cache.load("latents", key)["mean"].float() for key in keys)
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
    shapes = Shapes(multiple=16, frame_factor=4)
    items = items_of(cache, samples, configs, identity="v", shapes=shapes, progress=False)
    entries, _ = encode_samples(cache, items, encode=encoder, progress=False)
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
