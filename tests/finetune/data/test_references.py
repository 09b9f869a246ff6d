"""Several reference images per sample: latents, groups, sizes, captions that are encoded with them, and refusals."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.finetune.data.encoded import RNG, Encoder, samples_in
from tests.finetune.tasks import make_config, make_task
from tests.tiny.pictures import write_noise
from tread.data.captioned.buckets import Bucket
from tread.data.captioned.samples import Sample
from tread.errors import ConfigError
from tread.finetune.data.cache import Cache, CachedSamples, Tensors
from tread.finetune.data.encode import encode_samples, encode_seen_texts
from tread.finetune.data.hashes import digest
from tread.finetune.data.items import Items, Sees, Shapes, items_of, whole
from tread.finetune.data.picks import Pick
from tread.finetune.data.prepare import check_references
from tread.finetune.families.flux import Flux
from tread.finetune.family import references
from tread.finetune.model.source import Source


@pytest.fixture
def edits(pictures: Path, tmp_path: Path) -> dict[str, Any]:
    """References of the six pictures: all have one of 64 x 64, the second and third one of 96 x 48 too."""
    for folder, size, numbers in (("one", (64, 64), range(6)), ("two", (96, 48), (1, 2))):
        (tmp_path / folder).mkdir()
        for n in numbers:
            pixels = RNG.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{n}.png")
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    return {"conditioning_data_dir": folders, "conditioning_type": "reference"}


def items_in(cache: Cache, folder: Path, *, shapes: Shapes | None = None, seen: Sees = None, **changes: Any) -> Items:
    given = {"identity": "vae", "shapes": shapes or Shapes(multiple=16), "seen": seen, "progress": False}
    return items_of(cache, *samples_in(folder, **changes), **given)


def see(caption: str, images: Sequence[Image.Image]) -> Tensors:
    """Stands for a text encoder: the letters, then the mean of each picture."""
    means = [float(np.asarray(image, dtype=np.float64).mean()) for image in images]
    return {"codes": torch.tensor([*(float(ord(letter)) for letter in caption), *means])}


def test_samples_of_one_number_and_sizes_are_batched(pictures: Path, edits: dict[str, Any], tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    items = items_in(cache, pictures, **edits)
    entries, _ = encode_samples(cache, items, encode=Encoder(), progress=False)
    square, wide = Bucket(64, 64), Bucket(96, 48)
    assert [entry.group for entry in entries[:4]] == [
        (square, square),
        (square, square, wide),
        (square, square, wide),
        (square, square),
    ]
    texts = encode_seen_texts(cache, [(f"picture {n}", ()) for n in range(6)], encode=see, identity="t", progress=False)
    data = CachedSamples(cache, entries, texts)
    order = data.order(2, seed=0)
    batches = [sorted(order.batch(index).tolist()) for index in range(order.batches)]
    assert [1, 2] in batches
    assert all(len({data.groups[i] for i in batch}) == 1 for batch in batches)
    batch = data.collate([data[Pick(1)], data[Pick(2)]], lambda texts: {})
    assert {"reference.mean", "reference_2.mean", "reference_2.std"} < set(batch)
    for folder, found in zip(("one", "two"), references(batch), strict=True):
        pixels = torch.from_numpy(np.array(Image.open(tmp_path / folder / "2.png"))).permute(2, 0, 1)
        expected = F.avg_pool2d(pixels.float()[None] / 127.5 - 1, 8)
        torch.testing.assert_close(found[1:], expected, atol=1e-3, rtol=1e-3)


def test_a_reference_has_the_size_that_the_pipeline_gives_it(
    pictures: Path, edits: dict[str, Any], tmp_path: Path
) -> None:
    """Or the entry's own; a crop of an aligned one is where its sample's is."""
    cache = Cache(tmp_path / "cache")
    scaled = items_in(cache, pictures, shapes=Shapes(multiple=16, references=(128 * 128, 32)), **edits)
    groups = [entry.group for entry in scaled.readable]
    assert groups[:2] == [(Bucket(64, 64), Bucket(128, 128)), (Bucket(64, 64), Bucket(128, 128), Bucket(192, 96))]
    own = items_in(cache, pictures, reference_resolution=32, **edits)
    assert own.readable[1].group == (Bucket(64, 64), Bucket(32, 32), Bucket(48, 16))
    crops = {"crop": True, "crop_style": "random", "resolution": 32, "maximum_image_size": 48}
    cut = items_in(cache, pictures, reference_resolution=32, **crops, **edits)
    lefts = [[cut.pictures[key].crop.left for key in (entry.latents, *entry.references)] for entry in cut.readable[:4]]
    assert all(left[0] == left[1] for left in lefts)
    assert len({left[0] for left in lefts}) == 4


def test_a_reference_that_is_channels_has_its_sample_s_size(
    pictures: Path, edits: dict[str, Any], tmp_path: Path
) -> None:
    wide = {**edits, "conditioning_data_dir": edits["conditioning_data_dir"][1], "reference_resolution": 128}
    items = items_in(Cache(tmp_path / "cache"), pictures, shapes=Shapes(multiple=16, fills=True), **wide)
    assert {entry.group for entry in items.readable} == {(Bucket(64, 64), Bucket(64, 64))}
    crops = [items.pictures[entry.references[0]].crop for entry in items.readable]
    assert all(crop.box((96, 48)) == pytest.approx((24, 0, 72, 48)) for crop in crops)


def test_keys_of_one_reference_are_what_they_were(pictures: Path, edits: dict[str, Any], tmp_path: Path) -> None:
    """A cache of an earlier version stays valid."""
    cache = Cache(tmp_path / "cache")
    one = {**edits, "conditioning_data_dir": edits["conditioning_data_dir"][0]}
    entry = items_in(cache, pictures, **one).readable[0]
    place = tmp_path / "one" / "0.png"
    content = cache.hashes.of([place])[place]
    crop = "64x64 of 0.000000,0.000000,1.000000,1.000000"
    assert entry.references == (digest(1, content, crop, "vae"),)


def test_captions_are_encoded_with_what_the_text_encoder_sees(
    pictures: Path, edits: dict[str, Any], tmp_path: Path
) -> None:
    """One caption with two pictures is two texts; an empty one has its sample's pictures too."""
    cache = Cache(tmp_path / "cache")
    items = items_in(
        cache, pictures, seen="references", caption_strategy="instanceprompt", instance_prompt="ab", **edits
    )
    calls: list[str] = []

    def encode(caption: str, images: Sequence[Image.Image]) -> Tensors:
        calls.append(caption)
        return see(caption, images)

    captions = list(items.seen_captions())
    texts = encode_seen_texts(cache, captions, encode=encode, identity="t", progress=False)
    assert sorted(calls) == [""] * 6 + ["ab"] * 6
    encode_seen_texts(cache, captions, encode=encode, identity="t", progress=False)
    assert len(calls) == 12
    entries, _ = encode_samples(cache, items, encode=Encoder(), progress=False)
    data = CachedSamples(cache, entries, texts)
    for n, pick in ((0, Pick(0)), (1, Pick(1)), (1, Pick(1, dropped=True))):
        files = [tmp_path / "one" / f"{n}.png"] + ([tmp_path / "two" / f"{n}.png"] if n == 1 else [])
        expected = see("" if pick.dropped else "ab", [Image.open(path) for path in files])
        torch.testing.assert_close(data[pick][1], expected)
    image = tmp_path / "two" / "1.png"
    (picture,) = whole(cache, [str(image)])
    texts = encode_seen_texts(cache, [("x", [picture])], encode=encode, identity="t", progress=False)
    torch.testing.assert_close(texts.of("x", [picture.key]), see("x", [Image.open(image)]))


