"""Metrics on single features: precision and recall, the kernel distance; and the Inception Score.

- Distances and kernels are computed in float64, in blocks of rows, so that memory is linear in the number of images.
- The random subsets of the kernel distance are a hash of their indices, so it is reproducible.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tread.routing import noise

NEIGHBOURS = 3
BLOCK = 512
_SUBSET_WORD = int.from_bytes(b"kid")


# Kynkäänniemi et al. 2019 (arXiv 1904.06991) Eqs. 1 and 2
def precision_recall(samples: Tensor, reference: Tensor) -> tuple[float, float]:
    """The share of samples (N, D) inside the reference's manifold, and of the reference (M, D) inside the samples'.

    A manifold is the union of balls around each feature that reach its k-th nearest neighbour.
    """
    centre = reference.double().mean(0)  # |a|^2 + |b|^2 - 2ab cancels catastrophically far from the origin
    samples, reference = samples.double() - centre, reference.double() - centre
    precision = _inside(samples, reference, _radii(reference))
    recall = _inside(reference, samples, _radii(samples))
    return precision, recall


def _squared_distances(rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
    """Squared distances of all pairs, (BLOCK, M) at a time."""
    norms = columns.square().sum(1)  # (M,)
    for block in rows.split(BLOCK):
        yield (block.square().sum(1, keepdim=True) + norms - 2 * block @ columns.T).clamp(min=0)


def _radii(features: Tensor) -> Tensor:
    """Squared distance of each feature to its k-th neighbour, not counting itself, (N,)."""
    rank = min(NEIGHBOURS + 1, features.shape[0])
    return torch.cat([block.kthvalue(rank, dim=1).values for block in _squared_distances(features, features)])


def _inside(points: Tensor, centres: Tensor, radii: Tensor) -> float:
    hits = sum(int((block <= radii).any(1).sum()) for block in _squared_distances(points, centres))
    return hits / points.shape[0]


# Bińkowski et al. 2018 (arXiv 1801.01401) Eq. 4, with the kernel of section 4: (x y / D + 1)^3
def kernel_distance(
    samples: Tensor, reference: Tensor, *, subsets: int = 100, subset_size: int = 1000
) -> tuple[float, float]:
    """Unbiased squared MMD, (N, D) against (M, D): mean and standard deviation over subsets.

    It may be negative, as it is unbiased.
    """
    size = min(subset_size, samples.shape[0], reference.shape[0])
    if size == samples.shape[0] == reference.shape[0]:  # every subset is the full set
        subsets = 1
    estimates = np.empty(subsets)
    for subset in range(subsets):
        x = samples[_draw(samples, subset, 0, size)].double()  # (size, D)
        y = reference[_draw(reference, subset, 1, size)].double()  # (size, D)
        within = sum(_kernel(side, side).fill_diagonal_(0).sum() for side in (x, y)) / (size * (size - 1))
        estimates[subset] = float(within - 2 * _kernel(x, y).mean())
    return float(estimates.mean()), float(estimates.std())


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _draw(features: Tensor, subset: int, side: int, size: int) -> Tensor:
    """`size` distinct row indices."""
    keys = noise.bits(_SUBSET_WORD, subset, side, torch.arange(features.shape[0], device=features.device))  # (N,)
    return keys.argsort(stable=True)[:size]


# Salimans et al. 2016 (arXiv 1606.03498) section 4: exp(E KL(p(y|x) || p(y)))
def inception_score(counts: np.ndarray, sums: np.ndarray, negentropies: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation over splits, from each split's count (S,), sum of p (S, C), sum of p log p (S,)."""
    marginal = sums / counts[:, None]  # (S, C)
    logs = np.log(marginal, where=marginal > 0, out=np.zeros_like(marginal))
    scores = np.exp(negentropies / counts - (marginal * logs).sum(1))  # (S,)
    return float(scores.mean()), float(scores.std())
