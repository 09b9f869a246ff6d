"""The tokens that a route keeps: their scores and the kept indices.

- Scores are 64-bit integers. Ranking integers has no rounding, so eager, compiled, CPU and GPU agree on every
  index, and a stable sort settles ties by token position.
- Only `check_selection`, which runs outside the forward, synchronises with the device.
"""

import torch
from torch import Tensor

from tread.errors import ConfigError

_FORCED = 1 << 62  # above every score


def check_mask(mask: object) -> None:
    """Refuse a force mask that is not bool (B, S), B at least 1."""
    if not isinstance(mask, Tensor):
        raise ConfigError(f"force_keep is a {type(mask).__name__}; it must be a tensor, bool (B, S).")
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ConfigError(f"force_keep is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool (B, S).")
    if not len(mask):
        raise ConfigError(f"force_keep has shape {tuple(mask.shape)}, an empty batch; it needs at least one sample.")


def check_selection(ids: object, name: str) -> int:
    """The largest index of a given selection, which must be int64 (B, K) and ascending from 0. Synchronises once."""
    if not isinstance(ids, Tensor):
        raise ConfigError(f"{name} is a {type(ids).__name__}; it must be a tensor, int64 (B, K).")
    if ids.dtype != torch.int64 or ids.ndim != 2 or not ids.numel():
        raise ConfigError(f"{name} is {ids.dtype} of shape {tuple(ids.shape)}; it must be int64 (B, K), K at least 1.")
    ascends = (ids.diff(dim=1) > 0).all()
    low, high, ascending = torch.stack((ids.min(), ids.max(), ascends)).tolist()  # one synchronisation
    if not ascending:
        raise ConfigError(f"{name} is not ascending; sort each sample's indices, each of them once.")
    if low < 0:
        raise ConfigError(f"{name} has the index {low}; tokens count from 0.")
    return high


def l1_rank(x: Tensor) -> Tensor:
    """The rank of each token of x (B, S, D) by its L1 norm, 0 for the smallest -> (B, S)."""
    norms = x.detach().abs().sum(-1, dtype=torch.float32)  # (B, S)
    return norms.argsort(dim=-1, stable=True).argsort(dim=-1)  # (B, S)


def mixed_score(noise: Tensor, rank: Tensor, importance: float) -> Tensor:
    """(1 - importance) * uniform + importance * rank / S as integers, from 32 random bits and ranks (B, S)."""
    weight = round(importance * 65536)
    return (65536 - weight) * noise + weight * ((rank << 32) // rank.shape[-1])  # (B, S)


def select(score: Tensor, kept: int, force_keep: Tensor | None = None) -> Tensor:
    """The `kept` highest scores of (B, S), every forced token (B, S) among them -> ascending indices (B, K)."""
    if force_keep is not None:
        score = score.masked_fill(force_keep, _FORCED)
    order = score.argsort(dim=-1, descending=True, stable=True)  # (B, S)
    return order[:, :kept].sort(dim=-1).values  # (B, K)