@pytest.mark.filterwarnings("ignore")
def test_a_preview_from_two_images_is_the_stock_pipeline_s(pipeline_folder: Any, tmp_path: Path) -> None:
    """A LoRA that was not trained yet: the prompt was encoded with the images, and the pipeline is given them."""
    model = pipeline_folder("qwen_image-edit-2511")
    data = write_noise(tmp_path / "data", [(64, 64)])
    images = []
    for name, size in (("one", (96, 64)), ("two", (64, 96))):
        Image.fromarray(RNG.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
        images.append(str(tmp_path / f"{name}.png"))
    config = make_config(
        model,
        {"instance_data_dir": str(data), "conditioning_data_dir": [str(data)] * 2, "conditioning_type": "reference"},
        model_family="qwen_image",
        resolution=64,
        cache_dir=str(tmp_path / "cache"),
        train_batch_size=1,
        validation_prompt="join them",
        validation_image=tuple(images),
        validation_num_inference_steps=2,
        validation_resolution="48x32",
    )
    task = make_task(config, tmp_path)
    task.preview(1)
    pipeline = Source(str(model)).pipeline(*Source(str(model)).parts)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        image=[Image.open(path) for path in images],
        prompt="join them",
        negative_prompt="",
        true_cfg_scale=4.0,
        width=48,
        height=32,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(42),
    ).images[0]
    drawn = Image.open(tmp_path / "previews" / "step-00000001-0.png")
    assert np.abs(np.asarray(drawn, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1


def family(counts: range) -> Any:
    source: Any = SimpleNamespace(pipeline_name="EditPipeline", name_or_path="edits", index={})
    return type("Edits", (Flux,), {"reference_counts": counts})(source)


def test_a_number_of_references_that_the_model_cannot_take_is_refused() -> None:
    def sample(count: int) -> Sample:
        places = tuple(Path(f"{n}.png") for n in range(count))
        return Sample(media=Path("x.png"), captions=("x",), size=(8, 8), references=places)

    check_references(family(range(1, 4)), [sample(1), sample(3)])
    check_references(family(range(3)), [sample(0), sample(2)])
    with pytest.raises(
        ConfigError, match=r"^x\.png has 2 reference images, but a EditPipeline takes at most 1: remove"
    ):
        check_references(family(range(1, 2)), [sample(1), sample(2)])
    with pytest.raises(ConfigError, match="trains on pairs, but 1 of 2 samples have no reference image: give"):
        check_references(family(range(1, 3)), [sample(2), sample(0)])
    with pytest.raises(ConfigError, match="2 samples with a reference image, but a EditPipeline takes none: set"):
        check_references(family(range(1)), [sample(2), sample(1)])
