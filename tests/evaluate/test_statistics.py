"""Tallies: the same as numpy on everything at once, however the images came in."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tread.errors import DataError
from tread.evaluate import statistics
from tread.evaluate.activations import Activations
from tread.evaluate.metrics import inception_score
from tread.evaluate.statistics import Moments, Statistics, Tally, read_statistics


def activations(count: int) -> Activations:
    rng = np.random.default_rng(0)
    pool, spatial = rng.normal(size=(count, 4)) + 3, rng.normal(size=(count, 6))
    arrays = (pool.astype(np.float32), spatial.astype(np.float32), rng.dirichlet(np.ones(5), size=count))
    return Activations(*map(torch.from_numpy, arrays))


def part(whole: Activations, first: int, stop: int) -> Activations:
    return Activations(*(None if x is None else x[first:stop] for x in whole))  # pyright: ignore[reportArgumentType]


def tallied(whole: Activations, first: int, stop: int, size: int) -> Tally:
    tally = Tally("Test", len(whole.pool))
    for start in range(first, stop, size):
        tally.add(part(whole, start, min(start + size, stop)), start)
    return tally


def assert_same(a: Statistics, b: Statistics) -> None:
    assert a.count == b.count
    assert a.spatial is not None
    assert b.spatial is not None
    assert a.vectors is not None
    assert b.vectors is not None
    sides = (
        [*side.pool, *spatial, vectors, np.array(side.score)]
        for side, spatial, vectors in ((a, a.spatial, a.vectors), (b, b.spatial, b.vectors))
    )
    for x, y in zip(*sides, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


def test_batches_give_what_numpy_gives_at_once() -> None:
    whole = activations(101)
    found = tallied(whole, 0, 101, 8).statistics()
    pool = whole.pool.double().numpy()
    np.testing.assert_allclose(found.pool.mean, pool.mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.pool.covariance, np.cov(pool, rowvar=False), rtol=1e-12)
    assert found.spatial is not None
    assert whole.spatial is not None
    np.testing.assert_allclose(
        found.spatial.covariance, np.cov(whole.spatial.double().numpy(), rowvar=False), rtol=1e-10
    )
    assert found.vectors is not None
    assert (found.vectors == whole.pool.numpy()).all()


def test_moments_far_from_zero_keep_their_digits() -> None:
    rows = np.random.default_rng(0).normal(size=(1000, 3)) * 1e-3 + 1e5
    moments = Moments(3)
    for batch in np.array_split(rows, 37):
        moments.add(batch)
    np.testing.assert_allclose(moments.gaussian().covariance, np.cov(rows, rowvar=False), rtol=1e-6, atol=1e-13)


def test_parts_of_processes_join_to_the_whole() -> None:
    whole = activations(50)
    joined = Tally("Test", 50)
    for first, stop in ((0, 0), (0, 17), (17, 50)):
        joined.merge(tallied(whole, first, stop, 5))
    assert_same(joined.statistics(), tallied(whole, 0, 50, 50).statistics())


def test_a_saved_tally_goes_on(tmp_path: Path) -> None:
    whole = activations(50)
    tallied(whole, 0, 20, 8).save(tmp_path / "a.npz")
    again = Tally.load(tmp_path / "a.npz")
    assert again.count == 20
    again.add(part(whole, 20, 50), 20)
    assert_same(again.statistics(), tallied(whole, 0, 50, 50).statistics())


def test_splits_of_the_score_take_every_nth_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "SPLIT", 10)
    classes = torch.eye(5, dtype=torch.float64).repeat_interleave(4, 0)  # sorted by class, 20 images, two splits
    tally = Tally("Test", 20)
    tally.add(Activations(torch.zeros(20, 2), None, classes), 0)
    score = tally.score
    assert inception_score(score["counts"], score["sums"], score["logs"]) == (pytest.approx(5), pytest.approx(0))


@pytest.mark.parametrize(("total", "splits"), [(9, 1), (10, 1), (19, 1), (20, 2), (29, 2)])
def test_a_split_has_at_least_so_many_images(total: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "SPLIT", 10)
    assert tallied(activations(total), 0, total, 7).score["counts"].shape == (splits,)


def test_the_score_of_a_pass_is_the_definition() -> None:
    whole = activations(40)
    assert whole.probabilities is not None
    p = whole.probabilities.numpy()
    expected = np.exp((p * np.log(p / p.mean(0))).sum(1).mean())
    assert tallied(whole, 0, 40, 7).statistics().score == (pytest.approx(expected, rel=1e-12), 0)


def test_published_statistics_are_read(tmp_path: Path) -> None:
    arrays = {"mu": np.ones(3), "sigma": np.eye(3), "mu_s": np.zeros(2), "sigma_s": np.eye(2)}
    np.savez(tmp_path / "a.npz", count=np.array(50), features=np.array("Test"), **arrays)
    np.savez(tmp_path / "b.npz", mu=np.ones(3), sigma=np.eye(3))
    found, bare = (read_statistics(tmp_path / name) for name in ("a.npz", "b.npz"))
    assert found is not None
    assert bare is not None
    assert (found.features, found.count, bare.features, bare.count) == ("Test", 50, "Inception", None)
    assert found.spatial is not None
    assert bare.spatial is None
    assert [*map(np.ndarray.tolist, (*found.pool, *found.spatial))] == [array.tolist() for array in arrays.values()]


def test_features_are_kept_only_if_asked() -> None:
    tally = Tally("Test", 20, keep_vectors=False)
    tally.add(activations(20), 0)
    assert tally.statistics().vectors is None


def test_what_cannot_be_measured_is_said() -> None:
    tally = Tally("Test", 2)
    with pytest.raises(DataError, match="no images were seen"):
        tally.statistics()
    with pytest.raises(DataError, match=r"among 3\.\.4 has features that are not finite"):
        tally.add(Activations(torch.tensor([[0.0], [torch.nan]])), 3)
    tally.add(Activations(torch.zeros(1, 2)), 0)
    with pytest.raises(DataError, match=r"1 image cannot have a covariance"):
        tally.statistics()
