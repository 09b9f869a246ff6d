"""Buckets keep area and shape, crops lie inside, and the order visits everything whatever the batch."""

import math
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tread.data.captioned.buckets import Bucket, BucketOrder, bucket_of, crop_of, enlargement, measure
from tread.data.captioned.entries import DataConfig, VideoConfig
from tread.errors import ConfigError

SIDES = st.integers(16, 8000)


def entry(**changes: Any) -> DataConfig:
    return DataConfig(instance_data_dir="x", **changes)


@given(SIDES, SIDES, st.sampled_from([8, 16, 32]), st.integers(256, 2048))
def test_sides_are_multiples_at_about_constant_area(width: int, height: int, multiple: int, edge: int) -> None:
    bucket = bucket_of((width, height), entry(resolution=edge), multiple)
    assert bucket.width % multiple == bucket.height % multiple == 0
    # each side is off by at most half a multiple; at 4:1 the shorter one is half the edge
    off = (1 + multiple / edge) * (1 + multiple / 4 / edge) - 1
    assert abs(bucket.width * bucket.height / edge**2 - 1) <= off + 1e-9


@given(SIDES, SIDES)
def test_little_is_cut_off_and_buckets_turn_with_the_picture(width: int, height: int) -> None:
    config = entry(resolution=1024)
    bucket = bucket_of((width, height), config, 16)
    if 0.25 <= width / height <= 4:
        crop = crop_of((width, height), bucket, config, "0" * 40)
        assert (crop.right - crop.left) * (crop.bottom - crop.top) > 0.83
    turned = bucket_of((height, width), config, 16)
    assert (turned.width, turned.height) == (bucket.height, bucket.width)


def test_known_sizes() -> None:
    photo = (6000, 4000)
    assert bucket_of((1024, 1024), entry(resolution=1024), 16) == Bucket(1024, 1024)
    assert bucket_of((1920, 1080), entry(resolution=512, resolution_type="pixel"), 16) == Bucket(912, 512)
    assert bucket_of((1080, 1920), entry(resolution=512, resolution_type="pixel"), 16) == Bucket(512, 912)
    assert bucket_of((500, 500), entry(resolution=0.25, resolution_type="area"), 16) == Bucket(512, 512)
    assert bucket_of(photo, entry(resolution=512, crop=True), 16) == Bucket(512, 512)
    preserved = bucket_of(photo, entry(resolution=512, crop=True, crop_aspect="preserve"), 16)
    assert preserved == bucket_of(photo, entry(resolution=512), 16) == Bucket(624, 416)
    assert bucket_of((10, 10), entry(resolution=16), 64) == Bucket(64, 64)
    assert str(Bucket(832, 480, 81)) == "832x480x81"


@given(st.integers(1, 400), st.integers(1, 200), st.sampled_from([1, 4, 8]))
def test_frames_are_one_and_a_multiple(frames: int, most: int, factor: int) -> None:
    config = entry(resolution=64, video=VideoConfig(num_frames=most))
    found = bucket_of((64, 64), config, 16, frames=frames, frame_factor=factor).frames
    assert (found - 1) % factor == 0
    assert found <= min(frames, most) < found + factor


@given(SIDES, SIDES, st.sampled_from(["center", "random"]), st.booleans(), st.integers(0, 2**160 - 1))
def test_a_crop_has_the_shape_of_its_bucket_and_lies_in_the_picture(
    width: int, height: int, style: Any, crop: bool, content: int
) -> None:
    config = entry(resolution=512, crop=crop, crop_style=style, maximum_image_size=1024, target_downsample_size=768)
    size = (width, height)
    bucket = bucket_of(size, config, 16)
    found = crop_of(size, bucket, config, f"{content:040x}")
    left, top, right, bottom = found.box(size)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert math.isclose((right - left) / (bottom - top), bucket.width / bucket.height, rel_tol=1e-6)
    if style == "center":
        assert math.isclose(left, width - right, abs_tol=1e-6)
        assert math.isclose(top, height - bottom, abs_tol=1e-6)


def test_random_crops_follow_the_content_alone() -> None:
    config, size = entry(resolution=512, crop=True, crop_style="random"), (2048, 512)
    bucket = bucket_of(size, config, 16)
    lefts = [crop_of(size, bucket, config, f"{i:016x}").left for i in range(400)]
    assert lefts == [crop_of(size, bucket, config, f"{i:016x}").left for i in range(400)]
    assert min(lefts) < 0.02
    assert max(lefts) > 0.73  # of the 0.75 that a quarter of the width can move
    assert abs(sum(lefts) / 400 - 0.375) < 0.03


