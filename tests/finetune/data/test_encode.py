"""Pictures and captions encoded into the cache: the numbers, what is left out and said, a batch that is too large."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tests.finetune.data.encoded import Encoder, TextEncoder, encode, files, samples_in
from tread.data.captioned.buckets import Bucket
from tread.errors import ConfigError, DataError
from tread.finetune.data.cache import Cache, CachedSamples, Tensors
from tread.finetune.data.encode import encode_samples, encode_texts
from tread.finetune.data.hashes import identity
from tread.finetune.data.items import Shapes, items_of
from tread.finetune.families import open_family
from tread.finetune.model.source import Source


def test_latents_are_those_of_the_pixels(pictures: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    encoder = Encoder()
    entries, skipped = encode(cache, pictures, encoder)
    assert skipped == []
    assert [entry.bucket for entry in entries] == [Bucket(64, 64)] * 4 + [Bucket(96, 48)] * 2
    assert sorted(encoder.sizes) == [2, 2, 2]
    for n in (1, 3):
        pixels = torch.from_numpy(np.array(Image.open(pictures / f"{n}.png"))).permute(2, 0, 1)
        expected = F.avg_pool2d(pixels.float()[None] / 127.5 - 1, 8)[0]
        stored = cache.load("latents", entries[n].latents)
        assert stored["mean"].dtype == torch.float16
        torch.testing.assert_close(stored["mean"].float(), expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(stored["std"].float(), 0.01 + expected.abs() * 0.1, atol=1e-3, rtol=1e-3)


def test_memory_that_does_not_suffice_halves_the_batch(pictures: Path, tmp_path: Path) -> None:
    cache, small = Cache(tmp_path / "cache"), Encoder(most=1)
    encode(cache, pictures, small, batch_size=4)
    assert small.sizes == [1] * 6
    whole = Cache(tmp_path / "whole")
    encode(whole, pictures, Encoder(), batch_size=4)
    assert files(cache) == files(whole)
    with pytest.raises(ConfigError, match=r"not enough memory for the autoencoder at 64x64: lower resolution or video"):
        encode(Cache(tmp_path / "none"), pictures, Encoder(most=0))


def test_what_cannot_be_decoded_is_left_out_and_listed(pictures: Path, tmp_path: Path) -> None:
    whole = (pictures / "2.png").read_bytes()
    (pictures / "2.png").write_bytes(whole[:3000])
    cache = Cache(tmp_path / "cache")
    entries, skipped = encode(cache, pictures, Encoder())
    assert len(entries) == 5
    assert len(skipped) == 1
    assert Path(skipped[0].name).name == "2.png"
    assert skipped[0].reason.startswith("cannot read ")
    assert encode(cache, pictures, Encoder()) == (entries, skipped)  # told again, not forgotten
    (pictures / "2.png").write_bytes(whole)
    assert len(encode(cache, pictures, Encoder())[0]) == 6


def test_latents_that_are_no_numbers_are_left_out(pictures: Path, tmp_path: Path) -> None:
    class Overflowing(Encoder):
        def __call__(self, pixels: Tensor) -> Tensors:
            return {"mean": super().__call__(pixels)["mean"] + 1e6}

    with pytest.raises(DataError, match=r"none of 6 samples could be encoded; the first, \S+0\.png: the autoencoder"):
        encode(Cache(tmp_path / "cache"), pictures, Overflowing())


def test_enlarged_pictures_are_said(pictures: Path, tmp_path: Path) -> None:
    samples, configs = samples_in(pictures, resolution=128)
    said: list[str] = []
    cache = Cache(tmp_path / "cache")
    items = items_of(cache, samples, configs, identity="v", shapes=Shapes(multiple=16), progress=False)
    encode_samples(cache, items, encode=Encoder(), say=said.append, progress=False)
    assert said[0].startswith("6 of 6 samples are smaller than their bucket and are enlarged (the first is ")
    assert "0.png, 64x64 to 128x128); lower resolution, or set minimum_image_size" in said[0]


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
    with pytest.raises(DataError, match=r"\S+\.safetensors cannot be read .*: resume the run to encode it again"):
        texts["unknown"]


def test_text_that_is_no_number_stops(tmp_path: Path) -> None:
    def broken(captions: Sequence[str]) -> list[Tensors]:
        return [{"codes": torch.tensor([float("inf")])} for _ in captions]

    with pytest.raises(DataError, match=r"the text encoder gives NaN or infinite codes for the caption 'cat'"):
        encode_texts(Cache(tmp_path / "cache"), ["cat"], encode=broken, identity="t", progress=False)


def test_a_family_encodes_through_the_cache(pipeline_folder: Any, pictures: Path, tmp_path: Path) -> None:
    family = open_family("flux", Source(str(pipeline_folder("flux"))))
    pipeline = family.source.pipeline(*family.pixel_parts, *family.text_parts)
    samples, configs = samples_in(pictures)
    cache = Cache(tmp_path / "cache")
    named, shapes = identity(family.source, family.pixel_parts), Shapes(multiple=family.multiple)
    items = items_of(cache, samples, configs, identity=named, shapes=shapes, progress=False)
    entries, _ = encode_samples(cache, items, encode=partial(family.encode_pixels, pipeline), progress=False)
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
    pixels = torch.from_numpy(np.array(Image.open(pictures / "5.png"))).permute(2, 0, 1)[None, :, None]
    with torch.inference_mode():
        direct = family.encode_pixels(pipeline, pixels.float() / 127.5 - 1)
        text = family.collate_text(family.encode_text(pipeline, [captions[4], ""]))
    for name, tensor in direct.items():
        torch.testing.assert_close(batch[name][1:], tensor.float(), atol=2e-3, rtol=2e-3)
    for name, tensor in text.items():
        torch.testing.assert_close(batch[f"text.{name}"], tensor, atol=1e-5, rtol=1e-5)
