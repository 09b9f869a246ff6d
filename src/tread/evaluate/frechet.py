"""The Frechet distance between two normal distributions.

- Computed in float64 without a matrix square root of a product: the trace of (S1 S2)^1/2 is the sum of the singular
  values of S1^1/2 S2^1/2, which stays accurate when too few images make a covariance singular.
"""

import numpy as np

from tread.errors import ConfigError


# Dowson and Landau 1982 Eq. 4; as FID: Heusel et al. 2017 (arXiv 1706.08500) Eq. 6
def frechet_distance(mean: np.ndarray, covariance: np.ndarray, mean_2: np.ndarray, covariance_2: np.ndarray) -> float:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^1/2); means (D,), covariances (D, D).

    >>> frechet_distance(np.zeros(2), np.eye(2), np.full(2, 3.0), 4 * np.eye(2))
    20.0
    """
    if mean.shape != mean_2.shape:
        raise ConfigError(
            f"one side has {mean.shape[0]} features and the other {mean_2.shape[0]}; give both the same `features`."
        )
    first, second = (np.asarray(matrix, np.float64) for matrix in (covariance, covariance_2))
    # S^1/2 = V L V^T; the outer V are orthogonal and do not change the singular values
    shared = np.linalg.svd(_root(first).T @ _root(second), compute_uv=False).sum()
    gap = np.asarray(mean, np.float64) - np.asarray(mean_2, np.float64)  # (D,)
    # rounding may leave equal distributions slightly below zero
    return max(float(gap @ gap + np.trace(first) + np.trace(second) - 2 * shared), 0.0)


def _root(covariance: np.ndarray) -> np.ndarray:
    """The factor V L of S = V L^2 V^T, (D, rank)."""
    values, vectors = np.linalg.eigh(covariance)  # (D,), (D, D)
    nonzero = values > values[-1] * len(values) * np.finfo(np.float64).eps  # smaller eigenvalues are rounding
    return vectors[:, nonzero] * np.sqrt(values[nonzero])
