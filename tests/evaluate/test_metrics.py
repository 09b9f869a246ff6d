"""Precision, recall, kernel distance and Inception Score against plain computations and known answers."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tread.evaluate import metrics
from tread.evaluate.metrics import inception_score, kernel_distance, precision_recall


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def plain_share(points: Tensor, centres: Tensor, k: int) -> float:
    """Point by point, from the definition."""
    hits = 0
    radii = [
        sorted(float((a - b).norm()) for j, b in enumerate(centres) if j != i)[k - 1] for i, a in enumerate(centres)
    ]
    for point in points:
        hits += any(float((point - c).norm()) <= r for c, r in zip(centres, radii, strict=True))
    return hits / len(points)


def test_precision_and_recall_are_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "BLOCK", 7)
    samples, reference = normal(40, 3) + 1, normal(50, 3, seed=1) * 1.5
    found = precision_recall(samples, reference)
    assert found == (plain_share(samples, reference, 3), plain_share(reference, samples, 3))
    assert 0 < found[1] < found[0] < 1


def test_a_sample_on_the_edge_of_a_manifold_is_inside() -> None:
    """Four equal features have balls of radius 0, which hold that point."""
    copies, apart = torch.full((4, 2), 3.0), torch.tensor([[3.0, 4.0]]).repeat(4, 1)
    assert precision_recall(copies, copies) == (1, 1)
    assert precision_recall(apart, copies) == (0, 0)


def test_a_narrow_model_is_precise_and_recalls_little_wherever_the_features_lie() -> None:
    samples, reference = normal(200, 4) * 0.1, normal(200, 4, seed=1)
    precision, recall = precision_recall(samples, reference)
    assert precision > 0.95
    assert recall < 0.1
    assert precision_recall(samples + 1e6, reference + 1e6) == (precision, recall)
    assert precision_recall(reference, reference) == (1, 1)
    assert precision_recall(samples + 100, reference) == (0, 0)


def test_kernel_distance_of_the_whole_set_is_the_definition() -> None:
    x, y = normal(12, 5), normal(12, 5, seed=1) + 0.5
    total = 0.0
    for i in range(12):
        for j in range(12):
            within = 0.0 if i == j else float((x[i] @ x[j] / 5 + 1) ** 3 + (y[i] @ y[j] / 5 + 1) ** 3)
            total += within / (12 * 11) - 2 * float((x[i] @ y[j] / 5 + 1) ** 3) / 144
    mean, std = kernel_distance(x, y, subsets=3)
    assert mean == pytest.approx(total, rel=1e-12)
    assert std == pytest.approx(0, abs=1e-12)


def test_one_subset_of_everything_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def draw(features: Tensor, subset: int, side: int, size: int) -> Tensor:
        taken.append(subset)
        return torch.arange(size)

    monkeypatch.setattr(metrics, "_draw", draw)
    kernel_distance(normal(12, 5), normal(12, 5, seed=1))
    assert taken == [0, 0]
    kernel_distance(normal(12, 5), normal(13, 5, seed=1), subsets=3)
    assert taken[2:] == [0, 0, 1, 1, 2, 2]


def test_kernel_distance_is_unbiased_and_repeatable() -> None:
    x, y = normal(600, 8), normal(600, 8, seed=1)
    mean, std = kernel_distance(x, y, subsets=50, subset_size=100)
    assert abs(mean) < std
    assert kernel_distance(x, y, subsets=50, subset_size=100) == (mean, std)
    assert kernel_distance(x + 1, y, subsets=50, subset_size=100)[0] > 10 * std


def test_the_subsets_of_both_sides_are_drawn_apart() -> None:
    """Of a set compared with itself, equal subsets would pair each feature with itself, far below 0."""
    x = normal(600, 8)
    mean, std = kernel_distance(x, x, subsets=50, subset_size=100)
    paired = kernel_distance(x[:100], x[:100])[0]
    assert abs(mean) < std
    assert paired < -3 * std


def score(probabilities: np.ndarray) -> float:
    logs = np.log(probabilities, where=probabilities > 0, out=np.zeros_like(probabilities))
    return inception_score(
        np.array([len(probabilities)]), probabilities.sum(0)[None], (probabilities * logs).sum()[None]
    )[0]


def test_inception_score_is_the_number_of_classes_at_best_and_one_at_worst() -> None:
    assert score(np.eye(10).repeat(3, 0)) == pytest.approx(10)
    assert score(np.full((30, 10), 0.1)) == pytest.approx(1)
    assert score(np.eye(10)[[4] * 30]) == pytest.approx(1)
    p = np.random.default_rng(0).dirichlet(np.ones(10), size=30)
    divergence = (p * np.log(p / p.mean(0))).sum(1).mean()
    assert score(p) == pytest.approx(np.exp(divergence), rel=1e-12)