def test_crops_are_taken_from_the_downsampled_picture() -> None:
    plain = entry(resolution=512, crop=True)
    zoomed = entry(resolution=512, crop=True, maximum_image_size=2048, target_downsample_size=1024)
    shares = {}
    for name, config, side in (("plain", plain, 4096), ("large", zoomed, 4096), ("middle", zoomed, 2048)):
        bucket = bucket_of((side, side), config, 16)
        crop = crop_of((side, side), bucket, config, "0" * 40)
        shares[name] = crop.right - crop.left
    assert shares == {"plain": 1.0, "large": 0.5, "middle": 0.25}  # 512 of 1024, and 512 of 2048 as it is


def test_what_is_too_small_shows() -> None:
    assert enlargement((500, 2000), Bucket(512, 512)) == 512 / 500
    assert enlargement((2048, 1024), Bucket(512, 512)) == 0.5
    assert measure((100, 400), "pixel") == 100
    assert measure((100, 400), "pixel_area") == 200
    assert measure((1024, 2048), "area") == 2


groups_and_repeats = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30).filter(
    lambda pairs: any(count for _, count in pairs)
)


@given(groups_and_repeats, st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 3))
def test_every_epoch_visits_every_sample_and_a_batch_has_one_group(
    pairs: list[tuple[int, int]], batch: int, seed: int, epoch: int
) -> None:
    groups, repeats = [group for group, _ in pairs], [count for _, count in pairs]
    order = BucketOrder(groups, repeats, batch=batch, seed=seed)
    batches = [order.batch(index).tolist() for index in range(epoch * order.batches, (epoch + 1) * order.batches)]
    assert all(len(members) == batch and len({groups[i] for i in members}) == 1 for members in batches)
    visits = Counter(chain(*batches))
    for i, count in enumerate(repeats):
        assert visits[i] >= count
        assert count or not visits[i]
    # what fills up is less than one batch of each group
    entries = Counter({group: sum(c for g, c in pairs if g == group) for group in groups})
    assert len(batches) == sum(math.ceil(count / batch) for count in entries.values())


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 5))
def test_no_sample_comes_twice_in_a_batch_if_its_group_has_enough(groups: list[int], batch: int, epoch: int) -> None:
    order = BucketOrder(groups, [1] * len(groups), batch=batch, seed=0)
    for index in range(epoch * order.batches, (epoch + 1) * order.batches):
        members = order.batch(index).tolist()
        assert len(set(members)) == min(batch, groups.count(groups[members[0]]))


@given(groups_and_repeats, st.integers(1, 5), st.lists(st.integers(0, 500), min_size=1, max_size=5))
def test_the_answer_does_not_depend_on_what_was_asked_before(
    pairs: list[tuple[int, int]], batch: int, indices: list[int]
) -> None:
    settings = {"batch": batch, "seed": 3}
    groups, repeats = [group for group, _ in pairs], [count for _, count in pairs]
    order = BucketOrder(groups, repeats, **settings)
    for index in indices:
        assert order.batch(index).tolist() == BucketOrder(groups, repeats, **settings).batch(index).tolist()


def test_batches_of_all_groups_are_mixed_and_epochs_differ() -> None:
    groups = ["wide"] * 40 + ["tall"] * 40
    order = BucketOrder(groups, [1] * 80, batch=4, seed=0)
    epochs = [[order.batch(i).tolist() for i in range(e * 20, e * 20 + 20)] for e in range(2)]
    kinds = [[groups[members[0]] for members in epoch] for epoch in epochs]
    changes = sum(a != b for a, b in zip(kinds[0], kinds[0][1:], strict=False))
    assert changes > 4
    assert kinds[0] != kinds[1]
    assert sorted(map(sorted, epochs[0])) != sorted(map(sorted, epochs[1]))
    assert epochs[0] != [BucketOrder(groups, [1] * 80, batch=4, seed=1).batch(i).tolist() for i in range(20)]


def test_one_sample_fills_a_batch() -> None:
    assert BucketOrder(["a"], [1], batch=4, seed=0).batch(7).tolist() == [0, 0, 0, 0]


def test_nothing_to_order_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"at least 1 sample to train on, there are 0"):
        BucketOrder(["a"], [0], batch=1, seed=0)
    with pytest.raises(ConfigError, match=r"train_batch_size times the processes is 0"):
        BucketOrder(["a"], [1], batch=0, seed=0)
