"""The Frechet distance against closed forms, and against scipy's matrix square root."""

import numpy as np
import pytest

from tread.errors import ConfigError
from tread.evaluate.frechet import frechet_distance


def covariance(rng: np.random.Generator, width: int, rank: int) -> np.ndarray:
    root = rng.normal(size=(width, rank))
    return root @ root.T


def test_normals_that_share_axes_have_a_closed_form() -> None:
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(6, 6))).Q
    first, second = rng.uniform(0.1, 5, size=(2, 6))
    means = rng.normal(size=(2, 6))
    expected = ((means[0] - means[1]) ** 2).sum() + ((np.sqrt(first) - np.sqrt(second)) ** 2).sum()
    found = frechet_distance(means[0], axes * first @ axes.T, means[1], axes * second @ axes.T)
    assert found == pytest.approx(expected, rel=1e-12)


def test_small_eigenvalues_count() -> None:
    """Variances over eight powers of ten, against one of the same directions."""
    axes = np.linalg.qr(np.random.default_rng(5).normal(size=(5, 5))).Q
    first, second = np.array([1, 1e-2, 1e-4, 1e-6, 1e-8]), np.full(5, 1e-8)
    expected = ((np.sqrt(first) - np.sqrt(second)) ** 2).sum()
    found = frechet_distance(np.zeros(5), axes * first @ axes.T, np.zeros(5), axes * second @ axes.T)
    assert found == pytest.approx(expected, abs=1e-12)


def test_it_is_never_negative() -> None:
    for seed in range(40):
        same = covariance(np.random.default_rng(seed), 12, 30)
        assert frechet_distance(np.zeros(12), same, np.zeros(12), same) >= 0


def test_two_dimensions_have_a_closed_form() -> None:
    rng = np.random.default_rng(1)
    first, second = covariance(rng, 2, 2), covariance(rng, 2, 2)
    product = first @ second  # tr sqrt(P) = sqrt(tr P + 2 sqrt(det P))
    root = np.sqrt(np.trace(product) + 2 * np.sqrt(np.linalg.det(product)))
    expected = np.trace(first) + np.trace(second) - 2 * root
    assert frechet_distance(np.zeros(2), first, np.zeros(2), second) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("rank", [40, 10])
def test_against_scipy(rank: int) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    rng = np.random.default_rng(2)
    first, second = covariance(rng, 20, rank), covariance(rng, 20, 40)
    expected = np.trace(first + second - 2 * linalg.sqrtm(first @ second).real)
    assert frechet_distance(np.zeros(20), first, np.zeros(20), second) == pytest.approx(expected, rel=1e-6)


def test_equal_and_singular_is_zero_and_order_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    first, second = covariance(rng, 30, 5), covariance(rng, 30, 40)
    mean = rng.normal(size=30)
    assert frechet_distance(mean, first, mean, first) == pytest.approx(0, abs=1e-10)
    there = frechet_distance(mean, first, np.zeros(30), second)
    assert there == pytest.approx(frechet_distance(np.zeros(30), second, mean, first), rel=1e-12)


def test_single_precision_is_computed_in_double() -> None:
    rng = np.random.default_rng(4)
    sides = [(rng.normal(size=20).astype(np.float32), covariance(rng, 20, 40).astype(np.float32)) for _ in range(2)]
    exact = frechet_distance(*(array.astype(np.float64) for side in sides for array in side))
    assert frechet_distance(*sides[0], *sides[1]) == exact


def test_other_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="one side has 2 features and the other 3; give both the same `features`"):
        frechet_distance(np.zeros(2), np.eye(2), np.zeros(3), np.eye(3))
